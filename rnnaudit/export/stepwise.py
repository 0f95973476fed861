"""Graphs that take one step per call, and layers that are given a buffer of their past.

A recurrence whose input has one step and whose state comes from the caller sees nothing of
its past. Two forms give it back: the graph takes the last steps of a sequence at once, where
what lies between its input and the recurrence keeps every step apart; or, in a streaming
model, each recurrence keeps its last k − 1 inputs from call to call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from rnnaudit.export.layers import reach
from rnnaudit.export.reads import moved
from rnnaudit.export.sockets import obstacle, socket
from rnnaudit.model import Layer, Model

_MOST_AXES = 6


def obstacles(model: Model, *, streaming: bool) -> Mapping[str, str]:
    """Say by ``Recurrence.label`` why a recurrence cannot be truncated in this graph."""
    found: dict[str, str] = {}
    single = stepwise(model)
    buffered = with_past(model) if streaming else ()
    for stack in model.stacks:
        for layer in stack.layers:
            reason = obstacle(layer)
            if not reason and layer in buffered:
                reason = _cannot_stream(layer)
            elif not reason and layer in single:
                reason = _cannot_widen(model, layer)
            if reason:
                found |= {r.label: reason for r in layer.recurrences}
    return found


def stepwise(model: Model) -> tuple[Layer, ...]:
    """Return the layers that take one step per call, their state coming from the caller."""
    if model.graph is None:
        return ()
    layers = [
        layer
        for stack in model.stacks
        for layer in stack.layers
        if layer.recurrences[0].initial.source == "graph input"
    ]
    sizes = _sizes(model.graph, [layer.site.x for layer in layers if layer.site])
    return tuple(
        layer
        for layer in layers
        if layer.site
        and (shape := sizes.get(layer.site.x)) is not None
        and shape[layer.site.layout] == 1
    )


def with_past(model: Model) -> tuple[Layer, ...]:
    """Return the layers that a streaming model gives a buffer: those with the caller's state.

    Where no layer has one, all run over the caller's time, and all are given a buffer.
    """
    layers = [layer for stack in model.stacks for layer in stack.layers]
    own = [layer for layer in layers if layer.recurrences[0].initial.source == "graph input"]
    return tuple(own or layers)


def _cannot_stream(layer: Layer) -> str:
    if any(r.reverse for r in layer.recurrences):
        return "it reads the future, which a stream does not have"
    if layer.site is not None and layer.site.scope:
        return f"it sits in a branch of the graph ({layer.site.scope}), where no buffer can be kept"
    if layer.site is not None and layer.site.reads:
        return "it is written as a loop, which is given no buffer"
    return ""


def _cannot_widen(model: Model, layer: Layer) -> str:
    assert model.graph is not None
    assert layer.site is not None
    source = _source(model.graph.graph, layer)
    if not isinstance(source, str):
        return ""
    return (
        f"it takes one step per call, and {source} lies between the graph's inputs and it; "
        "--streaming keeps a buffer instead"
    )


def _source(graph: ir.Graph, layer: Layer) -> ir.Value | str:
    """Follow what a layer reads back to where its steps come from.

    Returns:
        A graph input or the output of another recurrence, or what stands in the way.
    """
    assert layer.site is not None
    at = socket(graph, layer.site)
    if at.node.graph is not graph:
        return "a branch"
    value: ir.Value | None = at.x
    axis, rank = layer.site.layout, 3
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type in ("LSTM", "GRU", "RNN"):
            return value if value is producer.outputs[0] else "a final state"
        before = _before(producer, axis, rank)
        if before is None:
            return f"{producer.op_type} ({producer.name or 'without a name'})"
        index, axis, rank = before
        value = producer.inputs[index]
    return "nothing" if value is None else value


def _before(node: ir.Node, axis: int, rank: int) -> tuple[int, int, int] | None:
    """Find the input, and its axis and rank, whose steps are those of a node's output."""
    if node.op_type == "Gather" and _is_constant(node.inputs[0]):
        return _looked_up(node, axis, rank)
    for index, value in enumerate(node.inputs[:2]):
        if value is None or _is_constant(value):
            continue
        for rank_before in range(1, _MOST_AXES):
            for axis_before in range(rank_before):
                if moved(node, index, axis_before, rank_before) == (axis, rank):
                    return index, axis_before, rank_before
    return None


def _looked_up(node: ir.Node, axis: int, rank: int) -> tuple[int, int, int] | None:
    """Find the steps among the indices of a constant table: they stand where its axis was."""
    stored = node.inputs[0]
    table = None if stored is None else ir.convenience.get_const_tensor(stored)
    assert table is not None
    table_rank = len(table.shape)
    taken = node.attributes.get_int("axis", 0) % max(1, table_rank)
    index_rank, index_axis = rank - table_rank + 1, axis - taken
    return (1, index_axis, index_rank) if 0 <= index_axis < index_rank else None


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and ir.convenience.get_const_tensor(value) is not None


