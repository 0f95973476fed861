"""How deep a truncation must be on data: every restart of a sequence is run at once.

The depth-k output at time t is the state that was restarted from s_start at t − k. Restarted
everywhere at once, all states advance together, so that sweep k yields the depth-k error of
every position. A restart whose state has merged with the true run is dropped: the cost
follows the depth that the model needs, not the length of the data.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.cells.chain import Chain
from rnnaudit.model import Layer, Readout, Recurrence, Stack
from rnnaudit.results import EPSILONS, Norm

Progress = Callable[[float], None]

# Two states that agree to this, relative to the largest |s| or 1, count as merged. It is
# 10⁶ below the smallest ε that reports use and 10³ above float64's rounding of such states,
# so a merged restart would have to be magnified a million times before it could matter.
MERGED = 1e-12
# Layerwise studies of several layers stop here: each further depth starts again from 0.
SETTLED = 1e-9

_STAGE = 8  # sweeps that one block of restarts makes before the next block has its turn
_BLOCK = 1 << 18  # numbers of a block's drive: it then stays in the cache
_BYTES = 1 << 29  # trajectories and restarts that are held at once


@dataclass(frozen=True, slots=True, eq=False)
class DepthStudy:
    """Errors of every truncation depth that was evaluated.

    Attributes:
        errors: Largest error over positions and output units, [N, D] for the N sequences
            and D depths; infinite where a state is not finite, or beyond a horizon.
        depths: The depths, ascending from 0; every one of them, or a grid.
        lengths: Length T of each sequence.
        horizons: Depth up to which each sequence was evaluated: its length unless the time
            budget ended first. All errors beyond ``depths[-1]`` are then below ``floor``.
        norm: ``max`` or ``2``, over the output units of one position.
        floor: Relative state difference below which a restart counts as merged.
        every_depth: Whether ``depths`` leaves none out up to its last.
    """

    errors: Tensor
    depths: tuple[int, ...]
    lengths: tuple[int, ...]
    horizons: tuple[int, ...]
    norm: Norm = "max"
    floor: float = MERGED
    every_depth: bool = True

    @property
    def T(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths)

    @property
    def complete(self) -> bool:
        """Whether every sequence was evaluated up to its length."""
        return self.horizons == self.lengths

    def needed(self, eps: float) -> tuple[int | None, ...]:
        """Return K_i(ε) of each sequence.

        It is the smallest depth such that it and every later one keep the error ≤ ε at all
        positions. None where that exceeds half of what the sequence can show.
        """
        return tuple(
            self._needed(errors, horizon, eps)
            for errors, horizon in zip(self.errors.tolist(), self.horizons, strict=True)
        )

    def _needed(self, errors: Sequence[float], horizon: int, eps: float) -> int | None:
        known = bisect_right(self.depths, horizon)
        wrong = [i for i in range(known) if not errors[i] <= eps]
        if not wrong:
            return 0
        if not math.isfinite(errors[wrong[-1]]):
            return None
        if wrong[-1] + 1 < known:
            k = self.depths[wrong[-1] + 1]
        elif self.every_depth:  # all restarts have merged by the next, or none is left
            k = self.depths[wrong[-1]] + 1
        else:
            k = horizon
        return k if 2 * k <= horizon else None


def merged(study: DepthStudy, owners: Tensor) -> DepthStudy:
    """Join the rows of a study that belong to one sequence: the largest error counts.

    Args:
        study: Errors [N, D], one row for each of N inputs.
        owners: The sequence of each row [N]; the result keeps their ascending order.
    """
    names, rows = owners.unique(return_inverse=True)
    if len(names) == len(owners):
        return study
    errors = study.errors.new_zeros(len(names), study.errors.shape[1])
    errors.index_reduce_(0, rows, study.errors, "amax")
    first = [int((rows == n).nonzero()[0]) for n in range(len(names))]
    return replace(
        study,
        errors=errors,
        lengths=tuple(study.lengths[i] for i in first),
        horizons=tuple(
            min(study.horizons[i] for i in (rows == n).nonzero().flatten().tolist())
            for n in range(len(names))
        ),
    )


def pool(studies: Sequence[DepthStudy]) -> DepthStudy:
    """Join studies of one model on sequences of several lengths.

    Where a grid lacks a depth of another's, the larger of its neighbours' errors stands in,
    which leaves K_i as it is.

    Raises:
        ValueError: The studies differ in their norm.
    """
    if len({study.norm for study in studies}) != 1:
        raise ValueError("studies must share their norm to be pooled")
    depths = tuple(sorted({k for study in studies for k in study.depths}))
    return DepthStudy(
        errors=torch.cat([_spread(study, depths) for study in studies]),
        depths=depths,
        lengths=tuple(T for study in studies for T in study.lengths),
        horizons=tuple(h for study in studies for h in study.horizons),
        norm=studies[0].norm,
        floor=max(study.floor for study in studies),
        every_depth=all(study.every_depth for study in studies),
    )


def _spread(study: DepthStudy, depths: Sequence[int]) -> Tensor:
    """Return a study's errors at depths that include its own."""
    columns = []
    lengths = torch.tensor(study.lengths)
    for k in depths:
        i = bisect_right(study.depths, k) - 1
        error = study.errors[:, i]
        if study.depths[i] != k and i + 1 < len(study.depths):
            error = torch.maximum(error, study.errors[:, i + 1])
        elif study.depths[i] != k:  # all restarts have merged, unless a grid ended early
            error = torch.where(
                lengths <= k, 0.0, torch.zeros_like(error) if study.every_depth else error
            )
        columns.append(error)
    return torch.stack(columns, dim=1)


