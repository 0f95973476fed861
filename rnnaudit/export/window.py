"""The window form: k layers that each shift the state by one step and apply the cell.

H⁽⁰⁾ = s_start, H⁽ʲ⁾_t = φ(H⁽ʲ⁻¹⁾_{t−1}, x_t), for all t at once. Sequences are flattened
time first to rows [T·N, ·], so that shifting by a step is shifting by N rows, and a
reverse recurrence shifts the other way instead of turning the data round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import onnx_ir as ir

from rnnaudit.export.emit import INT64_MAX, Emitter
from rnnaudit.export.interface import Rows, Steps, steps
from rnnaudit.model import Layer, Recurrence


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Inputs [T, N, I] as rows [T·N, I]; the sizes are int64 vectors of one element."""

    rows: ir.Value
    steps: ir.Value
    batch: ir.Value
    count: ir.Value


def flatten(emit: Emitter, x: ir.Value, width: int) -> Sequences:
    """Write x [T, N, width] as rows, and its sizes."""
    zero, one, two = (emit.integers(i) for i in range(3))
    shape = emit.op("Shape", x, name="shape")
    T = emit.slice(shape, zero, one, name="T")
    N = emit.slice(shape, one, two, name="N")
    rows = emit.op("Reshape", x, emit.integers(-1, width), name="rows")
    return Sequences(rows, T, N, emit.op("Mul", T, N, name="TN"))


def _expand(emit: Emitter, row: ir.Value, count: ir.Value, width: int, name: str) -> ir.Value:
    shape = emit.op("Concat", count, emit.integers(width), name=f"{name}_shape", axis=0)
    return emit.op("Expand", row, shape, name=name)


def _shift(
    emit: Emitter, part: ir.Value, start: ir.Value, cut: ir.Value, reverse: bool
) -> ir.Value:
    """Write each row's predecessor in time; ``start`` [N, width] precedes the first step."""
    assert part.name is not None
    name = part.name.rsplit("/", 1)[-1]
    if reverse:
        kept = emit.slice(part, cut, emit.integers(INT64_MAX), name=f"{name}_later")
        return emit.op("Concat", kept, start, name=f"{name}_before", axis=0)
    kept = emit.slice(part, emit.integers(0), cut, name=f"{name}_earlier")
    return emit.op("Concat", start, kept, name=f"{name}_before", axis=0)


Start = tuple[ir.Value | None, ...]
"""Initial states as values [N, width] of the graph; None where the recurrence's own is meant."""


