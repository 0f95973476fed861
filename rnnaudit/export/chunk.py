"""The chunk form: time cut into blocks of C steps that run side by side in the batch.

Block b reads the steps bC + 1 … bC + w + C from s_start; the first w = k − 1 warm its state
up, so that each of the C outputs that it gives has seen at least its last k inputs. Block 0
starts where the sequence does and gives its warm-up steps too: no padding ever moves a
state that is read, and outputs with t ≤ k are exact. A sequence that does not fill its last
block is filled up at the end that is run last. Reverse recurrences are the mirror image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from rnnaudit.export.emit import INT64_MAX, Emitter
from rnnaudit.export.interface import Rows, Steps, steps
from rnnaudit.export.nodes import RecurrentNode
from rnnaudit.export.sequences import (
    Sequences,
    Start,
    States,
    Wanted,
    clipped,
    expand,
    final_rows,
    gap_between,
    half,
    starts,
    widths_of,
)
from rnnaudit.model import Recurrence


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A sequence as B overlapping blocks of L = w + C steps.

    Attributes:
        stages: Pieces [n, B·N, I] that together are the blocks' L steps, in the order of time.
        length: L.
        block: C.
        count: B, an int64 vector of one element; None where there is one block.
        source: The sequence.
        reverse: Whether the blocks are anchored at the end of the sequence.
        full: Whether the sequence fills the first block's warm-up and a step, a boolean [1].
    """

    stages: Sequence[tuple[int, ir.Value]]
    length: int
    block: int
    count: ir.Value | None
    source: Sequences
    reverse: bool
    full: ir.Value


def _filled(emit: Emitter, x: Sequences, total: ir.Value, *, reverse: bool) -> ir.Value:
    """Fill x up with zeros to ``total`` steps, at the end that is run last."""
    missing = emit.op("Sub", total, x.steps, name="missing")
    shape = emit.op("Concat", missing, x.batch, emit.integers(x.width), name="fill_shape", axis=0)
    fill = emit.op("Expand", emit.constant(torch.zeros(1, 1, 1), "zero"), shape, name="fill")
    parts = (fill, x.x) if reverse else (x.x, fill)
    return emit.op("Concat", *parts, name="filled", axis=0)


def one_block(emit: Emitter, x: Sequences, length: int, *, reverse: bool) -> Blocks:
    """Take a sequence of at most ``length`` steps as one block."""
    filled = _filled(emit, x, emit.integers(length), reverse=reverse)
    full = emit.op("Greater", x.steps, emit.integers(length - 1), name="fills_the_block")
    return Blocks([(length, filled)], length, length, None, x, reverse, full)


