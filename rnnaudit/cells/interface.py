"""What every cell can do: step, and its derivative as Jacobian, jvp and vjp, batched.

A state is one tensor s [..., S]: h for Elman cells and GRUs, (h, c) side by side for
LSTMs. ``drive`` computes the input's part of the pre-activations once for a whole
sequence; ``advance`` then takes one step from it. Leading axes are batch axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import singledispatch
from typing import Protocol

import torch
from torch import Tensor

from rnnaudit.model import Cell, ElmanCell, LSTMCell, TracedCell

CACHED = 1 << 17  # float64 numbers in the gates of a block: 1 MiB
_CALL, _UNIT = 1e6, 128  # multiplications in whose time a step starts, and bends a unit's state


class Linearization(Protocol):
    """The derivative ∂s'/∂s at a batch of states [...], in closed form.

    Tangents and cotangents are rows: V [..., m, S] holds m vectors for each state, so
    that applying a weight is one matrix product.
    """

    def jvp(self, V: Tensor) -> Tensor:
        """Return J v for each row v of V [..., m, S]."""
        ...

    def vjp(self, V: Tensor) -> Tensor:
        """Return Jᵀ v for each row v of V [..., m, S]."""
        ...

    def matrix(self) -> Tensor:
        """Return J [..., S, S]."""
        ...


@singledispatch
def drive(cell: Cell, x: Tensor) -> Tensor:
    """Map inputs x [..., I] to their part z of the pre-activations, biases included."""
    raise NotImplementedError(type(cell).__name__)


@singledispatch
def next_state(cell: Cell, s: Tensor, z: Tensor) -> Tensor:
    """Compute s' [..., S] for the whole batch at once; ``advance`` is what to call."""
    raise NotImplementedError(type(cell).__name__)


@singledispatch
def linearize(cell: Cell, s: Tensor, z: Tensor) -> Linearization:
    """Differentiate ``advance`` by the state at s [..., S] under the input drive z."""
    raise NotImplementedError(type(cell).__name__)


@singledispatch
def gate_values(cell: Cell, s: Tensor, z: Tensor) -> Mapping[str, Tensor]:
    """Return what each gate lets through [..., H], by name, in a step from s under the drive z.

    A gate at 1 passes all; a cell without gates has none.
    """
    return {}


def advance(cell: Cell, s: Tensor, z: Tensor) -> Tensor:
    """Take one step from state s [..., S] under the input drive z; return s' [..., S].

    Leading axes broadcast. Large batches go in blocks that stay in the cache (twice as
    fast for an LSTM or GRU of 112 units and 16,384 states).
    """
    batch = s.shape[:-1]
    if not batch or batch != z.shape[:-1] or batch.numel() * z.shape[-1] <= CACHED:
        return next_state(cell, s, z)
    if batch[0] == 1:
        return advance(cell, s[0], z[0]).unsqueeze(0)
    rows = max(1, CACHED // (z.shape[-1] * batch[1:].numel()))
    parts = zip(s.split(rows), z.split(rows), strict=True)
    return torch.cat([advance(cell, *part) for part in parts])


def multiplications(*cells: Cell) -> int:
    """Return the multiplications of one step's recurrent products, or of one jvp, in all cells."""
    return sum(_multiplications(cell) for cell in cells)


def _multiplications(cell: Cell) -> int:
    if isinstance(cell, TracedCell):
        return sum(weight.numel() for weight in cell.constants.values() if weight.ndim > 1)
    return (cell.W if isinstance(cell, ElmanCell) else cell.U).numel()


def effort(cells: Iterable[Cell], steps: int, rows: int) -> float:
    """Return about how many multiplications take as long as steps of all cells.

    Starting a step, and bending a unit's state, take longer than the products of a small cell.

    Args:
        cells: Each makes all of the steps.
        steps: One after another.
        rows: States that a step takes at once.
    """
    each = (_CALL + rows * (_multiplications(c) + _UNIT * c.state_size) for c in cells)
    return steps * sum(each)


def step(cell: Cell, s: Tensor, x: Tensor) -> Tensor:
    """Return s' = φ(s, x) for states s [..., S] and inputs x [..., I]."""
    return advance(cell, s, drive(cell, x))


def output(cell: Cell, s: Tensor) -> Tensor:
    """Return the output h [..., H] of a state s [..., S]."""
    return s[..., : cell.hidden_size] if isinstance(cell, LSTMCell | TracedCell) else s


def jacobian(cell: Cell, s: Tensor, x: Tensor) -> Tensor:
    """Return ∂s'/∂s [..., S, S] at states s [..., S] and inputs x [..., I]."""
    return linearize(cell, s, drive(cell, x)).matrix()


def jvp(cell: Cell, s: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """Return (∂s'/∂s) v for one tangent v [..., S] per state."""
    return linearize(cell, s, drive(cell, x)).jvp(v.unsqueeze(-2)).squeeze(-2)


def vjp(cell: Cell, s: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """Return (∂s'/∂s)ᵀ v for one cotangent v [..., S] per state."""
    return linearize(cell, s, drive(cell, x)).vjp(v.unsqueeze(-2)).squeeze(-2)
