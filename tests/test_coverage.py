"""The stated confidence holds when whole audits are simulated: random models, random data."""

from __future__ import annotations

import math

import pytest
import torch

from rnnaudit import depth, evidence
from rnnaudit.examine import Settings
from rnnaudit.model import ElmanCell, GRUCell, InitialState, LSTMCell, Recurrence

pytestmark = pytest.mark.usefixtures("one_thread")

H, I, T, EPS = 3, 2, 24, 1e-2  # noqa: E741
UNSEEN = 500
"""Sequences that tell how many of all exceed ε at the depth that an audit chose."""


def drawn(rng, *shape):
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def model(rng):
    """Draw an Elman cell, a GRU or an LSTM that forgets sometimes quickly, sometimes slowly."""
    gain = 0.3 + 1.2 * float(torch.rand(1, generator=rng))
    kind = int(torch.randint(3, (1,), generator=rng))
    U, W = (gain / math.sqrt(H)) * drawn(rng, 4 * H, H), drawn(rng, 4 * H, I)
    b = drawn(rng, 4 * H)
    cell = (
        ElmanCell(U[:H], W[:H], b[:H]),
        GRUCell(W[: 3 * H], U[: 3 * H], b[: 3 * H], torch.zeros(3 * H).double()),
        LSTMCell(W, U, b),
    )[kind]
    return Recurrence("r", 0, cell, InitialState(torch.zeros(cell.state_size).double()))


def data(rng, count):
    """Draw sequences of very different sizes, so that some are remembered far longer."""
    size = (1.5 * drawn(rng, count, 1, 1)).exp()
    return size * drawn(rng, count, T, I)


def misses(audits, exceed, seed):
    """Count audits that state a share which more of all sequences exceed, and those that state any.

    The confidence is of the procedure: an audit whose data are too short for a depth states
    nothing, and that counts as no miss.
    """
    rng = torch.Generator().manual_seed(seed)
    missed = stated = 0
    for _ in range(audits):
        r, n = model(rng), int(torch.randint(5, 100, (1,), generator=rng))
        failures = Settings(eps=EPS, exceed=exceed).failures(n)
        study = depth.study_recurrence(r, data(rng, n))
        found = evidence.measured_depth(study, EPS, failures=failures)
        if found.k is None:
            continue
        unseen = depth.study_recurrence(r, data(rng, UNSEEN)).needed(EPS)
        more = sum(k is None or k > found.k for k in unseen) / UNSEEN
        stated += 1
        missed += more > found.exceed_probability
    return missed, stated


def allowed(audits):
    """Return what a rate of 5 % gives at most in all but a fortieth of such studies."""
    return 0.05 * audits + 2 * math.sqrt(0.05 * 0.95 * audits)


@pytest.mark.parametrize("exceed", [None, 0.2])
def test_the_confidence_holds_in_audits_of_random_models(exceed):
    missed, stated = misses(25, exceed, 5)
    assert stated >= 10
    assert missed <= allowed(25)


@pytest.mark.slow
@pytest.mark.parametrize("exceed", [None, 0.2])
def test_the_confidence_holds_over_a_thousand_audits(exceed):
    missed, stated = misses(1000, exceed, 11)
    assert stated >= 400
    assert missed <= allowed(1000)


def test_a_rank_chosen_after_looking_would_fail_the_same_test():
    """Choosing how many to set aside by how well it turns out breaks the promise."""
    rng = torch.Generator().manual_seed(3)
    missed, n, audits = 0, 60, 2000
    for _ in range(audits):
        K = torch.rand(n, generator=rng).sort().values  # a continuous K with P(K > k) = 1 − k
        # Looking first: take the rank whose gap to the next is largest among the last six.
        last = K[-7:]
        r = 6 - int((last[1:] - last[:-1]).argmax())
        missed += 1 - float(K[n - 1 - r]) > evidence.exceed_probability(n, r, 0.95)
    assert missed > allowed(audits)
