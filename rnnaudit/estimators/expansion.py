"""Where no proof can exist: a state and an input at which ρ(∂s'/∂s) ≥ 1.

Contraction in any fixed norm needs ρ(J) < 1 at every point of a convex set that holds
s_start and what it reaches. Means of reached states lie in every such set, so that one of
them with ρ(J) ≥ 1 rules out all proofs at once. It does not refute a finite depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.estimators.power_iteration import screen
from rnnaudit.model import Recurrence

_SLACK = 1e-6  # eigvals of a non-normal J errs by more than rounding
_FEW = 16


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """A mean ``state`` [S] of reached states and an ``input`` [I] at which ρ(J) is ``radius``."""

    state: Tensor
    input: Tensor
    radius: float


def expansion(
    recurrence: Recurrence,
    x: Tensor,
    *,
    count: int = 1024,
    seed: int = 0,
    over: Callable[[], bool] = lambda: False,
) -> Expansion | None:
    """Return the point of largest ρ(J) found, or None where none reaches 1.

    Points are states on the trajectories of x [N, T, I], s_start, and means of two of them,
    under inputs from x; those of the largest norms have their eigenvalues computed, until the
    time is ``over``.
    """
    cell = recurrence.cell
    rng = torch.Generator().manual_seed(seed)
    x = cells.reads(recurrence, x)
    start = recurrence.initial.value
    states = torch.cat([start[None], cells.trajectory(cell, x, start).flatten(0, 1)])
    inputs = x.flatten(0, 1)
    finite = states.isfinite().all(-1)
    states = states[finite]
    first, second = (torch.randint(len(states), (count,), generator=rng) for _ in range(2))
    second[::2] = first[::2]
    share = torch.rand(count, 1, generator=rng, dtype=torch.float64)
    s = share * states[first] + (1 - share) * states[second]
    s[0] = start
    u = inputs[torch.randint(len(inputs), (count,), generator=rng)]
    linearization = cells.linearize(cell, s, cells.drive(cell, u))
    S = cell.state_size
    V = torch.randn(count, min(2, S), S, generator=rng, dtype=torch.float64)
    norms, _ = screen(linearization, V, 3)
    best = norms.topk(min(_FEW, count)).indices
    J = cells.jacobian(cell, s[best], u[best])
    best, J = best[held := J.isfinite().all(-1).all(-1)], J[held]
    if not len(J):
        return None
    radii = J.new_zeros(len(J))
    for i, matrix in enumerate(J):
        if over():
            break
        radii[i] = torch.linalg.eigvals(matrix).abs().max()
    top = int(radii.argmax())
    if not float(radii[top]) >= 1 + _SLACK:
        return None
    return Expansion(s[best[top]], u[best[top]], float(radii[top]))