def _read(gap: Tensor, readout: Readout | None) -> Tensor:
    return gap if readout is None else gap @ readout.A.mT


def _size(gap: Tensor, norm: Norm) -> Tensor:
    """Return the norm over the last axis; what is not a number counts as infinite."""
    size = gap.abs().amax(-1) if norm == "max" else torch.linalg.vector_norm(gap, dim=-1)
    return size.nan_to_num(nan=math.inf, posinf=math.inf)


class _Clock:
    """A share of the time budget; without a budget it never ends."""

    def __init__(self, budget_s: float | None) -> None:
        """Start now."""
        self._end = None if budget_s is None else time.monotonic() + budget_s

    @property
    def left(self) -> float | None:
        """Seconds left."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def over(self) -> bool:
        """Whether the budget is spent."""
        return self._end is not None and time.monotonic() >= self._end


@dataclass(frozen=True, slots=True, eq=False)
class _How:
    """How to measure: the norm, what counts as merged, the time, and whom to tell."""

    norm: Norm
    floor: float
    clock: _Clock
    report: Progress

    @classmethod
    def of(
        cls, norm: Norm, floor: float, budget_s: float | None, progress: Progress | None
    ) -> _How:
        """Start the clock."""
        return cls(norm, floor, _Clock(budget_s), progress or (lambda share: None))


def study_recurrence(
    recurrence: Recurrence,
    x: Tensor,
    *,
    readout: Readout | None = None,
    norm: Norm = "max",
    budget_s: float | None = None,
    progress: Progress | None = None,
    floor: float = MERGED,
) -> DepthStudy:
    """Measure every truncation depth of one recurrence on sequences x [N, T, I].

    Args:
        recurrence: The cell, its start and its direction.
        x: Inputs of this recurrence, aligned with time (a reverse one reads them backwards).
        readout: Errors are taken after this layer where it is given.
        norm: ``max`` over output units, or ``2``.
        budget_s: Stop after this many seconds; the study then says how far it came.
        progress: Called with the share of the work that is done.
        floor: Relative difference of states that counts as merged.
    """
    system = Chain.of([recurrence], readout)
    return _study(system, cells.reads(recurrence, x), _How.of(norm, floor, budget_s, progress))


def study_stack(
    stack: Stack,
    x: Tensor,
    *,
    norm: Norm = "max",
    layerwise: bool | None = None,
    epsilons: Sequence[float] = EPSILONS,
    budget_s: float | None = None,
    progress: Progress | None = None,
    floor: float = MERGED,
) -> DepthStudy:
    """Measure truncation depths of a whole stack, through its readout, on x [N, T, I].

    Where all layers run in one direction they are restarted together: depth k is the model
    run on a window of its last k inputs. Otherwise, or where ``layerwise`` asks for it,
    each recurrence is truncated to the same depth on its own. With one layer every depth
    is evaluated; with several, a grid of depths, refined around each of ``epsilons``.

    Args:
        stack: The layers and the readout.
        x: Inputs, aligned with time.
        norm: ``max`` over output units, or ``2``.
        layerwise: Force one form or the other; layers of both directions have only one.
        epsilons: Where a grid of depths is refined.
        budget_s: Stop after this many seconds; the study then says how far it came.
        progress: Called with the share of the work that is done.
        floor: Relative difference of states that counts as merged.
    """
    how = _How.of(norm, floor, budget_s, progress)
    recurrences = list(stack.recurrences())
    one_way = len({r.reverse for r in recurrences}) == 1 and not any(
        layer.bidirectional for layer in stack.layers
    )
    if one_way and not layerwise:
        system = Chain.of(recurrences, stack.readout)
        return _study(system, cells.reads(recurrences[0], x), how)
    if len(stack.layers) == 1:
        return _study_layer(stack.layers[0], stack.readout, x, how)
    return _study_grid(stack, x, epsilons, how)


def _study(system: Chain, x: Tensor, how: _How) -> DepthStudy:
    """Study x in groups of sequences that fit in memory together, the budget shared evenly."""
    N, T, _ = x.shape
    numbers = T * (3 * system.start.shape[0] + system.width)
    parts = x.split(max(1, min(N, _BYTES // (8 * numbers))))
    studies = []
    for i, part in enumerate(parts):

        def report(share: float, before: int = i) -> None:
            how.report((before + share) / len(parts))

        left = how.clock.left
        clock = _Clock(None if left is None else left / (len(parts) - i))
        restarts = _Restarts(system, part, how.floor)
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


class _Restarts:
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


def _study_restarts(restarts: _Restarts, how: _How) -> DepthStudy:
    """Sweep in stages until all restarts have merged, the data or the budget end."""
    N, T, system = restarts.N, restarts.T, restarts.system
    size = _size(system.deviation(system.start - restarts.true), how.norm)
    errors = [size.reshape(T, N).amax(0)]
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
                    0, rows % N, _size(system.deviation(gap), how.norm), "amax"
                )
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
    )


class _Direction:
    """One recurrence of a layer, each output truncated to the same depth."""

    def __init__(self, recurrence: Recurrence, x: Tensor, floor: float) -> None:
        """Run the true trajectory of inputs x [N, T, I], aligned with time."""
        self.recurrence = recurrence
        reading = cells.reads(recurrence, x)
        self.restarts = _Restarts(Chain.of([recurrence]), reading, floor)

    def gap(self, depth: int) -> Tensor:
        """Return the outputs' deviations [N, T, H] at a depth not below the one before."""
        self.restarts.advance(depth)
        return cells.reads(self.recurrence, self.restarts.deviations())

    @property
    def true(self) -> Tensor:
        """The outputs [N, T, H] of the full run."""
        h = cells.output(self.recurrence.cell, self.restarts.true)
        h = h.reshape(self.restarts.T, self.restarts.N, -1).transpose(0, 1)
        return cells.reads(self.recurrence, h)

    @property
    def merged(self) -> bool:
        """Whether no restart is left that differs from the full run."""
        return not self.restarts.blocks