def blocks(emit: Emitter, x: Sequences, warm_up: int, block: int, *, reverse: bool) -> Blocks:
    """Cut a sequence into blocks of ``block`` steps, each with ``warm_up`` steps before them.

    The filled sequence is turned to [C, B + Q, N·I], in which the steps qC … qC + C − 1 of
    all blocks are one slice, so that nothing is gathered and every bound is a constant.
    """
    C, w, I = block, warm_up, x.width  # noqa: E741
    Q = -(-w // C)
    more = emit.op("Greater", x.steps, emit.integers(w), name="fills_a_block")
    T = emit.op("Where", more, x.steps, emit.integers(w + 1), name="T_or_one_block")
    beyond = emit.op("Sub", T, emit.integers(w + 1), name="beyond_first")
    full = emit.op("Div", beyond, emit.integers(C), name="blocks_before_last")
    B = emit.op("Add", full, emit.integers(1), name="block_count")
    columns = emit.op("Add", B, emit.integers(Q), name="columns")
    total = emit.op("Mul", columns, emit.integers(C), name="total")
    filled = _filled(emit, x, total, reverse=reverse)
    NI = emit.op("Mul", x.batch, emit.integers(I), name="NI")
    shape = emit.op("Concat", columns, emit.integers(C), NI, name="columns_shape", axis=0)
    apart = emit.op("Reshape", filled, shape, name="apart")
    turned = emit.op("Transpose", apart, name="turned", perm=[1, 0, 2])
    rows = emit.op("Mul", B, x.batch, name="BN")
    shape = emit.op("Concat", emit.integers(-1), rows, emit.integers(I), name="rows_shape", axis=0)
    # A reverse block's steps end at a multiple of C, counted from the end.
    offset = Q * C - w if reverse else 0
    stages = []
    for q in range(Q + 1):
        first = offset if q == 0 else 0
        last = C if q < Q or reverse else w + C - Q * C
        bounds = (
            emit.integers(first, q),
            emit.integers(last, q - Q if q < Q else INT64_MAX),
            emit.integers(0, 1),
        )
        piece = emit.op("Slice", turned, *bounds, name=f"stage_{q}_columns")
        stages.append((last - first, emit.op("Reshape", piece, shape, name=f"stage_{q}")))
    return Blocks(stages, w + C, C, B, x, reverse, more)


def _start_rows(
    emit: Emitter, recurrence: Recurrence, x: Sequences, count: ir.Value | None, given: Start
) -> Rows:
    """Write the initial state of every sequence of ``count`` blocks, [B·N, width]; B = 1 if None.

    The rows of a block follow one another, as those of x do.
    """
    widths, rows = widths_of(recurrence), []
    batch = x.batch if count is None else emit.op("Mul", count, x.batch, name="start_rows")
    for i, row in enumerate(starts(emit, recurrence, widths, given)):
        name = f"{'hc'[i]}_start"
        if i >= len(given) or given[i] is None:
            rows.append(expand(emit, row, batch, widths[i], name))
        elif count is None:
            rows.append(row)
        else:
            width = emit.integers(widths[i])
            shape = emit.op("Concat", count, x.batch, width, name=f"{name}_shape", axis=0)
            spread = emit.op("Expand", row, shape, name=f"{name}_spread")
            rows.append(emit.op("Reshape", spread, emit.integers(-1, widths[i]), name=name))
    return tuple(rows)


def unrolled(
    emit: Emitter,
    recurrence: Recurrence,
    cut: Blocks,
    *,
    depth: int,
    wanted: Wanted,
    given: Start = (),
) -> States:
    """Write the blocks step by step, without any recurrent operator."""
    cell: Steps = steps(recurrence.cell, emit)
    start = s = _start_rows(emit, recurrence, cut.source, cut.count, given)
    places = [(piece, i) for n, piece in cut.stages for i in range(n)]
    digits = max(2, len(str(len(places))))
    states: list[Rows] = []
    drives: list[Rows] = []
    for j, (piece, i) in enumerate(reversed(places) if cut.reverse else places, start=1):
        with emit.scope(f"step_{j:0{digits}}"):
            drives.append(cell.drive(emit.op("Gather", piece, emit.index(i), name="x")))
            s = cell.advance(s, drives[-1])
        states.append(s)
    gap = None
    if wanted.guard:  # at the first step that a block gives: it sees the fewest inputs
        first = len(states) - (cut.block if cut.count is not None else 1)
        s = start
        for j in range(max(0, first + 1 - half(depth)), first + 1):
            with emit.scope(f"shallow_{j + 1:0{digits}}"):
                s = cell.advance(s, drives[j])
        gap = gap_between(emit, states[first][0], s[0], cut.full)
    if cut.reverse:
        states.reverse()
    needed = {*wanted.parts, *((0,) if wanted.steps else ())}
    rows = {
        part: _in_time(emit, cut, [s[part] for s in states], cell.widths[part], "hc"[part])
        for part in sorted(needed)
    }
    final = {
        part: final_rows(emit, rows[part], recurrence, cut.source.batch, f"{'hc'[part]}_last")
        for part in wanted.parts
    }
    return States(rows.get(0), final, gap)


def _in_time(
    emit: Emitter, cut: Blocks, states: Sequence[ir.Value], width: int, name: str
) -> ir.Value:
    """Put states [B·N, width] after each of the L steps into the order of time, [T·N, width]."""
    if cut.count is None:
        return _cut(emit, cut, [emit.op("Concat", *states, name=f"{name}_all", axis=0)], name)
    N, C = cut.source.batch, cut.block
    given, edge = _given(cut, states)
    wide = emit.op("Mul", N, emit.integers(width), name=f"{name}_NH")
    shape = emit.op("Concat", cut.count, wide, name=f"{name}_block_shape", axis=0)
    by_block = [
        emit.op("Reshape", s, shape, name=f"{name}_{j}_by_block") for j, s in enumerate(given)
    ]
    body = by_block[0] if C == 1 else emit.op("Concat", *by_block, name=f"{name}_blocks", axis=1)
    body = emit.op("Reshape", body, emit.integers(-1, width), name=f"{name}_body")
    if not edge:
        return _cut(emit, cut, [body], name)
    start, end = _edge_rows(emit, cut, name)
    edges = [emit.slice(s, start, end, name=f"{name}_{j}_edge") for j, s in enumerate(edge)]
    first = edges[0] if len(edges) == 1 else emit.op("Concat", *edges, name=f"{name}_edge", axis=0)
    return _cut(emit, cut, [body, first] if cut.reverse else [first, body], name)


def _given(cut: Blocks, states: Sequence[ir.Value]) -> tuple[Sequence[ir.Value], ...]:
    """Tell the states that every block gives from those that only its first one does."""
    C, w = cut.block, len(states) - cut.block
    return (states[:C], states[C:]) if cut.reverse else (states[w:], states[:w])


def _edge_rows(emit: Emitter, cut: Blocks, name: str) -> tuple[ir.Value, ir.Value]:
    """Write the bounds of the rows that belong to the block which is run from the first step."""
    N = cut.source.batch
    if cut.reverse:
        return emit.op("Neg", N, name=f"{name}_minus_N"), emit.integers(INT64_MAX)
    return emit.integers(0), N


def _cut(emit: Emitter, cut: Blocks, parts: Sequence[ir.Value], name: str) -> ir.Value:
    """Join rows and take off those that were filled in."""
    rows = parts[0] if len(parts) == 1 else emit.op("Concat", *parts, name=f"{name}_all", axis=0)
    count = emit.op("Mul", cut.source.steps, cut.source.batch, name=f"{name}_TN")
    start, end = emit.integers(0), count
    if cut.reverse:  # from −T·N would be everything at T = 0
        shape = emit.op("Shape", rows, name=f"{name}_all_shape")
        total = emit.slice(shape, emit.integers(0), emit.integers(1), name=f"{name}_total")
        start = emit.op("Sub", total, count, name=f"{name}_from")
        end = emit.integers(INT64_MAX)
    return emit.slice(rows, start, end, name=f"{name}_rows")


def kept_whole(
    emit: Emitter,
    recurrence: Recurrence,
    node: RecurrentNode,
    x: Sequences,
    *,
    depth: int,
    wanted: Wanted,
    given: Start = (),
) -> States:
    """Run ONNX's own recurrent operator over a whole sequence."""
    widths = widths_of(recurrence)
    initial = _initial(emit, recurrence, x, None, given)
    outputs = node.run(x.x, initial, outputs=3 if wanted.c else 2)
    gap = None
    if wanted.guard:
        few = clipped(emit, x, half(depth), first=recurrence.reverse, name="nearest")
        with emit.scope("shallow"):
            gap = gap_between(emit, outputs[1], node.run(few.x, initial, outputs=2)[1])
    flat = [
        emit.op("Reshape", value, emit.integers(-1, width), name=name)
        for value, width, name in zip(
            outputs, (widths[0], *widths), ("h_rows", "h_last", "c_last"), strict=False
        )
    ]
    return States(flat[0], {part: flat[1 + part] for part in wanted.parts}, gap)


def kept(
    emit: Emitter,
    recurrence: Recurrence,
    node: RecurrentNode,
    cut: Blocks,
    *,
    depth: int,
    wanted: Wanted,
    given: Start = (),
) -> States:
    """Run the blocks with ONNX's own recurrent operator."""
    H = recurrence.cell.hidden_size
    pieces = [piece for _, piece in cut.stages]
    X = pieces[0] if len(pieces) == 1 else emit.op("Concat", *pieces, name="X", axis=0)
    initial = _initial(emit, recurrence, cut.source, cut.count, given)
    (y,) = node.run(X, initial, outputs=1)
    C, w = cut.block, cut.length - cut.block
    gap = None
    if wanted.guard:  # at the first step that a block gives: it sees the fewest inputs
        at = C - 1 if cut.reverse else w
        few = (at, at + half(depth)) if cut.reverse else (at + 1 - half(depth), at + 1)
        with emit.scope("shallow"):
            nearest = emit.slice(X, *(emit.integers(i) for i in few), name="X")
            end = node.run(nearest, initial, outputs=2)[1]
        same = emit.slice(y, emit.integers(at), emit.integers(at + 1), name="y_first")
        gap = gap_between(emit, same, end, cut.full)
    rows = _gathered(emit, cut, y, H)
    final = {}
    if wanted.h:
        final[0] = final_rows(emit, rows, recurrence, cut.source.batch, "h_last")
    if wanted.c:  # the operator's own is that of a later step, where a block was filled up
        x = clipped(emit, cut.source, depth, first=recurrence.reverse, name="near")
        with emit.scope("near"):
            wanted = Wanted(steps=False, c=True)
            whole = kept_whole(emit, recurrence, node, x, depth=depth, wanted=wanted, given=given)
        final[1] = whole.final[1]
    return States(rows, final, gap)


def _gathered(emit: Emitter, cut: Blocks, y: ir.Value, width: int) -> ir.Value:
    """Copy the states y [L, 1, B·N, H] after the blocks' steps into the order of time, once.

    Step t is step t − bC of block b = ⌊max(t − w, 0)/C⌋. Reverse blocks end where the sequence
    does: counted from the first step of block 0, which may lie before it, t is
    u = t + BC + w − T, and b = min(⌊u/C⌋, B − 1).
    """
    C, w = cut.block, cut.length - cut.block
    B, N, T = cut.count, cut.source.batch, cut.source.steps
    size = emit.op("Gather", T, emit.index(0), name="y_steps")
    t = emit.op("Range", emit.index(0), size, emit.index(1), name="t")
    first = emit.integers(0)
    if cut.reverse:
        end = emit.op("Mul", B, emit.integers(C), name="y_blocks_end")
        ahead = emit.op("Sub", emit.op("Add", end, emit.integers(w), name="y_end"), T, name="ahead")
        u = emit.op("Add", t, ahead, name="u")
        last = emit.op("Sub", B, emit.integers(1), name="y_last_block")
        block = emit.op("Div", u, emit.integers(C), name="block_or_later")
        inside = emit.op("Less", block, last, name="is_block")
        block = emit.op("Where", inside, block, last, name="block")
    else:
        u = t
        past = emit.op("Sub", t, emit.integers(w), name="past_warm_up")
        inside = emit.op("Greater", past, first, name="is_past_warm_up")
        past = emit.op("Where", inside, past, first, name="past")
        block = emit.op("Div", past, emit.integers(C), name="block")
    step = emit.op("Sub", u, emit.op("Mul", block, emit.integers(C), name="begins"), name="step")
    at = emit.op("Add", emit.op("Mul", step, B, name="step_row"), block, name="y_at")
    rows = emit.op("Mul", B, emit.integers(cut.length), name="LB")
    shape = emit.op("Concat", rows, N, emit.integers(width), name="y_by_block_shape", axis=0)
    by_block = emit.op("Reshape", y, shape, name="y_by_block")
    given = emit.op("Gather", by_block, at, name="y_given", axis=0)
    return emit.op("Reshape", given, emit.integers(-1, width), name="y_rows")


def _initial(
    emit: Emitter, recurrence: Recurrence, x: Sequences, count: ir.Value | None, given: Start
) -> Sequence[ir.Value]:
    """Write the initial parts [1, B·N, width] that the operator takes; none where all is zero."""
    if not any(given) and not bool(recurrence.initial.value.any()):
        return ()
    return [
        emit.op("Reshape", rows, emit.integers(1, -1, width), name=f"{name}_start_states")
        for rows, width, name in zip(
            _start_rows(emit, recurrence, x, count, given),
            widths_of(recurrence),
            "hc",
            strict=False,
        )
    ]
