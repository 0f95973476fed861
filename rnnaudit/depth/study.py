"""What was measured: errors of every depth on every sequence, and the k(ε) that follow."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rnnaudit.depth.rounding import MERGED
from rnnaudit.results import Norm


def grid(T: int) -> Iterator[int]:
    """Yield 0, 1, 2, 3, 4, 6, 8, 12, 16, … below T."""
    yield 0
    power = 1
    while power < T:
        yield power
        if power > 1 and power * 3 // 2 < T:
            yield power * 3 // 2
        power *= 2


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

        It is the smallest depth such that it and every later one evaluated keep the error ≤ ε
        at all positions, or a larger one where the study did not come down to that. None where it
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
