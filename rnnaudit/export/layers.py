"""A truncated layer in one of its forms: every direction over the same input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import onnx_ir as ir

from rnnaudit.export.chunk import blocks, kept, kept_whole, one_block, unrolled
from rnnaudit.export.emit import INT64_MAX, Emitter
from rnnaudit.export.filter import filtered
from rnnaudit.export.nodes import RecurrentNode
from rnnaudit.export.sequences import (
    STEPS,
    LayerStates,
    Sequences,
    Start,
    States,
    Wanted,
    clipped,
    measured,
)
from rnnaudit.export.window import window
from rnnaudit.model import Layer, Recurrence
from rnnaudit.truncation import WINDOW, Form


def write_layer(
    emit: Emitter,
    layer: Layer,
    x: ir.Value,
    depths: Mapping[str, int],
    *,
    form: Form = WINDOW,
    wanted: Wanted = STEPS,
    given: Sequence[Start] = (),
) -> LayerStates:
    """Write a layer, each direction cut to its depth, over x [T, N, I].

    In the form ``last`` the outputs after every step are those of the final steps only.

    Args:
        emit: Where to write.
        layer: The layer.
        x: Its input.
        depths: Depth by ``Recurrence.label``; every direction of the layer has one.
        form: How it is written.
        wanted: Which of its outputs are read.
        given: Initial states that the graph computes, by direction.

    Raises:
        UnsupportedModelError: The form keeps operators and no ONNX operator has such a cell.
    """
    sequences = measured(emit, x, layer.input_size)
    if form.past:
        (recurrence,) = layer.recurrences
        writer = _Direction(recurrence, depths[recurrence.label], form, wanted, (), 1)
        return _continued(emit, layer, sequences, writer)
    steps = reach(layer, depths, form.final)
    if form.name == "last" and wanted.steps:
        # One piece for both directions, so that their outputs lie side by side.
        sequences = clipped(emit, sequences, steps, first=False, name="late")
    states = []
    for d, recurrence in enumerate(layer.recurrences):
        scope = emit.scope(recurrence.direction) if layer.bidirectional else nullcontext()
        depth, start = depths[recurrence.label], given[d] if given else ()
        bound = steps if wanted.steps else depth
        with scope:
            direction = _Direction(recurrence, depth, form, wanted, start, bound)
            states.append(direction.write(emit, sequences))
    return LayerStates(layer, sequences.steps, sequences.batch, tuple(states))


def _continued(emit: Emitter, layer: Layer, new: Sequences, direction: _Direction) -> LayerStates:
    """Write a layer over new steps behind a buffer of at most k − 1 steps before them.

    The buffer is empty before the first call, so that the first k outputs are exact.
    """
    depth = direction.depth
    past = ir.Value(name=emit.named("past"), type=ir.TensorType(emit.dtype))
    joined = emit.op("Concat", past, new.x, name="past_and_new", axis=0)
    every = measured(emit, joined, layer.input_size, name="joined_shape")
    bounds = emit.integers(1 - depth if depth > 1 else INT64_MAX), emit.integers(INT64_MAX)
    kept = emit.slice(joined, *bounds, name="past_next")
    states = direction.write(emit, every)
    if states.rows is not None:
        count = emit.op("Mul", new.steps, new.batch, name="new_rows")
        total = emit.op("Mul", every.steps, every.batch, name="joined_rows")
        first = emit.op("Sub", total, count, name="first_new_row")
        rows = emit.slice(states.rows, first, emit.integers(INT64_MAX), name="h_new")
        states = replace(states, rows=rows)
    batch = None if new.x.shape is None else new.x.shape[1]
    known = batch.value if isinstance(batch, ir.SymbolicDim) else batch
    return LayerStates(layer, new.steps, new.batch, (states,), (past, kept), known)


def reach(layer: Layer, depths: Mapping[str, int], final: int) -> int:
    """Return how many last steps of the input the outputs of the ``final`` ones need."""
    ahead = [depths[r.label] - 1 for r in layer.recurrences if not r.reverse]
    return final + max(ahead, default=0)


@dataclass(frozen=True, slots=True, eq=False)
class _Direction:
    """One direction of a layer, and how it is to be written.

    ``steps`` bounds how many the last form is given.
    """

    recurrence: Recurrence
    depth: int
    form: Form
    wanted: Wanted
    given: Start
    steps: int

    def write(self, emit: Emitter, x: Sequences) -> States:
        if self.form.name == "filter":
            return filtered(emit, self.recurrence, x, self.depth, wanted=self.wanted)
        if self.form.name == "window":
            return window(
                emit, self.recurrence, x, self.depth, wanted=self.wanted, given=self.given
            )
        node = RecurrentNode(emit, (self.recurrence,)) if self.form.keep_ops else None
        reverse = self.recurrence.reverse
        if self.form.name == "last" and not self.wanted.steps:
            x = clipped(emit, x, self.depth, first=reverse, name="near")
        if self.form.name == "last" and node is not None:
            return kept_whole(
                emit,
                self.recurrence,
                node,
                x,
                depth=self.depth,
                wanted=self.wanted,
                given=self.given,
            )
        cut = (
            one_block(emit, x, self.steps, reverse=reverse)
            if self.form.name == "last" and self.form.block == self.form.final
            else blocks(emit, x, self.depth - 1, self.form.block, reverse=reverse)
        )
        if node is None:
            return unrolled(
                emit,
                self.recurrence,
                cut,
                depth=self.depth,
                wanted=self.wanted,
                given=self.given,
            )
        return kept(
            emit,
            self.recurrence,
            node,
            cut,
            depth=self.depth,
            wanted=self.wanted,
            given=self.given,
        )
