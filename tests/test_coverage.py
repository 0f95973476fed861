"""The confidence that an audit states is the share of audits whose statement is true.

Each random cell has a finite population of input sequences, whose depths are found by brute
force. Audits draw their sequences from it with replacement, so that the share of sequences
that exceed ε at the depth which an audit states is known exactly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.stats import binom

from rnnaudit import cells
from rnnaudit.depth import study_recurrence
from rnnaudit.evidence import exceed_probability, measured_depth
from rnnaudit.examine import Settings
from rnnaudit.model import ElmanCell, GRUCell, InitialState, LSTMCell, Recurrence
from tests.strategies import draw

pytestmark = pytest.mark.usefixtures("one_thread")

EPS, T, POPULATION = 1e-2, 48, 200
DOUBT = 1e-4
"""Probability that a true statement of confidence fails its test."""


def random_recurrence(kind, rng):
    H, gain = 3, 0.2 + 0.5 * float(torch.rand(1, generator=rng))
    U = [gain * draw(rng, gates * H, H) for gates in (1, 3, 4)]
    W = [draw(rng, gates * H, 2) for gates in (1, 3, 4)]
    b = [0.3 * draw(rng, gates * H) for gates in (1, 3, 4)]
    if kind == "elman":
        cell = ElmanCell(U[0], W[0], b[0])
    elif kind == "gru":
        cell = GRUCell(W[1], U[1], b[1], 0.3 * draw(rng, 3 * H))
    else:
        cell = LSTMCell(W[2], U[2], b[2])
    return Recurrence("r", 0, cell, InitialState(torch.zeros(cell.state_size).double()))


def random_population(rng):
    """Noise of a size of its own for each sequence; some come to rest after a while."""
    x = draw(rng, POPULATION, 1, 1).exp() * draw(rng, POPULATION, T, 2)
    silent = torch.randint(T // 2, 2 * T, (POPULATION, 1, 1), generator=rng)
    return torch.where(torch.arange(T).view(1, T, 1) < silent, x, 0.0)


def brute_force(recurrence, x):
    """Return K of each sequence: restart before every step, and look at every depth."""
    cell, start = recurrence.cell, recurrence.initial.value
    full = start.expand(len(x), -1)
    runs, K = [], torch.zeros(len(x), dtype=torch.long)
    restarted = start.expand(len(x), T + 1, -1)  # as if begun k steps before each position
    for t in range(T):
        full = cells.step(cell, full, x[:, t])
        runs.append(full)
    true = torch.stack(runs, dim=1)
    gap = cells.output(cell, start - true)
    K[gap.abs().amax((1, 2)) > EPS] = 1
    for k in range(1, T):
        restarted = cells.step(cell, restarted[:, :-1], x[:, k - 1 :])
        gap = cells.output(cell, restarted - true[:, k - 1 :])
        K[gap.abs().amax((1, 2)) > EPS] = k + 1
    return K


def drawn(study, rows):
    """Return the study of these sequences alone: each is measured by itself."""
    return replace(
        study,
        errors=study.errors[rows],
        lengths=(T,) * len(rows),
        horizons=(T,) * len(rows),
        resolutions=tuple(study.resolutions[i] for i in rows.tolist()),
    )


def measured_populations(count, seed):
    """Return for random models the true depths of their population, and a study of it."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        recurrence = random_recurrence(("elman", "gru", "lstm")[number % 3], rng)
        x = random_population(rng)
        study = study_recurrence(recurrence, x)
        few = torch.randint(POPULATION, (8,), generator=rng)
        assert study_recurrence(recurrence, x[few]).needed(EPS) == drawn(study, few).needed(EPS)
        found.append((brute_force(recurrence, x), study))
    return found


@pytest.fixture(scope="module")
def few_populations():
    return measured_populations(8, 1)


@pytest.fixture(scope="module")
def many_populations():
    return measured_populations(40, 2)


def check(populations, audits, exceed, confidence):
    """Fail where more statements are false than their confidence allows, or where none could be."""
    rng = torch.Generator().manual_seed(3)
    asked = Settings(eps=EPS, exceed=exceed, confidence=confidence)
    false = tight = stated = 0  # `tight` of them would be false at a third of the share
    for number in range(audits):
        K, study = populations[number % len(populations)]
        n = int(torch.randint(20, 80, (1,), generator=rng))
        data = drawn(study, torch.randint(POPULATION, (n,), generator=rng))
        found = measured_depth(data, EPS, confidence=confidence, failures=asked.failures(n))
        if found.k is not None:
            truth = float((found.k < K).double().mean())
            stated += 1
            false += truth > found.exceed_probability
            tight += truth > found.exceed_probability / 3
    most = binom.ppf(1 - DOUBT, audits, 1 - confidence)
    assert stated > audits / 2  # the others say that their data are too short
    assert false <= most
    assert tight > most  # a statement three times as strong would be seen to be false


@pytest.mark.parametrize(("exceed", "confidence"), [(None, 0.95), (0.1, 0.95), (0.2, 0.8)])
def test_stated_confidence_holds_in_a_thousand_simulated_audits(
    few_populations, exceed, confidence
):
    check(few_populations, 1000, exceed, confidence)


@pytest.mark.slow
@pytest.mark.parametrize("exceed", [None, 0.05, 0.2])
@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_stated_confidence_holds_over_many_random_models(many_populations, exceed, confidence):
    check(many_populations, 4000, exceed, confidence)


def test_a_rank_chosen_after_looking_would_fail_the_same_test():
    """Choosing how many to set aside by how well it turns out breaks the promise."""
    rng = torch.Generator().manual_seed(3)
    false, n, audits = 0, 60, 2000
    for _ in range(audits):
        K = torch.rand(n, generator=rng).sort().values  # a continuous K with P(K > k) = 1 − k
        # Looking first: take the rank whose gap to the next is largest among the last six.
        last = K[-7:]
        r = 6 - int((last[1:] - last[:-1]).argmax())
        false += 1 - float(K[n - 1 - r]) > exceed_probability(n, r, 0.95)
    assert false > binom.ppf(1 - DOUBT, audits, 0.05)
