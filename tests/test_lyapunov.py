"""Lyapunov exponents against theory: mean-field nets, linear cells, gates that stand still."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq

from rnnaudit import estimators
from rnnaudit.model import Activation, ElmanCell, InitialState, LSTMCell, Recurrence

pytestmark = pytest.mark.usefixtures("one_thread")


def recurrence(cell):
    return Recurrence("r", 0, cell, InitialState(torch.zeros(cell.state_size, dtype=torch.float64)))


def gaussian_mean(f):
    return quad(lambda z: f(z) * math.exp(-z * z / 2), -12, 12)[0] / math.sqrt(2 * math.pi)


def mean_field(g):
    """Return Λ₁ of h' = tanh(W h), W ~ N(0, g²/n), n → ∞ (Sompolinsky et al., 1988)."""
    q = brentq(lambda q: g * g * gaussian_mean(lambda z: math.tanh(math.sqrt(q) * z) ** 2) - q,
               1e-3, g * g)  # fmt: skip
    slope = gaussian_mean(lambda z: math.cosh(math.sqrt(q) * z) ** -4)
    return 0.5 * math.log(g * g * slope)


def random_net(n, g, seed):
    """Return the net, and one kick from the origin after which its input is zero."""
    rng = torch.Generator().manual_seed(seed)
    W = g / math.sqrt(n) * torch.randn(n, n, generator=rng, dtype=torch.float64)
    U = torch.randn(n, 4, generator=rng, dtype=torch.float64)
    return recurrence(ElmanCell(W, U, torch.zeros(n, dtype=torch.float64)))


def kicked(T):
    x = torch.zeros(4, T, 4, dtype=torch.float64)
    x[:, 0] = torch.eye(4, dtype=torch.float64)
    return x


def test_the_mean_field_formula_gives_the_known_values():
    assert mean_field(2.0) == pytest.approx(0.155, abs=1e-3)
    assert mean_field(5.0) == pytest.approx(0.532, abs=1e-3)


@pytest.mark.parametrize(("g", "tolerance"), [(2.0, 0.05), (5.0, 0.06)])
def test_random_nets_are_as_chaotic_as_mean_field_theory_says(g, tolerance):
    found = estimators.lyapunov(random_net(192, g, 0), kicked(600))
    assert found.max == pytest.approx(mean_field(g), abs=tolerance)
    assert found.half_life is None


@pytest.mark.slow
@pytest.mark.parametrize(("g", "tolerance"), [(2.0, 0.01), (5.0, 0.02)])
def test_large_random_nets_meet_mean_field_theory_closely(g, tolerance):
    exponents = [estimators.lyapunov(random_net(512, g, s), kicked(2000)).max for s in range(6)]
    assert sum(exponents) / len(exponents) == pytest.approx(mean_field(g), abs=tolerance)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(2, 6))
def test_a_linear_cell_has_the_logarithms_of_its_eigenvalues(seed, n):
    rng = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=torch.float64)).Q
    eigenvalues = torch.linspace(1.2, 0.4, n, dtype=torch.float64)
    triangle = torch.diag(eigenvalues) + torch.randn(n, n, generator=rng).double().triu(1)
    cell = ElmanCell(
        Q @ triangle @ Q.mT, torch.zeros(n, 1).double(), torch.zeros(n).double(),
        Activation("affine", 1.0, 0.0),
    )  # fmt: skip
    x = torch.zeros(1, 400, 1, dtype=torch.float64)
    found = estimators.spectrum(recurrence(cell), x, count=n)
    assert found.values == pytest.approx(eigenvalues.log().tolist(), abs=0.03)
    assert found.steps == 300


def test_an_lstm_without_weights_forgets_at_its_forget_gate_exactly():
    b = torch.tensor([0.3, 1.7, -0.4, 0.9], dtype=torch.float64)
    cell = LSTMCell(torch.zeros(4, 1).double(), torch.zeros(4, 1).double(), b)
    found = estimators.lyapunov(recurrence(cell), torch.zeros(3, 400, 1).double(), transient=250)
    exact = math.log(1 / (1 + math.exp(-1.7)))
    assert found.max == pytest.approx(exact, abs=1e-12)
    assert found.stderr == pytest.approx(0.0, abs=1e-12)
    assert found.half_life == pytest.approx(math.log(2) / -exact)


def test_the_error_bar_covers_the_truth_of_a_driven_cell():
    # One tanh unit under i.i.d. inputs: Λ₁ is a time average, so a long run gives the truth.
    one = torch.ones(1, 1, dtype=torch.float64)
    r = recurrence(ElmanCell(0.9 * one, one, torch.zeros(1).double()))
    rng = torch.Generator().manual_seed(0)
    truth = estimators.lyapunov(r, torch.randn(400, 1500, 1, generator=rng).double()).max
    covered = 0
    for _ in range(60):
        found = estimators.lyapunov(r, torch.randn(16, 80, 1, generator=rng).double())
        covered += abs(found.max - truth) <= 2.13 * found.stderr  # Student t, 15 degrees
    assert covered >= 51


def test_a_cell_that_forgets_completely_has_no_exponent():
    W = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    cell = ElmanCell(W, torch.ones(2, 1).double(), torch.zeros(2).double())
    assert estimators.lyapunov(recurrence(cell), torch.ones(2, 50, 1).double()) is None
    assert estimators.spectrum(recurrence(cell), torch.ones(2, 50, 1).double()).values[0] is None
