"""Fixed points and cycles that are known in closed form are found, and every root is one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from rnnaudit import cells
from rnnaudit.estimators.orbits import orbits
from rnnaudit.model import Activation, ElmanCell
from tests import strategies

pytestmark = pytest.mark.usefixtures("one_thread")


def elman(W, b, activation="tanh"):
    W = torch.tensor(W, dtype=torch.float64)
    return ElmanCell(
        W, torch.zeros(len(W), 1).double(), torch.tensor(b).double(), Activation(activation)
    )


def starts(S, count=64, reach=1.0, seed=0):
    rng = torch.Generator().manual_seed(seed)
    s = reach * (2 * torch.rand(count, S, generator=rng, dtype=torch.float64) - 1)
    return s, torch.zeros(count, 1).double()


def test_the_three_fixed_points_of_a_bistable_unit():
    # h = tanh(3h + 0.5): scalar roots by bisection, the middle one near -0.253 repels.
    def gap(h):
        return math.tanh(3 * h + 0.5) - h

    roots = [brentq(gap, *ends) for ends in ((-1, -0.6), (-0.6, 0.5), (0.5, 1))]
    found = sorted(orbits(elman([[3.0]], [0.5]), *starts(1)), key=lambda o: float(o.states[0, 0]))
    assert [float(o.states[0, 0]) for o in found] == pytest.approx(roots, abs=1e-12)
    assert roots[1] == pytest.approx(-0.253, abs=1e-3)
    slopes = [3 * (1 - r * r) for r in roots]
    assert [o.radius for o in found] == pytest.approx(slopes, abs=1e-9)
    assert [o.radius >= 1 for o in found] == [False, True, False]


def test_a_unit_that_flips_has_a_cycle_of_two_and_a_repelling_middle():
    cell = elman([[-3.0]], [0.0])
    a = brentq(lambda h: math.tanh(3 * h) - h, 0.5, 1)  # h' = tanh(-3h) sends a to -a
    (cycle,) = orbits(cell, *starts(1), period=2)
    assert sorted(cycle.states.flatten().tolist()) == pytest.approx([-a, a], abs=1e-12)
    assert cycle.radius == pytest.approx((3 * (1 - a * a)) ** 2, abs=1e-9)
    (middle,) = orbits(cell, *starts(1))
    assert (float(middle.states.abs().max()), middle.radius) == pytest.approx((0.0, 3.0), abs=1e-9)


@pytest.mark.parametrize("period", [3, 4])
def test_a_saturated_rotation_of_the_units_is_a_cycle_of_their_number(period):
    # h'_{i+1} = tanh(4 h_i): n independent bits are passed round.
    W = [[4.0 if i == (j + 1) % period else 0.0 for j in range(period)] for i in range(period)]
    found = orbits(elman(W, [0.0] * period), *starts(period, 256), period=period)
    a = brentq(lambda h: math.tanh(4 * h) - h, 0.5, 1)
    attracting = [o for o in found if o.radius < 1]
    assert attracting
    for orbit in attracting:
        assert orbit.period == period
        assert orbit.states.abs().flatten().tolist() == pytest.approx([a] * period**2, abs=1e-9)
        assert orbit.radius == pytest.approx((4 * (1 - a * a)) ** period, rel=1e-6)


def test_a_contraction_has_one_fixed_point_and_no_cycle():
    rng = torch.Generator().manual_seed(1)
    W = 0.9 * torch.linalg.qr(torch.randn(6, 6, generator=rng, dtype=torch.float64)).Q
    cell = elman(W.tolist(), [0.3] * 6)
    (point,) = orbits(cell, *starts(6))
    assert point.radius < 1
    for period in (2, 3, 4):
        assert orbits(cell, *starts(6), period=period) == ()


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["elman", "gru", "lstm"]),
    gain=st.floats(0.5, 4.0),
    period=st.integers(1, 3),
)
def test_every_root_returns_to_itself_and_its_radius_is_that_of_autodiff(seed, kind, gain, period):
    cell = strategies.random_cell(seed, kind, hidden=4, inputs=1, gain=gain)
    s, x = starts(cell.state_size, 24, seed=seed)
    for orbit in orbits(cell, s, x, period=period):

        def around(state, u=orbit.input):
            for _ in range(period):
                state = cells.step(cell, state, u)
            return state

        first = orbit.states[0]
        assert (around(first) - first).abs().max() <= 1e-9 * max(1, float(first.abs().max()))
        J = torch.autograd.functional.jacobian(around, first)
        radius = float(torch.linalg.eigvals(J).abs().max())
        assert orbit.radius == pytest.approx(radius, rel=1e-6, abs=1e-9)


def test_a_linear_unit_without_a_fixed_point_gives_none():
    assert orbits(elman([[1.0]], [1.0], "affine"), *starts(1)) == ()


@pytest.mark.parametrize("size", [3, 300])
def test_a_fixed_point_that_repels_is_met_in_one_step_whatever_the_threads(size):
    rng = torch.Generator().manual_seed(size)
    W = 1.5 * torch.linalg.qr(torch.randn(size, size, generator=rng).double()).Q
    b = torch.randn(size, generator=rng).double()
    cell = ElmanCell(W, torch.zeros(size, 1).double(), b, Activation("affine", 1.0, 0.0))
    wanted = torch.from_numpy(np.linalg.solve(np.eye(size) - W.numpy(), b.numpy()))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (found,) = orbits(cell, *starts(size, count=3), steps=2)
    finally:
        torch.set_num_threads(threads)
    assert torch.allclose(found.states[0], wanted, rtol=0, atol=1e-9)
    assert found.radius == pytest.approx(1.5, rel=1e-9)
