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
# An error is told apart from rounding where it exceeds this, relative to the largest |s| or 1.
RESOLVED = 2.0**-43

_STAGE = 8  # sweeps that one block of restarts makes before the next block has its turn
_BLOCK = 1 << 18  # numbers of a block's drive: it then stays in the cache
_BYTES = 1 << 29  # trajectories and restarts that are held at once
_MOST = 2e11  # multiplications of a layer by layer study, beyond which it says less


def floor_for(eps: float) -> float:
    """Return the difference of states that counts as merged where ε is asked: 10⁻⁶ ε or less."""
    return min(MERGED, 1e-6 * eps) if eps > RESOLVED else MERGED


@dataclass(frozen=True, slots=True, eq=False)
class DepthStudy:
    """Errors of every truncation depth that was evaluated.

    Attributes:
        errors: Largest error over positions and output units, [N, D] for the N sequences
            and D depths; infinite where a state is not finite, NaN where it was not
            evaluated.
        depths: The depths, ascending from 0. Where some are left out, each sequence has
            every depth from the first after which it keeps the largest ε.
        lengths: Length T of each sequence.
        horizons: Depth up to which each sequence was evaluated: its length unless the time
            budget ended first. All restarts have then merged beyond ``depths[-1]``.
        norm: ``max`` or ``2``, over the output units of one position.
        floor: Relative state difference below which a restart counts as merged.
        every_depth: Whether ``depths`` leaves none out up to its last.
        resolutions: The smallest error of each sequence that stands out of rounding, below
            which nothing is known of it; 0 for all where it is empty.
        unit_eps: The ε of ``units``.
        units: Largest depth evaluated at which each unit of the state is off by more than
            ``unit_eps`` somewhere, [N, S], and −1 where none is; None where it was not asked.
        whole: Whether no sequence can be longer, so that none shows too little of the memory.
    """

    errors: Tensor
    depths: tuple[int, ...]
    lengths: tuple[int, ...]
    horizons: tuple[int, ...]
    norm: Norm = "max"
    floor: float = MERGED
    every_depth: bool = True
    resolutions: tuple[float, ...] = ()
    unit_eps: float | None = None
    units: Tensor | None = None
    whole: bool = False

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
        positions, or a larger one where the study did not come down to that. None where it
        exceeds half of what the sequence can show, or ε is below the resolution. A sequence
        that was evaluated to its end, and is ``whole``, shows all; depth T is exact.
        """
        rows = zip(
            self.errors.tolist(), self.horizons, self.lengths, self._resolutions, strict=True
        )
        return tuple(
            None if eps < least else self._needed(errors, horizon, length, eps)
            for errors, horizon, length, least in rows
        )

    def error_of(self, depth: int, rows: Sequence[int]) -> float:
        """Return the largest error of these sequences at this depth and every larger one."""
        deep = [i for i, k in enumerate(self.depths) if k >= depth]
        known = self.errors[[n for n in rows if n < len(self.errors)]][:, deep]
        return float(known.nan_to_num(nan=math.inf).amax()) if known.numel() else 0.0

    @property
    def _resolutions(self) -> tuple[float, ...]:
        return self.resolutions or (0.0,) * len(self.lengths)

    @property
    def resolution(self) -> float:
        """The smallest ε that every sequence can be measured for."""
        return max(self._resolutions)

    def _needed(self, errors: Sequence[float], horizon: int, length: int, eps: float) -> int | None:
        known = bisect_right(self.depths, horizon)
        wrong = [i for i in range(known) if not errors[i] <= eps]
        if not wrong:
            return 0
        last = wrong[-1]
        if math.isinf(errors[last]):
            return None
        if last + 1 < known:
            k = self.depths[last + 1]
        elif self.every_depth and not math.isnan(errors[last]):
            k = self.depths[last] + 1  # all restarts have merged by the next, or none is left
        elif self.whole and horizon == length:
            k = length
        else:
            return None
        return k if 2 * k <= horizon or (self.whole and horizon == length) else None

    def unit_depths(self) -> tuple[int | None, ...] | None:
        """Return each state unit's k(``unit_eps``): the largest over sequences.

        None for a unit that some sequence shows to need more than half of what it can show;
        None for all where units were not followed, or ε is below the resolution.
        """
        if self.units is None or self.unit_eps is None or self.unit_eps < self.resolution:
            return None
        shown = torch.tensor(self.horizons).unsqueeze(1)
        needed = self.units + 1
        enough = ((2 * needed <= shown).all(0) | (self.whole and self.complete)).tolist()
        return tuple(
            k if known else None for k, known in zip(needed.amax(0).tolist(), enough, strict=True)
        )

    def longer_than(self, eps: float) -> tuple[int, ...]:
        """Return for each sequence a depth that K_i(ε) exceeds, at most half of its horizon.

        0 where no depth was seen to err.
        """
        rows = zip(self.errors.tolist(), self.horizons, self._resolutions, strict=True)
        return tuple(
            min(
                horizon // 2,
                max(
                    (k for k, e in zip(self.depths, row, strict=True) if e > max(eps, least)),
                    default=0,
                ),
            )
            for row, horizon, least in rows
        )


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
    errors.scatter_reduce_(0, rows.unsqueeze(1).expand_as(study.errors), study.errors, "amax")
    first = [int((rows == n).nonzero()[0]) for n in range(len(names))]
    return replace(
        study,
        errors=errors,
        lengths=tuple(study.lengths[i] for i in first),
        horizons=tuple(
            min(study.horizons[i] for i in (rows == n).nonzero().flatten().tolist())
            for n in range(len(names))
        ),
        resolutions=tuple(
            max(study._resolutions[i] for i in (rows == n).nonzero().flatten().tolist())
            for n in range(len(names))
        ),
        units=None
        if study.units is None
        else torch.stack([study.units[rows == n].amax(0) for n in range(len(names))]),
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
    units = [study.units for study in studies]
    return DepthStudy(
        errors=torch.cat([_spread(study, depths) for study in studies]),
        depths=depths,
        lengths=tuple(T for study in studies for T in study.lengths),
        horizons=tuple(h for study in studies for h in study.horizons),
        norm=studies[0].norm,
        floor=max(study.floor for study in studies),
        every_depth=all(study.every_depth for study in studies),
        resolutions=tuple(r for study in studies for r in study._resolutions),
        unit_eps=studies[0].unit_eps,
        units=None if None in units else torch.cat([u for u in units if u is not None]),
        whole=all(study.whole for study in studies),
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


def _resolutions(
    states: Tensor, units: int, readout: Readout | None, norm: Norm
) -> tuple[float, ...]:
    """Return for each of states [T, N, S] the smallest error that rounding cannot explain.

    0 where states are not finite: every error is infinite there.
    """
    largest = states.abs().amax((0, 2)).clamp(min=1).nan_to_num(nan=0.0, posinf=0.0)
    gain = states.new_ones(units) if readout is None else readout.A.abs().sum(1)
    spread = float(_size(gain, norm)) if len(gain) else 0.0
    return tuple((RESOLVED * largest * spread).tolist())


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
    unit_eps: float | None = None
    whole: bool = False

    @classmethod
    def of(
        cls,
        norm: Norm,
        floor: float,
        budget_s: float | None,
        progress: Progress | None,
        unit_eps: float | None = None,
        *,
        whole: bool = False,
    ) -> _How:
        """Start the clock."""
        report = progress or (lambda share: None)
        return cls(norm, floor, _Clock(budget_s), report, unit_eps, whole)


def study_recurrence(
    recurrence: Recurrence,
    x: Tensor,
    *,
    readout: Readout | None = None,
    norm: Norm = "max",
    budget_s: float | None = None,
    progress: Progress | None = None,
    floor: float = MERGED,
    unit_eps: float | None = None,
    whole: bool = False,
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
        unit_eps: Also say for each unit of the state at which depths it is off by more.
        whole: Whether no sequence can be longer than these.
    """
    system = Chain.of([recurrence], readout)
    how = _How.of(norm, floor, budget_s, progress, unit_eps, whole=whole)
    return _study(system, cells.reads(recurrence, x), how)


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
    whole: bool = False,
) -> DepthStudy:
    """Measure truncation depths of a whole stack, through its readout, on x [N, T, I].

    Where all layers run in one direction they are restarted together: depth k is the model
    run on a window of its last k inputs. Otherwise, or where ``layerwise`` asks for it,
    each recurrence is truncated to the same depth on its own. With one layer every depth
    is evaluated; with several, every depth that decides for one of ``epsilons``.

    Args:
        stack: The layers and the readout.
        x: Inputs, aligned with time.
        norm: ``max`` over output units, or ``2``.
        layerwise: Force one form or the other; layers of both directions have only one.
        epsilons: What depths are wanted for, where not every depth is evaluated.
        budget_s: Stop after this many seconds; the study then says how far it came.
        progress: Called with the share of the work that is done.
        floor: Relative difference of states that counts as merged.
        whole: Whether no sequence can be longer than these.
    """
    how = _How.of(norm, floor, budget_s, progress, whole=whole)
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
    nothing = system.start - restarts.true
    size = _size(system.deviation(nothing), how.norm)
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
                    0, rows % N, _size(system.deviation(gap), how.norm), "amax"
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
        resolutions=_resolutions(
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

    def advance(self) -> None:
        """Bring every restart one step further."""
        self.restarts.advance(self.restarts.depth + 1)

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
        resolutions=_of_layer(directions, readout, how.norm),
        whole=how.whole,
    )