def window(
    emit: Emitter, recurrence: Recurrence, x: Sequences, depth: int, given: Start = ()
) -> Rows:
    """Write a recurrence in which every step sees its last ``depth`` inputs only.

    Args:
        emit: Where to write.
        recurrence: The cell, its direction and its initial state.
        x: Its input.
        depth: Number of layers k.
        given: Parts of the initial state that the graph computes.

    Returns:
        The parts of the state after each step, as rows [T·N, width] in the order of time.

    Raises:
        ValueError: ``depth`` is below 1.
    """
    if depth < 1:
        raise ValueError(f"a window needs a depth of at least 1, got {depth}")
    cell: Steps = steps(recurrence.cell, emit)
    z = cell.drive(x.rows)
    cut = x.batch if recurrence.reverse else emit.op("Neg", x.batch, name="minus_N")
    starts, states = [], []
    parts = recurrence.initial.value.split(cell.widths)
    for i, (part, width) in enumerate(zip(parts, cell.widths, strict=True)):
        name, own = f"{'hc'[i]}_start", given[i] if i < len(given) else None
        if own is None:
            row = emit.constant(part.unsqueeze(0), f"{name}_row")
            states.append(_expand(emit, row, x.count, width, f"{name}_everywhere"))
            own = _expand(emit, row, x.batch, width, name) if depth > 1 else row
        else:
            shape = emit.op(
                "Concat", x.steps, x.batch, emit.integers(width), name=f"{name}_shape", axis=0
            )
            spread = emit.op("Expand", own, shape, name=f"{name}_spread")
            rows = emit.integers(-1, width)
            states.append(emit.op("Reshape", spread, rows, name=f"{name}_everywhere"))
        starts.append(own)
    digits = max(2, len(str(depth)))
    with emit.scope(f"step_{1:0{digits}}"):
        s = cell.advance(tuple(states), z)
    for j in range(2, depth + 1):
        with emit.scope(f"step_{j:0{digits}}"):
            before = tuple(
                _shift(emit, part, start, cut, reverse=recurrence.reverse)
                for part, start in zip(s, starts, strict=True)
            )
            s = cell.advance(before, z)
    return s


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """A truncated layer: states of each direction as rows, forward before reverse."""

    layer: Layer
    x: Sequences
    states: tuple[Rows, ...]

    def outputs(self, emit: Emitter) -> ir.Value:
        """Write the outputs side by side, [T, N, F]."""
        rows = [s[0] for s in self.states]
        joined = rows[0] if len(rows) == 1 else emit.op("Concat", *rows, name="y_rows", axis=1)
        width = emit.integers(self.layer.output_size)
        shape = emit.op("Concat", self.x.steps, self.x.batch, width, name="y_shape", axis=0)
        return emit.op("Reshape", joined, shape, name="y")

    def directions(self, emit: Emitter) -> ir.Value:
        """Write the outputs with an axis of directions, [T, D, N, H]."""
        one, width = emit.integers(1), emit.integers(self._width(0))
        shape = emit.op("Concat", self.x.steps, one, self.x.batch, width, name="y_shape", axis=0)
        y = [emit.op("Reshape", s[0], shape, name=f"y_{d}") for d, s in enumerate(self.states)]
        return y[0] if len(y) == 1 else emit.op("Concat", *y, name="y", axis=1)

    def final(self, emit: Emitter, part: int) -> ir.Value:
        """Write part 0 (h) or 1 (c) of each direction's last state, [D, N, H]."""
        name = "hc"[part]
        width = emit.integers(self._width(part))
        shape = emit.op(
            "Concat", emit.integers(1), self.x.batch, width, name=f"{name}_last_shape", axis=0
        )
        last = []
        for d, (recurrence, s) in enumerate(zip(self.layer.recurrences, self.states, strict=True)):
            if recurrence.reverse:  # its last step is the first in time
                start, end = emit.integers(0), self.x.batch
            else:
                start = emit.op("Neg", self.x.batch, name=f"{name}_{d}_from")
                end = emit.integers(INT64_MAX)
            rows = emit.slice(s[part], start, end, name=f"{name}_{d}_last")
            last.append(emit.op("Reshape", rows, shape, name=f"{name}_{d}_final"))
        return last[0] if len(last) == 1 else emit.op("Concat", *last, name=f"{name}_final", axis=0)

    def _width(self, part: int) -> int:
        cell = self.layer.recurrences[0].cell
        return cell.hidden_size if part == 0 else cell.state_size - cell.hidden_size


def window_layer(
    emit: Emitter,
    layer: Layer,
    x: ir.Value,
    depths: Mapping[str, int],
    given: Sequence[Start] = (),
) -> LayerStates:
    """Write a layer, each direction cut to its depth, over x [T, N, I].

    Args:
        emit: Where to write.
        layer: The layer.
        x: Its input.
        depths: Depth by ``Recurrence.label``; every direction of the layer has one.
        given: Initial states that the graph computes, by direction.
    """
    sequences = flatten(emit, x, layer.input_size)
    states = []
    for d, recurrence in enumerate(layer.recurrences):
        scope = emit.scope(recurrence.direction) if layer.bidirectional else nullcontext()
        start = given[d] if given else ()
        with scope:
            states.append(window(emit, recurrence, sequences, depths[recurrence.label], start))
    return LayerStates(layer, sequences, tuple(states))
