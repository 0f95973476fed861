"""Stacks as ONNX graphs, written from the weights: recurrent operators, truncated, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from torch import Tensor

from rnnaudit.errors import UsageError
from rnnaudit.export.emit import OLDEST_OPSET, Emitter
from rnnaudit.export.guard import add_guard
from rnnaudit.export.layers import write_layer
from rnnaudit.export.nodes import RecurrentNode
from rnnaudit.export.past import add_buffers
from rnnaudit.export.sequences import LayerStates, Wanted
from rnnaudit.model import Layer, Stack
from rnnaudit.truncation import WINDOW, Form

OPSET = 17
NEWEST_OPSET = 24
_DTYPES = {
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.FLOAT,  # holds the same numbers, and runtimes compute in it
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
}


def build(stack: Stack, *, opset: int = OPSET, dtype: str = "float32") -> ir.Model:
    """Write a stack with ONNX's own LSTM, GRU and RNN nodes.

    The graph maps ``x`` [time, batch, I] to ``y`` [time, batch, O], time and batch dynamic.

    Args:
        stack: What to write.
        opset: Opset of the graph, 11 to 24.
        dtype: ``float16``, ``bfloat16`` (written as float32), ``float32`` or ``float64``.

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
    guarded: bool = False,
) -> ir.Model:
    """Write stacks side by side; a layer whose directions all have a depth is truncated.

    One stack maps ``x`` to ``y``; of several, each maps ``name/x`` to ``name/y``.

    Args:
        stacks: What to write.
        depths: Truncation depth by ``Recurrence.label``.
        forms: Form of a layer by the label of its first recurrence; a window where none is named.
        opset: Opset of the graph, 11 to 24.
        dtype: ``float16``, ``bfloat16`` (written as float32), ``float32`` or ``float64``.
        guarded: Whether the guard is one more output.

    Raises:
        UnsupportedModelError: A layer that stays has an option that no ONNX operator has.
        UsageError: The opset or the type is not one of those above.
    """
    check_opset(opset)
    if dtype not in _DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype}")
    inputs, outputs, layers = [], [], []
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
        y, truncated = _stack(emit, stack, x, depths, forms or {}, guarded=guarded)
        layers += truncated
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
    model = ir.Model(graph, ir_version=ir_version(opset), producer_name="rnnaudit")
    add_buffers(model, layers)
    if guarded:
        add_guard(model, layers, opset)
    return model


def check_opset(opset: int) -> None:
    """Refuse an opset in which no form can be written.

    Raises:
        UsageError: It is below 11, or newer than what is known.
    """
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise UsageError(f"the opset must be from {OLDEST_OPSET} to {NEWEST_OPSET}, got {opset}")


def opset_of(graph: ir.Graph) -> int:
    """Return the version of ONNX's own operators, whichever of its two names is imported."""
    imports = graph.opset_imports
    return imports.get("", imports.get("ai.onnx", OLDEST_OPSET))


def ir_version(opset: int) -> int:
    """Return the oldest version of ONNX's file format that holds this opset."""
    import onnx.helper

    return int(onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)]))


def _stack(
    emit: Emitter,
    stack: Stack,
    x: ir.Value,
    depths: Mapping[str, int],
    forms: Mapping[str, Form],
    *,
    guarded: bool,
) -> tuple[ir.Value, list[LayerStates]]:
    """Write a stack; return its output [T, N, O] and its truncated layers."""
    truncated = []
    for index, layer in enumerate(stack.layers):
        with emit.scope(f"layer_{index}"):
            if all(r.label in depths for r in layer.recurrences):
                form = forms.get(layer.recurrences[0].label, WINDOW)
                wanted = Wanted(guard=guarded)
                truncated.append(write_layer(emit, layer, x, depths, form=form, wanted=wanted))
                x = truncated[-1].outputs(emit)
            else:
                x = _node(emit, layer, x)
    if stack.readout is not None:
        with emit.scope("readout"):
            product = emit.op("MatMul", x, emit.constant(stack.readout.A.mT, "A"), name="product")
            x = emit.op("Add", product, emit.constant(stack.readout.b, "b"), name="y")
    return x, truncated


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