def _sizes(model: ir.Model, names: list[str]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the sizes of values' axes where the graph fixes them, inferring shapes if need be."""
    if not names:
        return {}
    found: dict[str, tuple[int | None, ...]] = {}
    graph = model.graph
    values = [*graph.inputs, *(v for node in graph.all_nodes() for v in node.outputs)]
    for value in values:
        if value.name in names and value.shape is not None:
            found[value.name] = tuple(n if isinstance(n, int) else None for n in value.shape)
    if len(found) < len(set(names)):
        import onnx.shape_inference

        for info in onnx.shape_inference.infer_shapes(ir.to_proto(model)).graph.value_info:
            if info.name in names and info.name not in found:
                dims = info.type.tensor_type.shape.dim
                found[info.name] = tuple(int(d.dim_value) or None for d in dims)
    return found


def finals(model: Model, depths: Mapping[str, int]) -> Mapping[str, int]:
    """Return of how many final steps each layer of one step per call has to give outputs.

    A layer that feeds another gives as many as that one reads. By the first label of a layer.
    """
    layers = [
        layer for layer in stepwise(model) if all(r.label in depths for r in layer.recurrences)
    ]
    if not layers:
        return {}
    assert model.graph is not None
    graph = model.graph.graph
    by_node = {layer.site.node: layer for layer in layers if layer.site}
    found = {layer.recurrences[0].label: 1 for layer in layers}
    order = [node.name for node in graph.all_nodes()]
    for layer in sorted(layers, key=lambda each: -order.index(each.site.node if each.site else "")):
        source = _source(graph, layer)
        producer = None if isinstance(source, str) else source.producer()
        feeding = by_node.get(producer.name or "") if producer is not None else None
        if feeding is not None:
            label = feeding.recurrences[0].label
            found[label] = max(
                found[label], reach(layer, depths, found[layer.recurrences[0].label])
            )
    return found


@dataclass(slots=True, eq=False)
class Widened:
    """Values of a graph of one step per call with all steps of a sequence, as they are made.

    ``axes`` tells the time axis of each graph input that now takes a sequence.
    """

    graph: ir.Graph
    wide: dict[ir.Value, ir.Value] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)

    def of(self, value: ir.Value, axis: int, rank: int) -> ir.Value:
        """Return the value with all its steps, copying the nodes that make it."""
        if value in self.wide:
            return self.wide[value]
        node = value.producer()
        if node is None:
            return self._input(value, axis)
        before = _before(node, axis, rank)
        assert before is not None
        index, axis_before, rank_before = before
        source = node.inputs[index]
        assert source is not None
        inputs = list(node.inputs)
        inputs[index] = self.of(source, axis_before, rank_before)
        name = f"{node.name or node.outputs[0].name}/all_steps"
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            name=name,
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name, new.type = f"{old.name}/all_steps", old.type
        self.graph.insert_before(node, [copy])
        self.wide[value] = copy.outputs[list(node.outputs).index(value)]
        return self.wide[value]

    def _input(self, value: ir.Value, axis: int) -> ir.Value:
        """Let a graph input take a sequence; whatever else reads it sees the last step."""
        assert value.name is not None
        assert value.shape is not None
        shape = ["time" if i == axis else size for i, size in enumerate(value.shape)]
        taken = ir.Value(name=value.name, type=value.type, shape=ir.Shape(shape))
        self.axes[value.name] = axis
        place = list(self.graph.inputs).index(value)
        self.graph.inputs[place] = taken
        value.name = f"{taken.name}/last_step"
        self.wide[value] = taken
        if value.uses():
            bounds = [
                _stored(self.graph, f"{taken.name}/{name}", number)
                for name, number in (("from", -1), ("to", 2**63 - 1), ("axis", axis))
            ]
            last = ir.Node("", "Slice", [taken, *bounds], name=value.name, num_outputs=1)
            last.outputs[0].name, last.outputs[0].type = value.name, value.type
            last.outputs[0].shape = value.shape
            self.graph.insert_before(self.graph[0], [last])
            value.replace_all_uses_with(last.outputs[0])
            last.replace_input_with(0, taken)
            self.wide[last.outputs[0]] = taken
        return taken


def _stored(graph: ir.Graph, name: str, number: int) -> ir.Value:
    import numpy as np

    tensor = ir.tensor(np.array([number], np.int64), name=name)
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(ir.DataType.INT64))
    value.shape = ir.Shape([1])
    graph.register_initializer(value)
    return value
