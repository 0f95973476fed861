"""The window form: k layers that each shift the state by one step and apply the cell.

H⁽⁰⁾ = s_start, H⁽ʲ⁾_t = φ(H⁽ʲ⁻¹⁾_{t−1}, x_t), for all t at once. Sequences are flattened
time first to rows [T·N, ·], so that shifting by a step is shifting by N rows, and a
reverse recurrence shifts the other way instead of turning the data round.
"""

from __future__ import annotations

import onnx_ir as ir

from rnnaudit.export.emit import INT64_MAX, Emitter
from rnnaudit.export.interface import Rows, Steps, steps
from rnnaudit.export.sequences import (
    Sequences,
    Start,
    States,
    Wanted,
    expand,
    final_rows,
    gap_between,
    half,
    starts,
)
from rnnaudit.model import Recurrence


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


def window(
    emit: Emitter,
    recurrence: Recurrence,
    x: Sequences,
    depth: int,
    *,
    wanted: Wanted,
    given: Start = (),
) -> States:
    """Write a recurrence in which every step sees its last ``depth`` inputs only.

    Args:
        emit: Where to write.
        recurrence: The cell, its direction and its initial state.
        x: Its input.
        depth: Number of layers k.
        wanted: What is read of it.
        given: Parts of the initial state that the graph computes.

    Raises:
        ValueError: ``depth`` is below 1.
    """
    if depth < 1:
        raise ValueError(f"a window needs a depth of at least 1, got {depth}")
    cell: Steps = steps(recurrence.cell, emit)
    z = cell.drive(emit.op("Reshape", x.x, emit.integers(-1, x.width), name="rows"))
    count = emit.op("Mul", x.steps, x.batch, name="TN")
    cut = x.batch if recurrence.reverse else emit.op("Neg", x.batch, name="minus_N")
    before_first, states = [], []
    for i, (row, width) in enumerate(
        zip(starts(emit, recurrence, cell.widths, given), cell.widths, strict=True)
    ):
        name = f"{'hc'[i]}_start"
        if i < len(given) and given[i] is not None:
            shape = emit.op(
                "Concat", x.steps, x.batch, emit.integers(width), name=f"{name}_shape", axis=0
            )
            spread = emit.op("Expand", row, shape, name=f"{name}_spread")
            everywhere = emit.integers(-1, width)
            states.append(emit.op("Reshape", spread, everywhere, name=f"{name}_everywhere"))
        else:
            states.append(expand(emit, row, count, width, f"{name}_everywhere"))
        if depth > 1:  # as many rows as a step has, and none where there are no steps
            before_first.append(emit.slice(states[-1], emit.integers(0), x.batch, name=name))
    digits = max(2, len(str(depth)))
    with emit.scope(f"step_{1:0{digits}}"):
        s: Rows = cell.advance(tuple(states), z)
    shallow = s[0]
    for j in range(2, depth + 1):
        with emit.scope(f"step_{j:0{digits}}"):
            before = tuple(
                _shift(emit, part, start, cut, reverse=recurrence.reverse)
                for part, start in zip(s, before_first, strict=True)
            )
            s = cell.advance(before, z)
        if j == half(depth):
            shallow = s[0]
    final = {
        part: final_rows(emit, s[part], recurrence, x.batch, f"{'hc'[part]}_last")
        for part in wanted.parts
    }
    return States(s[0], final, gap_between(emit, s[0], shallow) if wanted.guard else None)
