"""The guard: one more output that says how much of the memory at depth k live inputs use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from rnnaudit.errors import UnsupportedModelError
from rnnaudit.export.emit import Emitter
from rnnaudit.export.sequences import LayerStates

GUARD = "guard"
"""What the output is called, unless the graph has such a name."""


def gaps(layers: Iterable[LayerStates]) -> list[ir.Value]:
    """Return the gaps [1] of every direction of truncated layers."""
    return [s.gap for layer in layers for s in layer.states if s.gap is not None]


def guard(
    graph: ir.Graph | None, found: Sequence[ir.Value], dtype: ir.DataType, opset: int
) -> tuple[Emitter, ir.Value]:
    """Write the largest of the gaps, a number without axes, and return it with its nodes.

    Raises:
        UnsupportedModelError: There is none: every truncated recurrence sits in a branch.
    """
    if not found:
        raise UnsupportedModelError(
            "a guard needs a truncated recurrence at the top of the graph, got branches only",
            help="leave out --guard",
        )
    taken = set() if graph is None else {v.name for n in graph.all_nodes() for v in n.outputs}
    taken |= set() if graph is None else {v.name for v in graph.inputs}
    name = next(n for n in (GUARD, *(f"{GUARD}_{i}" for i in range(2, 99))) if n not in taken)
    emit = Emitter(f"rnnaudit/{name}", dtype, opset)
    same = [
        gap if gap.dtype in (None, dtype) else emit.op("Cast", gap, name=f"gap_{i}", to=dtype.value)
        for i, gap in enumerate(found)
    ]
    joined = same[0] if len(same) == 1 else emit.op("Concat", *same, name="gaps", axis=0)
    value = emit.op("ReduceMax", joined, name="largest", keepdims=0)
    value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape([])
    return emit, value
