"""Sequences inside a graph: their sizes, the state before the first step, what a layer gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from rnnaudit.export.emit import INT64_MAX, Emitter
from rnnaudit.model import Layer, Recurrence


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Inputs x [T, N, I]; ``steps`` T and ``batch`` N are int64 vectors of one element."""

    x: ir.Value
    width: int
    steps: ir.Value
    batch: ir.Value


def measured(emit: Emitter, x: ir.Value, width: int, *, name: str = "shape") -> Sequences:
    """Write the sizes of x [T, N, width]."""
    shape = emit.op("Shape", x, name=name)
    zero, one, two = (emit.integers(i) for i in range(3))
    T = emit.slice(shape, zero, one, name=name.replace("shape", "T"))
    N = emit.slice(shape, one, two, name=name.replace("shape", "N"))
    return Sequences(x, width, T, N)


def clipped(
    emit: Emitter, sequences: Sequences, steps: int, *, first: bool, name: str
) -> Sequences:
    """Write the first or the last ``steps`` steps; shorter sequences stay whole."""
    start, end = (0, steps) if first else (-steps, INT64_MAX)
    bounds = emit.integers(start), emit.integers(end)
    x = emit.slice(sequences.x, *bounds, name=name)
    shape = emit.op("Shape", x, name=f"{name}_shape")
    T = emit.slice(shape, emit.integers(0), emit.integers(1), name=f"{name}_T")
    return Sequences(x, sequences.width, T, sequences.batch)


def expand(emit: Emitter, row: ir.Value, count: ir.Value, width: int, name: str) -> ir.Value:
    """Repeat a row [1, width] ``count`` times."""
    shape = emit.op("Concat", count, emit.integers(width), name=f"{name}_shape", axis=0)
    return emit.op("Expand", row, shape, name=name)


Start = tuple[ir.Value | None, ...]
"""Initial states as values [N, width] of the graph; None where the recurrence's own is meant."""


def widths_of(recurrence: Recurrence) -> tuple[int, ...]:
    """Return the widths of the parts of the state: (H,), or (P, H) for an LSTM's (h, c)."""
    output, state = recurrence.cell.hidden_size, recurrence.cell.state_size
    return (output,) if output == state else (output, state - output)


def starts(
    emit: Emitter, recurrence: Recurrence, widths: Sequence[int], given: Start
) -> list[ir.Value]:
    """Store each part of the initial state as a row [1, width], or take the graph's [N, width]."""
    rows = []
    for i, part in enumerate(recurrence.initial.value.split(tuple(widths))):
        own = given[i] if i < len(given) else None
        rows.append(own or emit.constant(part.unsqueeze(0), f"{'hc'[i]}_start_row"))
    return rows


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which outputs of a layer are read: those after every step, the final h, the final c.

    ``guard`` asks for the distance between the results at depth k and at depth ⌈k/2⌉.
    """

    steps: bool = True
    h: bool = False
    c: bool = False
    guard: bool = False

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts of the final state that are read."""
        return tuple(part for part, read in enumerate((self.h, self.c)) if read)


STEPS = Wanted()


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """What one direction gives, where it is wanted.

    Attributes:
        rows: h after every step as rows [T·N, H] in the order of time.
        final: Part 0 (h) or 1 (c) after the direction's last step, [N, width].
        gap: How far h at depth k is from h at depth ⌈k/2⌉, [1].
    """

    rows: ir.Value | None
    final: dict[int, ir.Value]
    gap: ir.Value | None = None


def half(depth: int) -> int:
    """Return the depth ⌈k/2⌉ that a guard compares with."""
    return -(-depth // 2)


def largest(emit: Emitter, difference: ir.Value, name: str = "gap") -> ir.Value:
    """Write the largest |difference| as a vector of one element; 0 where there are no elements."""
    size = emit.op("Abs", difference, name=f"{name}_sizes")
    flat = emit.op("Reshape", size, emit.integers(-1), name=f"{name}_flat")
    zero = emit.constant(torch.zeros(1), f"{name}_zero")
    padded = emit.op("Concat", flat, zero, name=f"{name}_or_zero", axis=0)
    gap = emit.op("ReduceMax", padded, name=name, keepdims=1)
    gap.type = ir.TensorType(emit.dtype)
    return gap


def gap_between(
    emit: Emitter, deep: ir.Value, shallow: ir.Value, valid: ir.Value | None = None
) -> ir.Value:
    """Write how far two results are apart, [1]; 0 where ``valid`` [1] is false."""
    gap = largest(emit, emit.op("Sub", deep, shallow, name="gap_difference"))
    if valid is None:
        return gap
    zero = emit.constant(torch.zeros(1), "no_gap")
    shown = emit.op("Where", valid, gap, zero, name="gap_valid")
    shown.type = gap.type
    return shown


def final_rows(
    emit: Emitter, rows: ir.Value, recurrence: Recurrence, batch: ir.Value, name: str
) -> ir.Value:
    """Take the N rows of the direction's last step, which for a reverse one is the first in time.

    ``rows`` [T·N, width] are in the order of time.
    """
    if recurrence.reverse:
        return emit.slice(rows, emit.integers(0), batch, name=name)
    start = emit.op("Neg", batch, name=f"{name}_from")
    return emit.slice(rows, start, emit.integers(INT64_MAX), name=name)


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """A truncated layer: what its directions give, forward before reverse, over T steps.

    ``past`` is the buffer of a streaming layer before and after this call, ``rows`` its batch
    where the graph tells it, by number or name.
    """

    layer: Layer
    steps: ir.Value
    batch: ir.Value
    states: tuple[States, ...]
    past: tuple[ir.Value, ir.Value] | None = None
    rows: int | str | None = None

    def outputs(self, emit: Emitter) -> ir.Value:
        """Write the outputs side by side, [T, N, F]."""
        rows = [s.rows for s in self.states]
        joined = rows[0] if len(rows) == 1 else emit.op("Concat", *rows, name="y_rows", axis=1)
        width = emit.integers(self.layer.output_size)
        shape = emit.op("Concat", self.steps, self.batch, width, name="y_shape", axis=0)
        return emit.op("Reshape", joined, shape, name="y")

    def directions(self, emit: Emitter) -> ir.Value:
        """Write the outputs with an axis of directions, [T, D, N, H]."""
        one, width = emit.integers(1), emit.integers(self._width(0))
        shape = emit.op("Concat", self.steps, one, self.batch, width, name="y_shape", axis=0)
        y = [emit.op("Reshape", s.rows, shape, name=f"y_{d}") for d, s in enumerate(self.states)]
        return y[0] if len(y) == 1 else emit.op("Concat", *y, name="y", axis=1)

    def final(self, emit: Emitter, part: int) -> ir.Value:
        """Write part 0 (h) or 1 (c) of each direction's last state, [D, N, H]."""
        name = "hc"[part]
        width = emit.integers(self._width(part))
        one = emit.integers(1)
        shape = emit.op("Concat", one, self.batch, width, name=f"{name}_last_shape", axis=0)
        last = [
            emit.op("Reshape", s.final[part], shape, name=f"{name}_{d}_final")
            for d, s in enumerate(self.states)
        ]
        return last[0] if len(last) == 1 else emit.op("Concat", *last, name=f"{name}_final", axis=0)

    def _width(self, part: int) -> int:
        cell = self.layer.recurrences[0].cell
        return cell.hidden_size if part == 0 else cell.state_size - cell.hidden_size
