"""Layers of one direction, restarted together everywhere at once.

The depth-k output at time t is the state that was restarted from s_start at t − k. Restarted
everywhere at once, all states advance together, so that sweep k yields the depth-k error of
every position. A restart whose state has merged with the true run is dropped: the cost
follows the depth that the model needs, not the length of the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rnnaudit.cells.chain import Chain
from rnnaudit.depth.how import Clock, How
from rnnaudit.depth.rounding import norm_of, resolutions
from rnnaudit.depth.study import DepthStudy, pool

_STAGE = 8  # sweeps that one block of restarts makes before the next block has its turn
_BLOCK = 1 << 18  # numbers of a block's drive: it then stays in the cache
_BYTES = 1 << 29  # trajectories and restarts that are held at once


def study_together(system: Chain, x: Tensor, how: How) -> DepthStudy:
    """Study x in groups of sequences that fit in memory together, the budget shared evenly."""
    N, T, _ = x.shape
    numbers = T * (3 * system.start.shape[0] + system.width)
    parts = x.split(max(1, min(N, _BYTES // (8 * numbers))))
    studies = []
    for i, part in enumerate(parts):

        def report(share: float, before: int = i) -> None:
            how.report((before + share) / len(parts))

        left = how.clock.left
        clock = Clock(None if left is None else left / (len(parts) - i))
        restarts = Restarts(system, part, how.floor)
        studies.append(_study_restarts(restarts, replace(how, clock=clock, report=report)))
    return pool(studies)


@dataclass(slots=True, eq=False)
class _Block:
    """Restarts that sweep together: their rows p·N + n, ascending, and their states."""

    rows: Tensor
    states: Tensor
    contiguous: bool = True

    def take(self, values: Tensor, shift: int) -> Tensor:
        """Return the rows of ``values`` that lie ``shift`` after the restarts' own."""
        if self.contiguous:
            return values.narrow(0, int(self.rows[0]) + shift, len(self.rows))
        return values[self.rows + shift]

    def end(self, rows: int) -> None:
        """Drop the restarts whose data have ended: all rows from this one on."""
        alive = int(torch.searchsorted(self.rows, rows))
        self.rows, self.states = self.rows[:alive], self.states[:alive]

    def keep(self, apart: Tensor) -> None:
        """Drop merged restarts, once they are enough to pay for the move."""
        alive = int(apart.sum())
        if alive < 0.85 * len(self.rows):
            self.rows, self.states = self.rows[apart], self.states[apart]
            self.contiguous = False


