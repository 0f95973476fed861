"""A truncated layer in one of its forms: every direction over the same input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import onnx_ir as ir

from rnnaudit.export.chunk import blocks, kept, kept_whole, one_block, unrolled
from rnnaudit.export.emit import Emitter
from rnnaudit.export.nodes import RecurrentNode
from rnnaudit.export.sequences import STEPS, LayerStates, Start, Wanted, clipped, measured
from rnnaudit.export.window import window
from rnnaudit.model import Layer
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
    if form.name == "last" and wanted.steps:
        # One piece for both directions, so that their outputs lie side by side.
        sequences = clipped(emit, sequences, _reach(layer, depths, form), first=False, name="late")
    states = []
    for d, recurrence in enumerate(layer.recurrences):
        scope = emit.scope(recurrence.direction) if layer.bidirectional else nullcontext()
        start = given[d] if given else ()
        depth = depths[recurrence.label]
        with scope:
            if form.name == "window":
                states.append(
                    window(emit, recurrence, sequences, depth, wanted=wanted, given=start)
                )
                continue
            node = RecurrentNode(emit, (recurrence,)) if form.keep_ops else None
            part, reverse = sequences, recurrence.reverse
            if form.name == "last" and not wanted.steps:
                part = clipped(emit, sequences, depth, first=reverse, name="near")
            if form.name == "last" and node is not None:
                states.append(kept_whole(emit, recurrence, node, part, wanted=wanted, given=start))
                continue
            if form.name == "last":
                reach = _reach(layer, depths, form) if wanted.steps else depth
                cut = one_block(emit, part, reach, reverse=reverse)
            else:
                cut = blocks(emit, part, depth - 1, form.block, reverse=reverse)
            if node is None:
                states.append(unrolled(emit, recurrence, cut, wanted, start))
            else:
                states.append(
                    kept(emit, recurrence, node, cut, depth=depth, wanted=wanted, given=start)
                )
    return LayerStates(layer, sequences.steps, sequences.batch, tuple(states))


def _reach(layer: Layer, depths: Mapping[str, int], form: Form) -> int:
    """Return how many steps the outputs of the final ones need."""
    ahead = [depths[r.label] - 1 for r in layer.recurrences if not r.reverse]
    return form.final + max(ahead, default=0)
