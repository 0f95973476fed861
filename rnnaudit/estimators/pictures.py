"""What charts show of a recurrence: eigenvalues of its Jacobians, its gates over time."""

from __future__ import annotations

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.estimators.states import sample
from rnnaudit.model import Recurrence
from rnnaudit.results import Eigenvalues, GateSeries, Pictures

_POINTS = 512
"""Eigenvalues in a chart, about."""

_STATES = 16
"""States whose Jacobians are taken, at most."""

_WIDEST = 1024
"""Units of state up to which eigenvalues are computed: they cost about 25 S³."""

_STEPS = 256
"""Steps of a sequence that are shown."""

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def pictures(recurrence: Recurrence, x: Tensor, *, seed: int = 0) -> Pictures:
    """Compute what charts show of a recurrence on x [N, T, I]."""
    return Pictures(_eigenvalues(recurrence, x, seed), _gates(recurrence, x))


def _eigenvalues(recurrence: Recurrence, x: Tensor, seed: int) -> Eigenvalues | None:
    """Return the eigenvalues of ∂s'/∂s at states on trajectories, largest first.

    None where the state is too wide, or no such state is finite.
    """
    S = recurrence.cell.state_size
    if S > _WIDEST:
        return None
    count = max(1, min(_STATES, _POINTS // S))
    states = sample(recurrence, x, count=count, seed=seed)
    on = slice(states.on_trajectories)
    J = cells.jacobian(recurrence.cell, states.s[on], states.x[on])
    J = J[J.isfinite().all(-1).all(-1)]
    if not len(J):
        return None
    values = torch.linalg.eigvals(J).flatten()
    values = values[values.abs().argsort(descending=True, stable=True)]
    return Eigenvalues(tuple((z.real, z.imag) for z in values.tolist()), len(J))


def _gates(recurrence: Recurrence, x: Tensor) -> tuple[GateSeries, ...]:
    """Return the quantiles over units of each gate along the first sequence that stays finite."""
    cell, start = recurrence.cell, recurrence.initial.value
    for row in cells.reads(recurrence, x)[:, :_STEPS].split(1):
        after = cells.trajectory(cell, row, start)
        if bool(after.isfinite().all()):
            before = torch.cat([start.expand(1, 1, -1), after[:, :-1]], dim=1)
            found = cells.gate_values(cell, before[0], cells.drive(cell, row[0]))
            return tuple(_series(name, values) for name, values in found.items())
    return ()


def _series(name: str, values: Tensor) -> GateSeries:
    """Summarise a gate's values [T, H] over its units."""
    levels = torch.quantile(values, values.new_tensor(_QUANTILES), dim=-1)
    p5, p25, p50, p75, p95 = (tuple(level) for level in levels.tolist())
    return GateSeries(name, p5, p25, p50, p75, p95)
