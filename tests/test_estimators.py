"""Estimates err on the side that their name says, and agree with dense linear algebra."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit import cells, estimators
from rnnaudit.certificates import Domain, certify
from rnnaudit.estimators import power_iteration as power
from rnnaudit.estimators import probes
from rnnaudit.estimators.expansion import expansion
from rnnaudit.model import RELU, ElmanCell, GRUCell, InitialState, LSTMCell, Recurrence
from tests.strategies import draw

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("elman", "gru", "gru-before", "lstm", "lstm-coupled", "lstm-projected")


def random_cell(kind, width, H, rng, gain=1.0):
    g = gain / math.sqrt(H)
    if kind == "elman":
        return ElmanCell(g * draw(rng, H, H), draw(rng, H, width), draw(rng, H))
    if kind.startswith("gru"):
        return GRUCell(
            draw(rng, 3 * H, width),
            g * draw(rng, 3 * H, H),
            draw(rng, 3 * H),
            draw(rng, 3 * H),
            reset_after=kind == "gru",
        )
    P = max(1, H - 1) if kind == "lstm-projected" else H
    return LSTMCell(
        draw(rng, 4 * H, width),
        g * draw(rng, 4 * H, P),
        draw(rng, 4 * H),
        projection=draw(rng, P, H) / math.sqrt(H) if kind == "lstm-projected" else None,
        input_forget=kind == "lstm-coupled",
    )


def recurrence(cell, start=None):
    zero = torch.zeros(cell.state_size, dtype=torch.float64)
    return Recurrence("r", 0, cell, InitialState(zero if start is None else start, "constant"))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    H=st.integers(1, 12),
    gain=st.floats(0.01, 5.0),
)
def test_spectral_norms_are_those_of_the_svd_and_never_above(seed, kind, H, gain):
    rng = torch.Generator().manual_seed(seed)
    cell = random_cell(kind, 3, H, rng, gain)
    s, x = draw(rng, 50, cell.state_size), draw(rng, 50, 3)
    exact = torch.linalg.matrix_norm(cells.jacobian(cell, s, x), ord=2)
    assert torch.allclose(estimators.spectral_norms(cell, s, x), exact, rtol=1e-7, atol=1e-12)
    found = estimators.norm_below(cell, s, x)
    assert found.norm == "2"
    assert found.value <= exact.max()
    assert found.value >= 0.9 * exact.max()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(KINDS), starts=st.integers(0, 3))
def test_block_iteration_reaches_the_residual_without_forming_a_matrix(seed, kind, starts):
    rng = torch.Generator().manual_seed(seed)
    cell = random_cell(kind, 3, 16, rng)
    s, x = draw(rng, 9, cell.state_size), draw(rng, 9, 3)
    z = cells.drive(cell, x)
    V = torch.randn(9, 2, cell.state_size, generator=torch.Generator().manual_seed(starts)).double()
    found = power.converge(lambda rows: cells.linearize(cell, s[rows], z[rows]), V)
    exact = torch.linalg.matrix_norm(cells.jacobian(cell, s, x), ord=2)
    assert torch.allclose(found, exact, rtol=1e-9)


def test_close_singular_values_do_not_stall_the_iteration():
    # Fifty plain steps leave 1 % here: the next singular value is 1 − 10⁻⁴.
    n = 64
    rng = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(draw(rng, n, n)).Q for _ in range(2))
    singular = torch.linspace(0.5, 1 - 1e-4, n - 1, dtype=torch.float64)
    W = left @ torch.diag(torch.cat([torch.ones(1).double(), singular])) @ right.mT
    cell = ElmanCell(W, torch.zeros(n, 1).double(), torch.zeros(n).double())
    s, x = torch.zeros(3, n).double(), torch.zeros(3, 1).double()
    V = draw(rng, 3, 2, n)
    found = power.converge(lambda rows: cells.linearize(cell, s[rows], x[rows] @ cell.U.mT), V)
    assert found == pytest.approx([1.0] * 3, abs=1e-10)


def test_a_large_state_is_iterated_and_agrees_with_the_svd(monkeypatch):
    rng = torch.Generator().manual_seed(1)
    cell = random_cell("lstm", 4, 40, rng, 2.0)
    s, x = draw(rng, 70, 80), draw(rng, 70, 4)
    exact = torch.linalg.matrix_norm(cells.jacobian(cell, s, x), ord=2)
    monkeypatch.setattr(power, "DENSE", 32)
    assert torch.allclose(estimators.spectral_norms(cell, s, x), exact, rtol=1e-9)
    assert estimators.norm_below(cell, s, x).value == pytest.approx(float(exact.max()), rel=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gain", [1e100, 1e200, 1e300])
def test_weights_beyond_what_squares_can_hold_break_no_estimate(kind, gain):
    rng = torch.Generator().manual_seed(4)
    cell = random_cell(kind, 2, 8, rng, gain)
    r, x = recurrence(cell), draw(rng, 4, 20, 2)
    assert 0 <= estimators.lambda_below(r, x).value < math.inf
    assert all(0 <= value < math.inf for value in estimators.norm_curve(r, x).value)
    found = expansion(r, x, count=64)
    assert found is None or found.radius >= 1
    exponent = estimators.lyapunov(r, x)
    assert exponent is None or math.isfinite(exponent.max)


def test_a_dead_cell_has_norm_zero():
    cell = ElmanCell(
        torch.eye(40).double(), torch.zeros(40, 1).double(), torch.full((40,), -9.0).double(), RELU
    )
    x = torch.zeros(2, 20, 1, dtype=torch.float64)
    assert estimators.lambda_below(recurrence(cell), x).value == 0.0
    assert set(estimators.norm_curve(recurrence(cell), x).value) == {0.0}


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    gain=st.floats(0.1, 4.0),
    shift=st.floats(-2.0, 2.0),
)
def test_no_sample_leaves_the_states_that_a_proof_covers(seed, kind, gain, shift):
    rng = torch.Generator().manual_seed(seed)
    cell = random_cell(kind, 3, 6, rng, gain)
    start = shift * torch.ones(cell.state_size, dtype=torch.float64)
    r, x = recurrence(cell, start), draw(rng, 4, 30, 3)
    ends = x.flatten(0, 1)
    dynamics = certify(r, Domain(ends.amin(0), ends.amax(0), "data"), time_budget=0.01).dynamics
    samples = estimators.sample(r, x, count=64, seed=0)
    assert samples.on_trajectories == samples.reordered == 64
    assert all(any(torch.equal(u, v) for v in ends) for u in samples.x[::16])
    if dynamics is not None:
        low, high = dynamics.states
        slack = 1e-12 * (1 + samples.s.abs())
        assert (samples.s >= low - slack).all()
        assert (samples.s <= high + slack).all()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), gain=st.floats(0.1, 3.0), bias=st.floats(-12.0, 12.0))
def test_what_is_found_never_exceeds_what_is_proved_for_the_same_inputs(seed, gain, bias):
    rng = torch.Generator().manual_seed(seed)
    cell = ElmanCell(gain * draw(rng, 1, 1), draw(rng, 1, 1), torch.tensor([bias]).double())
    r, x = recurrence(cell), draw(rng, 6, 40, 1)
    proofs = certify(r, Domain(x.min(), x.max(), "data"))
    if proofs.best is not None:  # one unit: every norm is the same
        assert estimators.lambda_below(r, x).value <= proofs.best.bound.value


def test_lambda_is_the_norm_of_the_weight_where_slopes_reach_one():
    rng = torch.Generator().manual_seed(3)
    W = draw(rng, 20, 20) / 4
    cell = ElmanCell(W, torch.zeros(20, 1).double(), torch.zeros(20).double())
    found = estimators.lambda_below(recurrence(cell), torch.zeros(2, 50, 1).double())
    assert found.value == pytest.approx(float(torch.linalg.matrix_norm(W, ord=2)), rel=1e-8)
    assert found.value <= torch.linalg.matrix_norm(W, ord=2)
    assert "on reordered inputs" in found.method


def every_window(cell, x, r):
    """Return the largest ‖J_r … J_1‖₂ over all windows, by explicit products."""
    zero = torch.zeros(cell.state_size, dtype=torch.float64)
    after = cells.trajectory(cell, x, zero)
    s = torch.cat([zero.expand(len(x), 1, -1), after[:, :-1]], dim=1)
    J = cells.jacobian(cell, s, x)
    norms = []
    for t in range(x.shape[1] - r + 1):
        P = J[:, t]
        for j in range(1, r):
            P = J[:, t + j] @ P
        norms.append(torch.linalg.matrix_norm(P, ord=2))
    return float(torch.stack(norms).max())


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(KINDS), H=st.integers(1, 6))
def test_the_curve_of_a_small_cell_is_the_supremum_over_all_windows(seed, kind, H):
    rng = torch.Generator().manual_seed(seed)
    cell = random_cell(kind, 2, H, rng, 1.5)
    x = draw(rng, 2, 20, 2)
    curve = estimators.norm_curve(recurrence(cell), x)
    assert curve.r == (1, 2, 4, 8, 16)
    for r, value in zip(curve.r, curve.value, strict=True):
        exact = every_window(cell, x, r)
        assert exact * 0.98 <= value <= exact


@pytest.mark.parametrize("kind", ["elman", "gru", "lstm"])
def test_the_curve_of_a_larger_cell_stays_below_and_comes_close(kind):
    rng = torch.Generator().manual_seed(4)
    cell = random_cell(kind, 2, 36, rng, 1.2)
    x = draw(rng, 2, 20, 2)
    for r, value in zip(*_pairs(estimators.norm_curve(recurrence(cell), x)), strict=True):
        exact = every_window(cell, x, r)
        assert exact * 0.9 <= value <= exact


def _pairs(curve):
    return curve.r, curve.value


def test_a_norm_beyond_float64_ends_the_curve():
    for n in (2, 40):
        cell = ElmanCell(
            1e5 * torch.eye(n).double(), torch.zeros(n, 1).double(), torch.zeros(n).double()
        )
        curve = estimators.norm_curve(recurrence(cell), torch.zeros(1, 70, 1).double())
        assert curve.r == (1, 2, 4, 8, 16, 32)
        assert curve.value == pytest.approx([1e5**r for r in curve.r], rel=1e-6)


def test_a_sequence_that_overflows_is_left_out():
    cell = ElmanCell(
        torch.full((1, 1), 1e200, dtype=torch.float64),
        torch.ones(1, 1).double(),
        torch.zeros(1).double(),
        RELU,
    )
    x = torch.ones(1, 30, 1, dtype=torch.float64)
    assert estimators.norm_curve(recurrence(cell), x).r == ()
    assert estimators.lyapunov(recurrence(cell), x) is None


def test_probes_are_seeded_and_in_equal_parts_of_each_kind():
    x = estimators.synthetic(3, sequences=10, length=200, seed=1)
    assert x.dtype == torch.float64
    assert torch.equal(x, estimators.synthetic(3, sequences=10, length=200, seed=1))
    assert not torch.equal(x, estimators.synthetic(3, sequences=10, length=200, seed=2))
    for n in (0, 5):
        normal, uniform, saturating, constant, pulse = x[n : n + len(probes.KINDS)]
        assert normal.std() == pytest.approx(1.0, abs=0.1)
        assert uniform.abs().max() <= 1
        assert uniform.std() == pytest.approx(1 / math.sqrt(3), abs=0.05)
        assert set(saturating.unique().tolist()) == {-probes.LARGE, probes.LARGE}
        assert 0 < (saturating.diff(dim=0) != 0).double().mean() < 0.2
        assert torch.equal(constant, constant[:1].expand_as(constant))
        assert set(pulse[: probes.PULSE].abs().unique().tolist()) == {probes.LARGE}
        assert not pulse[probes.PULSE :].any()


def test_probes_stay_inside_a_box_and_reach_its_corners():
    low, high = torch.tensor([0.0, -5.0]).double(), torch.tensor([1.0, 7.0]).double()
    x = estimators.synthetic(2, sequences=5, length=100, seed=0, low=low, high=high)
    assert ((x >= low) & (x <= high)).all()
    assert torch.equal(x[2].amin(0), low)
    assert torch.equal(x[2].amax(0), high)
