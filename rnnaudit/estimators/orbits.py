"""Fixed points and short cycles of a cell under a constant input, by batched Newton steps.

With φ_p the p-th iterate, a cycle is a root of φ_p(s) − s. Its Jacobian is the product of p
closed-form ones, so that from many starts at once a root is met to rounding in a few solves
(Sussillo & Barak, 2013, descend instead on the square of the speed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.model import Cell

_ROOT = 1e-10  # largest |φ_p(s) − s| of a root, relative to the largest |s| or 1
_APART = 1e-6  # roots that agree to this, relatively, are one
_HALVINGS = 6


@dataclass(frozen=True, slots=True, eq=False)
class Orbit:
    """States [p, S] that follow each other for ever under a constant ``input`` [I].

    ``radius`` is ρ of the Jacobian once around: below 1 the orbit attracts, above 1 it
    repels. ``residual`` is the largest |φ_p(s) − s|.
    """

    states: Tensor
    input: Tensor
    radius: float
    residual: float

    @property
    def period(self) -> int:
        """Steps once around: 1 for a fixed point."""
        return len(self.states)


def _never() -> bool:
    return False


def orbits(
    cell: Cell,
    starts: Tensor,
    inputs: Tensor,
    *,
    period: int = 1,
    steps: int = 40,
    over: Callable[[], bool] = _never,
) -> tuple[Orbit, ...]:
    """Return the different cycles of exactly ``period`` steps that Newton's method finds.

    Args:
        cell: The cell.
        starts: States [M, S] to begin at.
        inputs: The constant input [M, I] of each.
        period: Steps once around.
        steps: Newton steps, at most.
        over: Whether the time has ended: those met by then are returned.
    """
    z = cells.drive(cell, inputs)
    s = _roots(cell, starts.clone(), z, period=period, steps=steps, over=over)
    around = _around(cell, s, z, period)
    scale = s.abs().amax(-1).clamp(min=1)
    residual = (around[-1] - s).abs().amax(-1)
    exact = s.isfinite().all(-1) & (residual <= _ROOT * scale)
    for shorter in range(1, period):
        if period % shorter == 0:
            exact &= (around[shorter] - s).abs().amax(-1) > _APART * scale
    found: list[Orbit] = []
    for i in exact.nonzero().flatten().tolist():
        if over():
            break
        if not any(_same(s[i], inputs[i], orbit) for orbit in found):
            states = torch.stack([state[i] for state in around[:-1]])
            found.append(Orbit(states, inputs[i], _radius(cell, states, z[i]), float(residual[i])))
    return tuple(found)


def _around(cell: Cell, s: Tensor, z: Tensor, period: int) -> list[Tensor]:
    """Return s and what follows it, p + 1 states [M, S]."""
    states = [s]
    for _ in range(period):
        states.append(cells.advance(cell, states[-1], z))
    return states


def _same(s: Tensor, x: Tensor, orbit: Orbit) -> bool:
    near = (orbit.states - s).abs().amax(-1) <= _APART * s.abs().max().clamp(min=1)
    return bool(near.any()) and torch.equal(x, orbit.input)


def _radius(cell: Cell, states: Tensor, z: Tensor) -> float:
    """Return ρ(J_p … J_1) at the states [p, S] of a cycle."""
    product = torch.eye(states.shape[-1], dtype=states.dtype)
    for J in cells.linearize(cell, states, z.expand(len(states), -1)).matrix():
        product = J @ product
    if not bool(product.isfinite().all()):
        return float("inf")
    return float(torch.linalg.eigvals(product).abs().max())


def _roots(
    cell: Cell, s: Tensor, z: Tensor, *, period: int, steps: int, over: Callable[[], bool]
) -> Tensor:
    """Take damped Newton steps from s [M, S], each as long as it makes the residual smaller."""
    eye = torch.eye(s.shape[-1], dtype=s.dtype)
    gap = _around(cell, s, z, period)[-1] - s
    for _ in range(steps):
        going = gap.abs().amax(-1) > 0.1 * _ROOT * s.abs().amax(-1).clamp(min=1)
        going &= gap.isfinite().all(-1)
        if over() or not bool(going.any()):
            break
        rows = going.nonzero().flatten()
        states, product = s[rows], eye
        for _ in range(period):
            product = cells.linearize(cell, states, z[rows]).matrix() @ product
            states = cells.advance(cell, states, z[rows])
        step = _solved(product - eye, -gap[rows])
        # Where the system is singular, the map itself is the step.
        step = torch.where(step.isfinite().all(-1, keepdim=True), step, gap[rows])
        following = (s[rows], gap[rows], step)
        s[rows], gap[rows] = _damped(cell, z[rows], following, period)
    return s


def _solved(A: Tensor, b: Tensor) -> Tensor:
    """Solve A s = b for each of [M, S, S] and [M, S], one by one.

    On several threads PyTorch's batched LU has given false pivots from S = 200 on.
    """
    pairs = zip(A.expand(len(b), -1, -1), b, strict=True)
    return torch.stack([torch.linalg.solve_ex(matrix, right)[0] for matrix, right in pairs])


def _damped(
    cell: Cell, z: Tensor, following: tuple[Tensor, Tensor, Tensor], period: int
) -> tuple[Tensor, Tensor]:
    """Halve steps from states with their gaps until these shrink; else follow the map."""
    s, gap, step = following
    best, its_gap = s + gap, _around(cell, s + gap, z, period)[-1] - s - gap
    left = torch.ones(len(s), dtype=torch.bool)
    for i in range(_HALVINGS):
        tried = s + step / 2**i
        its = _around(cell, tried, z, period)[-1] - tried
        better = left & (its.norm(dim=-1) < gap.norm(dim=-1))
        best = torch.where(better[:, None], tried, best)
        its_gap = torch.where(better[:, None], its, its_gap)
        left &= ~better
        if not bool(left.any()):
            break
    return best, its_gap
