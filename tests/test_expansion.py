"""A point with ρ(J) ≥ 1 rules out every proof, and says nothing of a finite depth."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit import cells
from rnnaudit.certificates import Domain, certify
from rnnaudit.estimators.expansion import expansion
from rnnaudit.model import ElmanCell, InitialState, Recurrence


def tanh_cell(W, U):
    cell = ElmanCell(W, U, torch.zeros(len(W)).double())
    return Recurrence("r", 0, cell, InitialState(torch.zeros(len(W)).double()))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), gain=st.floats(0.3, 4.0), n=st.integers(1, 8))
def test_no_proof_exists_where_a_point_expands(seed, gain, n):
    rng = torch.Generator().manual_seed(seed)
    W = gain / math.sqrt(n) * torch.randn(n, n, generator=rng, dtype=torch.float64)
    r = tanh_cell(W, 0.3 * torch.randn(n, 2, generator=rng, dtype=torch.float64))
    x = 2 * torch.rand(3, 20, 2, generator=rng, dtype=torch.float64) - 1
    found = expansion(r, x)
    if found is not None:
        J = cells.jacobian(r.cell, found.state, found.input)
        assert torch.linalg.eigvals(J).abs().max() >= 1
        assert certify(r, Domain(-1.0, 1.0, "|x| ≤ 1")).depth(1e-3) is None


def test_an_unstable_fixed_point_between_reached_states_is_found():
    one = torch.ones(1, 1, dtype=torch.float64)
    x = torch.ones(2, 30, 1, dtype=torch.float64)
    x[1] = -1.0
    found = expansion(tanh_cell(3 * one, one), x)
    assert found is not None
    assert found.radius > 1
    assert -1 <= float(found.state) <= 1


def test_a_contraction_has_no_such_point():
    one = torch.ones(1, 1, dtype=torch.float64)
    assert expansion(tanh_cell(0.9 * one, one), torch.zeros(1, 30, 1).double()) is None
