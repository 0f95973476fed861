"""How many sequences may need more than k is fixed before any of them is looked at."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binom

import rnnaudit
from rnnaudit import depth, evidence
from rnnaudit.errors import UsageError
from rnnaudit.examine import Settings
from rnnaudit.model import RELU, ElmanCell, InitialState, Recurrence

pytestmark = pytest.mark.usefixtures("one_thread")

DECAY, T = 0.9, 100


def pulses(sizes):
    x = torch.zeros(len(sizes), T, 1, dtype=torch.float64)
    x[:, 0, 0] = torch.tensor(sizes)
    return x


def needs(size, eps):
    """Return K of a pulse that h' = 0.9 h + x reads: the smallest k with 0.9^k size ≤ ε."""
    return math.ceil(math.log(size / eps) / -math.log(DECAY))


def measured(sizes, eps, exceed):
    one = torch.ones(1, 1, dtype=torch.float64)
    cell = ElmanCell(DECAY * one, one, torch.zeros(1).double(), RELU)
    r = Recurrence("r", 0, cell, InitialState(torch.zeros(1).double()))
    study = depth.study_recurrence(r, pulses(sizes))
    failures = Settings(eps=eps, exceed=exceed).failures(len(sizes))
    found = evidence.measured_depth(study, eps, failures=failures)
    return found, evidence.caveats(study, found, eps, "r", exceed)


def test_the_depth_is_the_largest_that_is_not_set_aside():
    sizes = [1e-3] * 99 + [1e-2]  # of 100 sequences one may be set aside for 5 %
    every, _ = measured(sizes, 1e-4, None)
    assert (every.k, every.set_aside) == (needs(1e-2, 1e-4), 0)
    found, _ = measured(sizes, 1e-4, 0.05)
    assert (found.k, found.set_aside) == (needs(1e-3, 1e-4), 1)
    assert found.exceed_probability <= 0.05
    assert binom.cdf(1, 100, found.exceed_probability) == pytest.approx(0.05)
    assert binom.cdf(2, 100, 0.05) > 0.05


def test_a_memory_beyond_the_data_may_be_set_aside_too():
    found, _ = measured([1e-3] * 99 + [1.0], 1e-4, 0.05)
    assert (found.k, found.longer_than) == (needs(1e-3, 1e-4), None)
    longer, warnings = measured([1e-3] * 98 + [1.0] * 2, 1e-4, 0.05)
    assert longer.k is None
    assert [w.id for w in warnings] == ["RA202"]
    assert "on at least 2 of 100 sequences" in warnings[0].message


def test_too_few_sequences_for_the_share_are_said_to_be():
    found, (few,) = measured([1e-3] * 30, 1e-4, 0.05)
    assert found.set_aside == 0
    assert few.id == "RA203"
    assert "30 sequences cannot show at 95\u00a0% confidence that at most 5\u00a0%" in few.message
    assert few.message.endswith("that takes 59")


@pytest.mark.parametrize(("exceed", "confidence"), [(0.05, 0.95), (0.01, 0.95), (0.1, 0.5)])
def test_enough_sequences_are_the_fewest_that_show_the_share(exceed, confidence):
    n = evidence.enough_sequences(exceed, confidence)
    assert evidence.allowed_failures(n, exceed, confidence) == 0
    assert evidence.allowed_failures(n - 1, exceed, confidence) is None


def test_a_truncation_serves_the_others_and_names_what_it_does_not(tmp_path):
    weights = {"weight_ih": 1.0, "weight_hh": DECAY, "bias_ih": 0.0, "bias_hh": 0.0}
    state = {
        f"rnn.{name}_l0": torch.full((1, 1) if "w" in name else (1,), value)
        for name, value in weights.items()
    }
    torch.save(state, tmp_path / "leaky.pt")
    report = rnnaudit.truncate(
        tmp_path / "leaky.pt",
        tmp_path / "leaky.onnx",
        data=pulses([1e-3] * 60 + [5e-3] + [1e-3] * 39),
        eps=1e-4,
        exceed=0.05,
        evidence="measured",
        input_range=(-1e-3, 1e-3),
    )
    assert report.settings["exceed"] == 0.05
    assert report.depth.measured.set_aside == 1
    assert report.equivalence.reason == ""
    (aside,) = (f for f in report.findings if f.id == "RA306")
    assert "set aside by --exceed: 60 (1)" in aside.message
    # Its own inputs are verified too, and they may ask for more than the data do.
    assert report.export.truncations[0].depth >= needs(1e-3, 5e-5)


@pytest.mark.parametrize("exceed", [0.0, 1.0, -0.1, math.nan])
def test_a_share_that_makes_no_sense_is_refused(exceed):
    with pytest.raises(UsageError, match="the share that may exceed ε must be between 0 and 1"):
        Settings(eps=1e-3, exceed=exceed)
