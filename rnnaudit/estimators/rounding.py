"""What float64 may add to the distance of two runs, so that no witness is of rounding alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain

import torch
from torch import Tensor

from rnnaudit.model import Cell, Readout
from rnnaudit.results import Norm

UNIT = 2.0**-53
"""The relative error of one operation in float64."""


def rounding(
    cells: Sequence[Cell], largest: float, steps: int, readout: Readout | None, norm: Norm
) -> float:
    """Bound what rounding adds to the distance of two runs whose maps do not magnify it.

    A sum of n products of total size m is off by γ_n m, with γ_n = n u / (1 − n u) (Higham,
    *Accuracy and Stability of Numerical Algorithms*, 2002, §3.1). In a step n ≤ S + I + 8, with
    8 for biases, gates and activations, and m ≤ ‖W‖_∞ max(|s|, |x|, 1), taken over all weights.
    Slopes are at most 1, so that each of the ``steps`` of both runs adds that much; the readout
    then magnifies it by ‖A‖ and adds as much of its own. A map that magnifies rounding magnifies
    as well the gap that the prefix left.

    Args:
        cells: All that are run.
        largest: The largest |s| and |x| there are.
        steps: Of the longer run.
        readout: The linear layer behind them.
        norm: ``max`` or ``2``, over output units.
    """
    step = sum(_gamma(cell) * _weight(_tensors(cell)) for cell in cells) * max(largest, 1.0)
    width = cells[-1].hidden_size
    gain = torch.ones(width, dtype=torch.float64)
    if readout is not None:
        gain = readout.A.abs().sum(1) * (1 + width * UNIT)
    spread = float(gain.amax() if norm == "max" else gain.norm())
    return 2 * steps * step * spread


def _gamma(cell: Cell) -> float:
    n = cell.state_size + cell.input_size + 8
    return n * UNIT / (1 - n * UNIT)


def _weight(tensors: Iterator[Tensor]) -> float:
    """Return 1, and of each tensor the largest sum of sizes in a row or a column."""
    return 1 + sum(
        max(float(each.abs().sum(axis).max()) for axis in _axes(each)) for each in tensors
    )


def _axes(tensor: Tensor) -> Sequence[int | tuple[()]]:
    return (-2, -1) if tensor.ndim > 1 else ((),)


def _tensors(cell: Cell) -> Iterator[Tensor]:
    """Yield the weights of a cell."""
    values = (getattr(cell, field.name) for field in fields(cell))
    parts = (value.values() if isinstance(value, Mapping) else (value,) for value in values)
    for part in chain.from_iterable(parts):
        if isinstance(part, Tensor) and part.is_floating_point() and part.numel():
            yield part