class Restarts:
    """All restarts of a group of sequences [N, T, I], time first so that a shift is a slice."""

    def __init__(self, system: Chain, x: Tensor, floor: float) -> None:
        """Run the true trajectories and place a restart after each step but the last."""
        self.system = system
        self.N, self.T, _ = x.shape
        self.depth = 0
        z = system.drive(x.transpose(0, 1))
        true = x.new_empty(self.T, self.N, system.start.shape[0])
        s = system.start.to(x).expand(self.N, -1)
        for t in range(self.T):
            s = system.advance(s, z[t])
            true[t] = s
        self.z, self.true = z.flatten(0, 1), true.flatten(0, 1)
        self.near = floor * true.abs().amax((0, 2)).clamp(min=1)
        # A sequence that overflows has no error to measure: infinite at every depth.
        self.finite = true.isfinite().all(-1).all(0)
        first = torch.arange(self.N, self.T * self.N)
        first = first[self.finite[first % self.N]]
        count = max(64, _BLOCK // system.width)
        start = system.start.to(x)
        self.blocks = [
            _Block(rows, start.expand(len(rows), -1), bool(self.finite.all()))
            for rows in first.split(count)
            if len(rows)
        ]

    def sweep(self, block: _Block, depth: int) -> tuple[Tensor, Tensor]:
        """Advance a block to this depth; return its rows at that depth and their states' gaps.

        Restarts whose data have ended are dropped before, those that have merged after.
        """
        shift = (depth - 1) * self.N
        block.end(self.T * self.N - shift)
        if not len(block.rows):
            return block.rows, block.states
        block.states = self.system.advance(block.states, block.take(self.z, shift))
        rows, gap = block.rows, block.states - block.take(self.true, shift)
        block.keep(~(gap.abs().amax(-1) <= self.near[rows % self.N]))
        return rows + shift, gap

    def advance(self, depth: int) -> None:
        """Bring every restart to this depth, which is not below the one before."""
        for block in self.blocks:
            for j in range(self.depth + 1, depth + 1):
                if len(block.rows):
                    self.sweep(block, j)
        self.depth = depth
        self.blocks = [block for block in self.blocks if len(block.rows)]

    def deviations(self) -> Tensor:
        """Return the gaps of the last cell's outputs [N, T, H] at the depth reached."""
        if self.depth == 0:
            gap = self.system.output(self.system.start - self.true)
            return gap.reshape(self.T, self.N, -1).transpose(0, 1)
        gap = self.true.new_zeros(self.T * self.N, self.system.cells[-1].hidden_size)
        shift = (self.depth - 1) * self.N
        for block in self.blocks:
            apart = block.states - block.take(self.true, shift)
            gap[block.rows + shift] = self.system.output(apart)
        gap = gap.reshape(self.T, self.N, -1)
        gap[:, ~self.finite] = torch.nan
        return gap.transpose(0, 1)

    def work(self) -> float:
        """Return the steps that the living restarts could still make."""
        ends = self.T - self.depth
        return float(sum((ends - b.rows // self.N).clamp(min=0).sum() for b in self.blocks))


def _study_restarts(restarts: Restarts, how: How) -> DepthStudy:
    """Sweep in stages until all restarts have merged, the data or the budget end."""
    N, T, system = restarts.N, restarts.T, restarts.system
    nothing = system.start - restarts.true
    size = norm_of(system.deviation(nothing), how.norm)
    errors = [size.reshape(T, N).amax(0)]
    units = _Units.of(nothing.unflatten(0, (T, N)).abs().amax(0), how.unit_eps)
    work = max(1.0, restarts.work())
    cut = False
    while restarts.blocks and not cut:
        first = len(errors)
        stage = size.new_zeros(_STAGE, N)
        for block in restarts.blocks:
            cut = how.clock.over()
            if cut:
                break
            for j in range(_STAGE):
                rows, gap = restarts.sweep(block, first + j)
                stage[j].scatter_reduce_(
                    0, rows % N, norm_of(system.deviation(gap), how.norm), "amax"
                )
                if units is not None:
                    units.note(first + j, rows % N, gap)
                if not len(block.rows):
                    break
        else:
            errors.extend(stage)
            restarts.depth = len(errors) - 1
            restarts.blocks = [block for block in restarts.blocks if len(block.rows)]
            how.report(1 - min(1.0, restarts.work() / work))
    table = torch.stack(errors, dim=1)
    if not cut:  # depths of zero error at the end are those after the last restart has merged
        some = table[restarts.finite].any(0).nonzero()
        table = table[:, : int(some.max()) + 1 if len(some) else 1]
    table[~restarts.finite] = math.inf
    return DepthStudy(
        errors=table,
        depths=tuple(range(table.shape[1])),
        lengths=(T,) * N,
        horizons=(len(errors) - 1 if cut else T,) * N,
        norm=how.norm,
        floor=how.floor,
        resolutions=resolutions(
            restarts.true.unflatten(0, (T, N)),
            system.cells[-1].hidden_size,
            system.readout,
            how.norm,
        ),
        unit_eps=how.unit_eps,
        units=None if units is None else units.last,
        whole=how.whole,
    )


@dataclass(slots=True, eq=False)
class _Units:
    """The last depth [N, S] at which each unit of the state was off by more than ε; −1 at none."""

    eps: float
    last: Tensor

    @classmethod
    def of(cls, nothing: Tensor, eps: float | None) -> _Units | None:
        """Begin with the largest gaps [N, S] at depth 0; None where no ε is asked for."""
        return None if eps is None else cls(eps, (nothing > eps).long() - 1)

    def note(self, depth: int, which: Tensor, gap: Tensor) -> None:
        """Take in the gaps [R, S] of restarts of the sequences ``which`` [R] at a depth."""
        rows, units = (gap.abs() > self.eps).nonzero(as_tuple=True)
        self.last[which[rows], units] = depth