def _of_layer(
    directions: Sequence[_Direction], readout: Readout | None, norm: Norm
) -> tuple[float, ...]:
    """Return the resolutions of a layer's output."""
    states = [d.restarts.true.unflatten(0, (d.restarts.T, d.restarts.N)) for d in directions]
    units = sum(d.recurrence.cell.hidden_size for d in directions)
    return _resolutions(torch.cat(states, -1), units, readout, norm)


class _Layerwise:
    """A stack of which each recurrence is truncated on its own, all to the same depth."""

    def __init__(self, stack: Stack, x: Tensor, floor: float) -> None:
        """Run all layers in full on inputs x [N, T, I]."""
        self.stack, self.x, self.floor = stack, x, floor
        self.inputs = []
        for layer in range(len(stack.layers)):
            self.inputs.append(x)
            self.last = self._directions(layer, x)
            x = torch.cat([d.true for d in self.last], dim=-1)
        self.full = x

    def _directions(self, layer: int, x: Tensor) -> list[_Direction]:
        return [_Direction(r, x, self.floor) for r in self.stack.layers[layer].recurrences]

    def merged(self, over: Callable[[], bool]) -> int | None:
        """Return a depth at which no restart of any recurrence is left; None if time ends.

        From there on every layer reads and gives what the full run does.
        """
        depth = 0
        for layer, x in enumerate(self.inputs):
            for direction in self._directions(layer, x):
                while not direction.merged:
                    if over():
                        return None
                    direction.advance()
                depth = max(depth, direction.restarts.depth)
        return depth

    def deviations(self, depth: int, which: Tensor) -> Tensor:
        """Return the gaps [n, T, F] of the last layer's outputs, on the sequences ``which``."""
        x = self.x[which]
        for layer in range(len(self.stack.layers)):
            parts = self._directions(layer, x)
            x = torch.cat([d.true + d.gap(depth) for d in parts], dim=-1)
        return x - self.full[which]

    def cost(self, depth: int) -> float:
        """Return about how many multiplications one sequence takes at a depth."""
        step = sum(cells.multiplications(r.cell) for r in self.stack.recurrences())
        return float(step) * self.x.shape[1] * (depth + 1)


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
    """Truncate every recurrence to each depth, from where all have merged downward.

    A sequence is done at the first depth that exceeds the largest ε: what it needs for any
    of them is then known, and no smaller depth can change it. A grid of small depths is
    added for the curve. Where the time budget or ``_MOST`` ends the descent, depths below
    are unknown (NaN), and what a sequence needs is at most the last one that was reached.
    """
    N, T, _ = x.shape
    layerwise = _Layerwise(stack, x, how.floor)
    unknown = x.new_full((N,), math.nan)
    most = max(epsilons)
    spent = 0.0

    def evaluate(depth: int, which: Tensor) -> Tensor:
        nonlocal spent
        spent += layerwise.cost(depth) * len(which)
        gap = _read(layerwise.deviations(depth, which), stack.readout)
        return unknown.index_copy(0, which, _size(gap, how.norm).amax(1))

    def over() -> bool:
        return spent > _MOST or how.clock.over()

    table = {0: evaluate(0, torch.arange(N))}
    top = layerwise.merged(how.clock.over)
    horizon = T
    if top is None:
        table[1], horizon = unknown, 1
    else:
        top = min(top, T - 1)
        going = torch.arange(N)
        half = (T + 1) // 2
        if (
            top > half and not how.whole
        ):  # what errs here needs more than the data can show, whatever the rest
            table[half] = evaluate(half, going)
            going = (table[half] <= most).nonzero().squeeze(1)
        shown = [k for k in grid(top) if 0 < k < top]
        for depth in range(top, 0, -1):
            if not len(going):
                break
            if over():
                table[depth] = unknown
                break
            which = torch.arange(N) if depth in shown else going
            table[depth] = found = evaluate(depth, which)
            going = going[found[going] <= most]
            how.report((top - depth) / top)
        for depth in shown:
            if depth not in table and not over():
                table[depth] = evaluate(depth, torch.arange(N))
    how.report(1.0)
    depths = sorted(table)
    return DepthStudy(
        errors=torch.stack([table[k] for k in depths], dim=1),
        depths=tuple(depths),
        lengths=(T,) * N,
        horizons=(horizon,) * N,
        norm=how.norm,
        floor=how.floor,
        every_depth=depths == list(range(len(depths))),
        resolutions=_of_layer(layerwise.last, stack.readout, how.norm),
        whole=how.whole,
    )
