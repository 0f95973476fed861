"""The guard: one more output that says how much of the memory at depth k live inputs use.

What a recurrence in a branch of an If tells is passed up, branch by branch: one more output
of every If on the way, which is 0 where another branch is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from rnnaudit.errors import UnsupportedModelError
from rnnaudit.export.emit import Emitter
from rnnaudit.export.names import taken, unused
from rnnaudit.export.sequences import LayerStates

GUARD = "guard"
"""What the output is called, unless the graph has such a name."""


def add_guard(model: ir.Model, layers: Iterable[LayerStates], opset: int) -> None:
    """Give the graph one more output, the largest gap of the layers that run, without axes.

    Raises:
        UnsupportedModelError: No layer is truncated.
    """
    graph = model.graph
    name = unused(GUARD, taken(graph))
    gaps = [s.gap for layer in layers for s in layer.states if s.gap is not None]
    if not gaps:
        raise UnsupportedModelError(
            "a guard needs a truncated recurrence, got none", help="leave out --guard"
        )
    found = [_at_the_top(gap, graph, f"rnnaudit/{name}/{i}") for i, gap in enumerate(gaps)]
    dtype = found[0].dtype or ir.DataType.FLOAT
    emit = Emitter(f"rnnaudit/{name}", dtype, opset)
    same = [
        gap if gap.dtype == dtype else emit.op("Cast", gap, name=f"gap_{i}", to=dtype.value)
        for i, gap in enumerate(found)
    ]
    joined = same[0] if len(same) == 1 else emit.op("Concat", *same, name="gaps", axis=0)
    value = emit.op("ReduceMax", joined, name="largest", keepdims=0)
    value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape([])
    graph.extend(emit.nodes)
    for constant in emit.initializers:
        graph.register_initializer(constant)
    graph.outputs.append(value)
    model.metadata_props["rnnaudit.guard"] = name


def _at_the_top(gap: ir.Value, graph: ir.Graph, prefix: str) -> ir.Value:
    """Pass a gap [1] up to the top graph through the branches that it lies in."""
    for level in itertools.count():
        owner = _owner(gap)
        if owner is graph:
            return gap
        holder = next(node for node in graph.all_nodes() if owner in _bodies(node))
        assert holder.op_type == "If", "recurrences are read in no other body"
        names = f"{prefix}/branch_{level}"
        for branch in _bodies(holder):
            branch.outputs.append(
                _own(gap, branch, names) if branch is owner else _zero(gap, branch, names)
            )
        holder.resize_outputs(len(holder.outputs) + 1)
        passed = holder.outputs[-1]
        passed.name, passed.type, passed.shape = names, gap.type, ir.Shape([1])
        gap = passed
    raise AssertionError


def _own(gap: ir.Value, branch: ir.Graph, name: str) -> ir.Value:
    """Name a gap as an output of its branch; a stored number is no node's output yet."""
    node = ir.Node("", "Identity", [gap], name=f"{name}/taken", num_outputs=1)
    return _put(node, branch, gap.type)


def _zero(gap: ir.Value, branch: ir.Graph, name: str) -> ir.Value:
    number = np.zeros(1, (gap.dtype or ir.DataType.FLOAT).numpy())
    value = ir.AttrTensor("value", ir.tensor(number, gap.dtype or ir.DataType.FLOAT))
    node = ir.Node("", "Constant", [], [value], name=f"{name}/other", num_outputs=1)
    return _put(node, branch, gap.type)


def _put(node: ir.Node, branch: ir.Graph, type_: ir.TypeProtocol | None) -> ir.Value:
    branch.append(node)
    value = node.outputs[0]
    value.name, value.type, value.shape = node.name, type_, ir.Shape([1])
    return value


def _bodies(node: ir.Node) -> list[ir.Graph]:
    attributes = node.attributes.values()
    return [a.as_graph() for a in attributes if a.type == ir.AttributeType.GRAPH]


def _owner(value: ir.Value) -> ir.Graph | ir.Function | None:
    node = value.producer()
    return value.graph if node is None else node.graph