def _study_layer(layer: Layer, readout: Readout | None, x: Tensor, how: _How) -> DepthStudy:
    """Truncate both directions of one layer to every depth, one sweep for each."""
    N, T, _ = x.shape
    directions = [_Direction(recurrence, x, how.floor) for recurrence in layer.recurrences]
    errors: list[Tensor] = []
    settled = False
    while not errors or not (settled or how.clock.over()):
        gap = torch.cat([d.gap(len(errors)) for d in directions], dim=-1)
        errors.append(_size(_read(gap, readout), how.norm).amax(1))
        settled = len(errors) == T or all(d.merged for d in directions)
        how.report(1.0 if settled else len(errors) / T)
    return DepthStudy(
        errors=torch.stack(errors, dim=1),
        depths=tuple(range(len(errors))),
        lengths=(T,) * N,
        horizons=(T if settled else len(errors) - 1,) * N,
        norm=how.norm,
        floor=how.floor,
    )


class _Layerwise:
    """A stack of which each recurrence is truncated on its own, all to the same depth."""

    def __init__(self, stack: Stack, x: Tensor, floor: float) -> None:
        """Keep the inputs x [N, T, I]; the first layer's restarts serve ascending depths."""
        self.stack, self.x, self.floor = stack, x, floor
        self.first = self._directions(0, x)
        self.full = x
        for layer in range(len(stack.layers)):
            directions = self._directions(layer, self.full) if layer else self.first
            self.full = torch.cat([d.true for d in directions], dim=-1)

    def _directions(self, layer: int, x: Tensor) -> list[_Direction]:
        return [_Direction(r, x, self.floor) for r in self.stack.layers[layer].recurrences]

    def deviations(self, depth: int, which: Tensor) -> Tensor:
        """Return the gaps [n, T, F] of the last layer's outputs, on the sequences ``which``."""
        if self.first[0].restarts.depth <= depth:
            x = torch.cat([d.true + d.gap(depth) for d in self.first], dim=-1)[which]
        else:
            x = self._truncated(0, self.x[which], depth)
        for layer in range(1, len(self.stack.layers)):
            x = self._truncated(layer, x, depth)
        return x - self.full[which]

    def _truncated(self, layer: int, x: Tensor, depth: int) -> Tensor:
        return torch.cat([d.true + d.gap(depth) for d in self._directions(layer, x)], dim=-1)


