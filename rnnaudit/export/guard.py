"""The guard: one more output that says how much of the memory at depth k live inputs use."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import onnx_ir as ir

from rnnaudit.errors import UnsupportedModelError
from rnnaudit.export.emit import Emitter
from rnnaudit.export.sequences import LayerStates

GUARD = "guard"
"""What the output is called, unless the graph has such a name."""


def add_guard(model: ir.Model, layers: Iterable[LayerStates], opset: int) -> None:
    """Give the graph one more output, the largest gap of the layers at its top, without axes.

    Raises:
        UnsupportedModelError: There is none: every truncated recurrence sits in a branch.
    """
    graph = model.graph
    found = [s.gap for layer in layers for s in layer.states if s.gap is not None]
    found = [gap for gap in found if _owner(gap) is graph]
    if not found:
        raise UnsupportedModelError(
            "a guard needs a truncated recurrence at the top of the graph, got branches only",
            help="leave out --guard",
        )
    taken = {v.name for node in graph.all_nodes() for v in node.outputs}
    taken |= {v.name for v in graph.inputs}
    numbered = (f"{GUARD}_{i}" for i in itertools.count(2))
    name = next(n for n in itertools.chain([GUARD], numbered) if n not in taken)
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


def _owner(value: ir.Value) -> ir.Graph | ir.Function | None:
    node = value.producer()
    return value.graph if node is None else node.graph
