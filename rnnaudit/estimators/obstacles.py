"""Why no proof can exist: what a state does in the long run under inputs that are held.

States are reached from s_start by recorded inputs; then one input is held. Two that settle
in different places are bistable: what decided between them is remembered for ever. One
that grows without bound has no set of states that a proof could speak of.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.estimators.expansion import Expansion, expansion
from rnnaudit.estimators.orbits import Orbit, orbits
from rnnaudit.model import Cell, Recurrence

PERIODS = (1, 2, 3)
"""Cycles of these lengths are looked for."""

DENSE = 512
"""The largest state whose Jacobian is solved with."""

_HELD = 512  # steps that an input is held
_REACHED = 16  # states at which it begins to be held, s_start among them
_INPUTS = 8  # inputs that are held
_SETTLED = 1e-6  # change of a step, relative, that a settled state may still show
_BEYOND = 1e12  # a state this large, and larger than halfway before, grows without bound
_FLOPS = 4e9  # multiplications that holding may cost
_NEWTON = 15  # steps from each start
_STARTS = 1e8  # of these, times S³


@dataclass(frozen=True, slots=True, eq=False)
class Bistability:
    """Two attracting fixed points under one held input: one from s_start, one after a prefix.

    Attributes:
        prefix: Recorded inputs [P, I] that lead to the second.
        first: Where s_start settles.
        second: Where the state after the prefix settles.
        gap: Largest distance of their outputs in one unit.
    """

    prefix: Tensor
    first: Orbit
    second: Orbit
    gap: float


@dataclass(frozen=True, slots=True, eq=False)
class Divergence:
    """A held ``input`` [I] under which the largest |s| reaches ``size`` after ``steps``."""

    input: Tensor
    steps: int
    size: float


@dataclass(frozen=True, slots=True, eq=False)
class Obstacles:
    """What stands in the way of any proof; None or empty where nothing was found.

    ``repelling`` are cycles with ρ ≥ 1 within the range of reached states. ``cut`` says that
    the time ended before all were looked for; what was found holds all the same.
    """

    expansion: Expansion | None
    repelling: tuple[Orbit, ...]
    bistability: Bistability | None
    divergence: Divergence | None
    cut: bool = False


def obstacles(
    recurrence: Recurrence, x: Tensor, *, seed: int = 0, budget_s: float | None = None
) -> Obstacles:
    """Look for what rules proofs out, on and near the trajectories of x [N, T, I].

    After ``budget_s`` seconds what is still looked for is left out.
    """
    end = None if budget_s is None else time.monotonic() + budget_s

    def over() -> bool:
        return end is not None and time.monotonic() >= end

    cell = recurrence.cell
    rng = torch.Generator().manual_seed(seed)
    x = cells.reads(recurrence, x)
    start = recurrence.initial.value
    after = cells.trajectory(cell, x, start)
    finite = after.isfinite().all(-1).all(-1)
    if not bool(finite.any()):
        return Obstacles(None, (), None, None)
    x, after = x[finite], after[finite]
    held = _Held(cell, start, x, after, rng=rng, over=over)
    aligned = cells.reads(recurrence, x)
    point = None if over() else expansion(recurrence, aligned, seed=seed, over=over)
    repelling = _repelling(cell, x, after, rng, over)
    if held.cut:
        return Obstacles(point, repelling, None, None, cut=True)
    pair = held.bistability(over)
    return Obstacles(point, repelling, pair, held.divergence(), cut=over())


def _repelling(
    cell: Cell, x: Tensor, after: Tensor, rng: torch.Generator, over: Callable[[], bool]
) -> tuple[Orbit, ...]:
    """Search for cycles between the smallest and the largest reached state of each unit."""
    S = cell.state_size
    count = int(min(64, _STARTS / S**3))
    if not count:
        return ()
    low, high = after.amin((0, 1)), after.amax((0, 1))
    share = torch.rand(count, S, generator=rng, dtype=torch.float64)
    inputs = x.flatten(0, 1)
    inputs = inputs[torch.randint(len(inputs), (_INPUTS,), generator=rng)]
    inputs = inputs[torch.arange(count) % _INPUTS]
    states = after.flatten(0, 1)
    starts = low + share * (high - low)
    starts[::2] = states[torch.randint(len(states), (len(starts[::2]),), generator=rng)]
    found = [
        o for p in PERIODS for o in orbits(cell, starts, inputs, period=p, steps=_NEWTON, over=over)
    ]
    inside = (
        o for o in found if bool(((o.states >= low - 1e-9) & (o.states <= high + 1e-9)).all())
    )
    repelling = [o for o in inside if o.radius >= 1 + _SETTLED]
    return tuple(sorted(repelling, key=lambda o: -o.radius))


class _Held:
    """Reached states run on under inputs that are held."""

    def __init__(
        self,
        cell: Cell,
        start: Tensor,
        x: Tensor,
        after: Tensor,
        *,
        rng: torch.Generator,
        over: Callable[[], bool],
    ) -> None:
        """Run every state under every input; s_start comes first among the states."""
        self.cell, self.x = cell, x
        N, T, _ = after.shape
        few = _FLOPS / (_HELD * cells.multiplications(cell) * _REACHED)
        inputs = x.flatten(0, 1)
        chosen = torch.randint(len(inputs), (int(min(_INPUTS, max(1, few))),), generator=rng)
        self.inputs = inputs[chosen]
        self.which = torch.randint(N, (_REACHED - 1,), generator=rng)
        self.when = torch.randint(T, (_REACHED - 1,), generator=rng)
        reached = torch.cat([start[None], after[self.which, self.when]])
        s = reached.repeat(len(self.inputs), 1)
        z = cells.drive(cell, self.inputs).repeat_interleave(_REACHED, 0)
        self.sizes = []
        before = s
        for _ in range(_HELD):
            if over():
                break
            before, s = s, cells.advance(cell, s, z)
            self.sizes.append(s.abs().amax(-1))
        self.cut = len(self.sizes) < _HELD
        moved = (s - before).abs().amax(-1)
        settled = moved <= _SETTLED * s.abs().amax(-1).clamp(min=1)
        self.settled = settled.unflatten(0, (-1, _REACHED))
        self.ends = s.unflatten(0, (-1, _REACHED))

    def bistability(self, over: Callable[[], bool]) -> Bistability | None:
        """Return the pair of settled ends whose outputs are farthest apart, if it is one."""
        if self.cell.state_size > DENSE:
            return None
        gaps = cells.output(self.cell, self.ends - self.ends[:, :1]).abs().amax(-1)
        known = self.settled & self.settled[:, :1] & (gaps > 1e3 * _SETTLED)
        gaps = torch.where(known, gaps, 0.0)
        at, reached = divmod(int(gaps.argmax()), _REACHED)
        if not float(gaps[at, reached]) > 0:
            return None
        pair, u = self.ends[at, [0, reached]], self.inputs[at]
        roots = orbits(self.cell, pair, u.expand(2, -1), over=over)
        near = [o for o in roots if o.radius < 1]
        if len(near) != 2:
            return None
        near.sort(key=lambda o: float((o.states[0] - pair[0]).abs().max()))
        first, second = near
        shown = cells.output(self.cell, first.states[0] - second.states[0])
        n, t = int(self.which[reached - 1]), int(self.when[reached - 1])
        return Bistability(self.x[n, : t + 1], first, second, float(shown.abs().max()))

    def divergence(self) -> Divergence | None:
        """Return the held input under which a state leaves every bound soonest, if any does."""
        sizes = torch.stack(self.sizes).nan_to_num(nan=torch.inf)
        beyond = (sizes[-1] > _BEYOND) & (sizes[-1] > sizes[_HELD // 2])
        if not bool(beyond.any()):
            return None
        steps = (sizes <= _BEYOND).sum(0)
        row = int(torch.where(beyond, steps, _HELD + 1).argmin())
        when = int(steps[row])
        largest = sizes[: when + 1, row]
        size = float(largest[largest.isfinite()].max())
        return Divergence(self.inputs[row // _REACHED], when + 1, size)