def grid(T: int) -> Iterator[int]:
    """Yield 0, 1, 2, 3, 4, 6, 8, 12, 16, … below T."""
    yield 0
    power = 1
    while power < T:
        yield power
        if power > 1 and power * 3 // 2 < T:
            yield power * 3 // 2
        power *= 2


def _study_grid(stack: Stack, x: Tensor, epsilons: Sequence[float], how: _How) -> DepthStudy:
    """Truncate every recurrence to the depths of a grid, then between those that decide.

    A sequence leaves the grid once its error has settled, and all do where each is known to
    need more than the data can show. Between two depths of the grid only the sequences that
    exceed ε at the lower one are evaluated: the others keep the larger error of the two.
    """
    N, T, _ = x.shape
    layerwise = _Layerwise(stack, x, how.floor)
    table: dict[int, Tensor] = {}

    def evaluate(depth: int, which: Tensor) -> Tensor:
        gap = _read(layerwise.deviations(depth, which), stack.readout)
        return _size(gap, how.norm).amax(1)

    horizon = T
    going = torch.arange(N)
    for depth in grid(T):
        if table and how.clock.over():
            horizon = max(table)
            break
        errors = x.new_zeros(N)
        errors[going] = evaluate(depth, going)
        table[depth] = errors
        how.report(depth / T)
        going = going[~(errors[going] <= SETTLED)]
        if not len(going) or (2 * depth > T and bool((errors > max(epsilons)).all())):
            break
    for eps in epsilons:
        while not how.clock.over():
            depths = sorted(table)
            wrong = [k for k in depths if not bool((table[k] <= eps).all())]
            later = depths[depths.index(wrong[-1]) + 1 :] if wrong else []
            if not later or later[0] - wrong[-1] == 1 or 2 * later[0] > 3 * T // 2:
                break
            below, above = table[wrong[-1]], table[later[0]]
            deciding = (~(below <= eps)).nonzero().squeeze(1)
            middle = (wrong[-1] + later[0]) // 2
            table[middle] = torch.maximum(below, above)
            table[middle][deciding] = evaluate(middle, deciding)
    how.report(1.0)
    depths = sorted(table)
    return DepthStudy(
        errors=torch.stack([table[k] for k in depths], dim=1),
        depths=tuple(depths),
        lengths=(T,) * N,
        horizons=(horizon,) * N,
        norm=how.norm,
        floor=SETTLED,
        every_depth=depths == list(range(len(depths))),
    )
