"""Stacks as ONNX graphs, written from the weights: recurrent operators, windows, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from torch import Tensor

from rnnaudit.cells.activations import TAKES_ALPHA, TAKES_BETA, parameters
from rnnaudit.errors import UnsupportedModelError, UsageError
from rnnaudit.export.emit import Emitter
from rnnaudit.export.window import window_layer
from rnnaudit.model import Activation, ElmanCell, GRUCell, Layer, LSTMCell, Stack

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
    *,
    opset: int = OPSET,
    dtype: str = "float32",
) -> ir.Model:
    """Write stacks side by side; a layer whose directions all have a depth becomes a window.

    One stack maps ``x`` to ``y``; of several, each maps ``name/x`` to ``name/y``.

    Args:
        stacks: What to write.
        depths: Truncation depth by ``Recurrence.label``.
        opset: Opset of the graph, 17 to 23.
        dtype: ``float16``, ``float32`` or ``float64``.

    Raises:
        UnsupportedModelError: A layer without depths has an option that no ONNX operator has.
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
        y = _stack(emit, stack, x, depths)
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


def _stack(emit: Emitter, stack: Stack, x: ir.Value, depths: Mapping[str, int]) -> ir.Value:
    for index, layer in enumerate(stack.layers):
        with emit.scope(f"layer_{index}"):
            if all(r.label in depths for r in layer.recurrences):
                x = window_layer(emit, layer, x, depths).outputs(emit)
            else:
                x = _node(emit, layer, x)
    if stack.readout is not None:
        with emit.scope("readout"):
            product = emit.op("MatMul", x, emit.constant(stack.readout.A.mT, "A"), name="product")
            x = emit.op("Add", product, emit.constant(stack.readout.b, "b"), name="y")
    return x


def _node(emit: Emitter, layer: Layer, x: ir.Value) -> ir.Value:
    """Write a layer as one recurrent node; y [T, N, D·H]."""
    cells = [r.cell for r in layer.recurrences]
    kinds = {"elman": "RNN", "gru": "GRU", "lstm": "LSTM"}
    weights = [_onnx_weights(cell) for cell in cells]
    W, R, B = (
        emit.constant(torch.stack([w[i] for w in weights]), name)
        for i, name in enumerate(("W", "R", "B"))
    )
    H = cells[0].hidden_size
    names = [a for cell in cells for a in _activations(cell)]
    attributes: dict[str, object] = {
        "hidden_size": H,
        "direction": "bidirectional" if layer.bidirectional else layer.recurrences[0].direction,
        "activations": [_ONNX_NAMES[a.name] for a in names],
    }
    # ONNX reads these lists in order, one entry for each function that takes one.
    if alphas := [parameters(a)[0] for a in names if a.name in TAKES_ALPHA]:
        attributes["activation_alpha"] = alphas
    if betas := [parameters(a)[1] for a in names if a.name in TAKES_BETA]:
        attributes["activation_beta"] = betas
    if cells[0].clip is not None:
        attributes["clip"] = cells[0].clip
    peephole = None
    if isinstance(cells[0], GRUCell):
        attributes["linear_before_reset"] = int(cells[0].reset_after)
    if isinstance(cells[0], LSTMCell):
        attributes["input_forget"] = int(cells[0].input_forget)
        if any(isinstance(c, LSTMCell) and c.peephole is not None for c in cells):
            peephole = emit.constant(torch.stack([_peephole(cell) for cell in cells]), "P")
    starts = [r.initial.value for r in layer.recurrences]
    initial: list[ir.Value | None] = []
    if any(bool(start.any()) for start in starts):
        initial = _initial(emit, x, torch.stack(starts), H)
    inputs = [x, W, R, B, None, *initial]
    if peephole is not None:
        inputs += [None] * (7 - len(inputs)) + [peephole]
    y = emit.op(kinds[cells[0].kind], *inputs, name="directions", **attributes)
    swapped = emit.op("Transpose", y, name="swapped", perm=[0, 2, 1, 3])
    return emit.op("Reshape", swapped, emit.integers(0, 0, -1), name="y")


def _initial(emit: Emitter, x: ir.Value, starts: Tensor, width: int) -> list[ir.Value | None]:
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


_ONNX_NAMES = {
    "tanh": "Tanh",
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "affine": "Affine",
    "leakyrelu": "LeakyRelu",
    "thresholdedrelu": "ThresholdedRelu",
    "scaledtanh": "ScaledTanh",
    "hardsigmoid": "HardSigmoid",
    "elu": "Elu",
    "softsign": "Softsign",
    "softplus": "Softplus",
}


def _activations(cell: ElmanCell | GRUCell | LSTMCell) -> tuple[Activation, ...]:
    if isinstance(cell, ElmanCell):
        return (cell.activation,)
    if isinstance(cell, GRUCell):
        return (cell.gate, cell.candidate)
    return (cell.gate, cell.candidate, cell.squash)


def _reorder(blocks: Tensor, order: Sequence[int]) -> Tensor:
    parts = blocks.chunk(len(order))
    return torch.cat([parts[i] for i in order])


def _onnx_weights(cell: ElmanCell | GRUCell | LSTMCell) -> tuple[Tensor, Tensor, Tensor]:
    """Return (W, R, B) of one direction in ONNX's order of gates: z, r, h or i, o, f, c."""
    if isinstance(cell, ElmanCell):
        return cell.U, cell.W, torch.cat([cell.b, torch.zeros_like(cell.b)])
    if isinstance(cell, GRUCell):
        zrh = (1, 0, 2)
        b, c = _reorder(cell.b_input, zrh), _reorder(cell.b_recurrent, zrh)
        return _reorder(cell.W, zrh), _reorder(cell.U, zrh), torch.cat([b, c])
    if cell.projection is not None:
        raise UnsupportedModelError(
            "a layer that stays recurrent must have an ONNX operator, got an LSTM with a "
            "projection (proj_size)",
            help="truncate it: the window form needs no such operator",
        )
    if cell.clip is not None and cell.clip_output:
        raise UnsupportedModelError(
            "a layer that stays recurrent must run as it was read, got an LSTM whose clip also "
            "bounds the cell state's tanh, which ONNX Runtime leaves out",
            help="truncate it: the window form needs no such operator",
        )
    iofc = (0, 3, 1, 2)
    b = _reorder(cell.b, iofc)
    return _reorder(cell.W, iofc), _reorder(cell.U, iofc), torch.cat([b, torch.zeros_like(b)])


def _peephole(cell: ElmanCell | GRUCell | LSTMCell) -> Tensor:
    """Return the peepholes of one direction in ONNX's order i, o, f."""
    assert isinstance(cell, LSTMCell)
    if cell.peephole is None:
        return cell.U.new_zeros(3 * cell.cell_size)
    i, f, o = cell.peephole
    return torch.cat([i, o, f])
