"""Settings for every test: reproducible draws in CI, two threads, no deadline."""

from __future__ import annotations

import os

# Waiting threads soon sleep, as in the program: tests share their cores with child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# No folder can be made there: what a test sees is never an earlier run's.
os.environ["RNNAUDIT_CACHE_DIR"] = os.devnull

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "local", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

torch.set_num_threads(2)


@pytest.fixture(scope="module")
def one_thread():
    """Run a module whose matrices are small: a second thread would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
