"""Buffers of a streaming model: one more graph input and output for every such layer."""

from __future__ import annotations

import json
from collections.abc import Sequence

import onnx_ir as ir

from rnnaudit.export.names import taken, unused
from rnnaudit.export.sequences import LayerStates


def add_buffers(model: ir.Model, layers: Sequence[LayerStates]) -> None:
    """Let the graph take and give the buffers of its layers, called ``past`` and ``past_next``.

    Of several layers each has the name of its recurrence behind it, and a number where the
    graph has such a name. The metadata pair them.
    """
    graph, paired = model.graph, {}
    names = {*taken(graph)}
    chosen = [layer for layer in layers if layer.past is not None]
    for layer in chosen:
        assert layer.past is not None
        before, after = layer.past
        recurrence = layer.layer.recurrences[0]
        own = "" if len(chosen) == 1 else f"_{recurrence.label}"
        before.name, after.name = unused(f"past{own}", names), unused(f"past_next{own}", names)
        names |= {before.name, after.name}
        width = layer.layer.input_size
        before.shape = ir.Shape([f"steps_{before.name}", layer.rows or f"batch{own}", width])
        after.shape = ir.Shape([f"steps_{after.name}", *before.shape[1:]])
        after.type = before.type
        graph.inputs.append(before)
        graph.outputs.append(after)
        paired[before.name] = after.name
    if paired:
        model.metadata_props["rnnaudit.past"] = json.dumps(paired)
