"""Stacks as ONNX graphs, written from the weights: recurrent operators, truncated, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from torch import Tensor

from rnnaudit.errors import UsageError
from rnnaudit.export.emit import Emitter
from rnnaudit.export.layers import write_layer
from rnnaudit.export.nodes import RecurrentNode
from rnnaudit.model import Layer, Stack
from rnnaudit.truncation import WINDOW, Form

OPSET = 17
_IR_VERSIONS = {17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11}
_DTYPES = {
    "float16": ir.DataType.FLOAT16,
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
}


def build(stack: Stack, *, opset: int = OPSET, dtype: str = "float32") -> ir.Model:
    """Write a stack with ONNX's own LSTM, GRU and RNN nodes.

    The graph maps ``x`` [time, batch, I] to ``y`` [time, batch, O], time and batch dynamic.

    Args:
        stack: What to write.
        opset: Opset of the graph, 17 to 23.
        dtype: ``float16``, ``float32`` or ``float64``.

    Raises:
        UnsupportedModelError: A cell has an option that no ONNX operator has.
        UsageError: The opset or the type is not one of those above.
    """
    return assemble([stack], {}, opset=opset, dtype=dtype)


def assemble(
    stacks: Sequence[Stack],
    depths: Mapping[str, int],
    forms: Mapping[str, Form] | None = None,
    *,
    opset: int = OPSET,
    dtype: str = "float32",
) -> ir.Model:
    """Write stacks side by side; a layer whose directions all have a depth is truncated.

    One stack maps ``x`` to ``y``; of several, each maps ``name/x`` to ``name/y``.

    Args:
        stacks: What to write.
        depths: Truncation depth by ``Recurrence.label``.
        forms: Form of a layer by the label of its first recurrence; a window where none is named.
        opset: Opset of the graph, 17 to 23.
        dtype: ``float16``, ``float32`` or ``float64``.

    Raises:
        UnsupportedModelError: A layer that stays has an option that no ONNX operator has.
        UsageError: The opset or the type is not one of those above.
    """
    if opset not in _IR_VERSIONS:
        raise UsageError(f"opset must be from 17 to {max(_IR_VERSIONS)}, got {opset}")
    if dtype not in _DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype}")
    inputs, outputs = [], []
    nodes: list[ir.Node] = []
    initializers: list[ir.Value] = []
    for stack in stacks:
        prefix = "" if len(stacks) == 1 else f"{stack.name}/"
        x = ir.Value(
            name=f"{prefix}x",
            type=ir.TensorType(_DTYPES[dtype]),
            shape=ir.Shape(["time", "batch", stack.input_size]),
        )
        emit = Emitter(stack.name or "stack", _DTYPES[dtype], opset)
        y = _stack(emit, stack, x, depths, forms or {})
        y.name = f"{prefix}y"
        y.type = ir.TensorType(_DTYPES[dtype])
        y.shape = ir.Shape(["time", "batch", stack.output_size])
        inputs.append(x)
        outputs.append(y)
        nodes += emit.nodes
        initializers += emit.initializers
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=initializers,
        opset_imports={"": opset},
        name="rnnaudit",
    )
    return ir.Model(graph, ir_version=_IR_VERSIONS[opset], producer_name="rnnaudit")


def _stack(
    emit: Emitter,
    stack: Stack,
    x: ir.Value,
    depths: Mapping[str, int],
    forms: Mapping[str, Form],
) -> ir.Value:
    for index, layer in enumerate(stack.layers):
        with emit.scope(f"layer_{index}"):
            if all(r.label in depths for r in layer.recurrences):
                form = forms.get(layer.recurrences[0].label, WINDOW)
                x = write_layer(emit, layer, x, depths, form=form).outputs(emit)
            else:
                x = _node(emit, layer, x)
    if stack.readout is not None:
        with emit.scope("readout"):
            product = emit.op("MatMul", x, emit.constant(stack.readout.A.mT, "A"), name="product")
            x = emit.op("Add", product, emit.constant(stack.readout.b, "b"), name="y")
    return x


def _node(emit: Emitter, layer: Layer, x: ir.Value) -> ir.Value:
    """Write a layer as one recurrent node; y [T, N, D·H]."""
    node = RecurrentNode(emit, layer.recurrences)
    starts = torch.stack([r.initial.value for r in layer.recurrences])
    width = layer.recurrences[0].cell.hidden_size
    initial = _initial(emit, x, starts, width) if bool(starts.any()) else []
    (y,) = node.run(x, initial, outputs=1)
    swapped = emit.op("Transpose", y, name="swapped", perm=[0, 2, 1, 3])
    return emit.op("Reshape", swapped, emit.integers(0, 0, -1), name="y")


def _initial(emit: Emitter, x: ir.Value, starts: Tensor, width: int) -> list[ir.Value]:
    """Write the initial states starts [D, S] for every sequence of the batch, [D, N, width]."""
    D = starts.shape[0]
    shape = emit.op("Shape", x, name="shape")
    N = emit.slice(shape, emit.integers(1), emit.integers(2), name="N")
    sizes = emit.op("Concat", emit.integers(D), N, emit.integers(width), name="start_shape", axis=0)
    return [
        emit.op(
            "Expand", emit.constant(part.unsqueeze(1), f"start_{n}"), sizes, name=f"start_{n}_all"
        )
        for n, part in zip("hc", starts.split(width, dim=-1), strict=False)
    ]
