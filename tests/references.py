"""Independent references: ONNX Runtime's own recurrent nodes, brute-force truncation, closeness."""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import Tensor

from rnnaudit.cells import output, reads, step
from rnnaudit.cells.activations import TAKES_ALPHA, TAKES_BETA
from rnnaudit.model import Activation, Cell, ElmanCell, GRUCell, Recurrence

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


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    """Assert equality to ``tolerance`` relative to the largest entry (at least 1)."""
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    if wanted.numel():
        assert (got - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max().item())


def brute_force(recurrence: Recurrence, x: Tensor, depth: int) -> Tensor:
    """Run the window of the last ``depth`` inputs before every t, each from the initial state."""
    x = reads(recurrence, x)
    ends = []
    for t in range(1, x.shape[1] + 1):
        s = recurrence.initial.value.expand(x.shape[0], -1)
        for u in range(max(0, t - depth), t):
            s = step(recurrence.cell, s, x[:, u])
        ends.append(output(recurrence.cell, s))
    return reads(recurrence, torch.stack(ends, dim=1))


def onnxruntime_outputs(cell: Cell, x: Tensor, start: Tensor) -> Tensor:
    """Run one ONNX node in float32: x [N, T, I] from the state ``start`` [N, S] to h [N, T, H].

    LSTM cells with a projection or ``clip_output`` have no ONNX Runtime node.
    """
    feeds: dict[str, Tensor] = {"X": x.transpose(0, 1), "initial_h": output(cell, start)[None]}
    attributes: dict[str, Any] = {"hidden_size": cell.hidden_size}
    if cell.clip is not None:
        attributes["clip"] = cell.clip
    if isinstance(cell, ElmanCell):
        kind, activations = "RNN", [cell.activation]
        feeds |= _weights(cell.U, cell.W, cell.b, torch.zeros_like(cell.b), [0])
    elif isinstance(cell, GRUCell):
        kind, activations = "GRU", [cell.gate, cell.candidate]
        attributes["linear_before_reset"] = int(cell.reset_after)
        feeds |= _weights(cell.W, cell.U, cell.b_input, cell.b_recurrent, [1, 0, 2])  # z, r, h
    else:
        kind, activations = "LSTM", [cell.gate, cell.candidate, cell.squash]
        attributes["input_forget"] = int(cell.input_forget)
        feeds |= _weights(cell.W, cell.U, cell.b, torch.zeros_like(cell.b), [0, 3, 1, 2])  # iofc
        feeds["initial_c"] = start[:, cell.hidden_size :][None]
        if cell.peephole is not None:
            feeds["P"] = cell.peephole[[0, 2, 1]].reshape(1, -1)
    attributes |= _activations(activations)
    names = ["X", "W", "R", "B", "", "initial_h", "initial_c", "P"]
    inputs = [name if name in feeds or not name else "" for name in names]
    while not inputs[-1]:
        inputs.pop()
    return _run_node(helper.make_node(kind, inputs, ["Y"], **attributes), feeds)


def _weights(
    reads: Tensor, recurrent: Tensor, b_input: Tensor, b_recurrent: Tensor, order: list[int]
) -> dict[str, Tensor]:
    def reorder(rows: Tensor) -> Tensor:
        return torch.cat([rows.chunk(len(order))[k] for k in order])

    bias = torch.cat([reorder(b_input), reorder(b_recurrent)])
    return {"W": reorder(reads)[None], "R": reorder(recurrent)[None], "B": bias[None]}


def _activations(activations: list[Activation]) -> dict[str, Any]:
    attributes: dict[str, Any] = {"activations": [_ONNX_NAMES[a.name] for a in activations]}
    alphas = [a.alpha for a in activations if a.name in TAKES_ALPHA]
    betas = [a.beta for a in activations if a.name in TAKES_BETA]
    if alphas:
        attributes["activation_alpha"] = alphas
    if betas:
        attributes["activation_beta"] = betas
    return attributes


def _run_node(node: onnx.NodeProto, feeds: dict[str, Tensor]) -> Tensor:
    arrays = {name: tensor.float().contiguous().numpy() for name, tensor in feeds.items()}
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
            for name, array in arrays.items()
        ],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(None, arrays)
    return torch.from_numpy(y).squeeze(1).transpose(0, 1).double()
