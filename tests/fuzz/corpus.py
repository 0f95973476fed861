"""The files that are mutated: one small real model of each kind of container and construct."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

FOLDER = Path(__file__).parent / "corpus"


class Net(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.rnn = kind(3, 2, batch_first=True, **options)
        self.head = nn.Linear(2 * (1 + bool(options.get("bidirectional"))), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


X = torch.zeros(1, 4, 3)


def _saved(content: object, **options: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def checkpoint() -> bytes:
    net = Net(nn.LSTM, num_layers=2)
    optimizer = torch.optim.Adam(net.parameters())
    net(X).sum().backward()
    optimizer.step()
    state = {f"module.{name}": value for name, value in net.state_dict().items()}
    return _saved({"state_dict": state, "optimizer": optimizer.state_dict(), "epoch": 3})


def legacy() -> bytes:
    return _saved(
        Net(nn.GRU, bidirectional=True).state_dict(), _use_new_zipfile_serialization=False
    )


def normalised() -> bytes:
    net = Net(nn.RNN)
    nn.utils.parametrizations.weight_norm(net.rnn, "weight_hh_l0")
    nn.utils.spectral_norm(net.head)
    return _saved(net.state_dict())


def quantised() -> bytes:
    torch.backends.quantized.engine = "x86"
    net = torch.ao.quantization.quantize_dynamic(Net(nn.LSTM).eval(), {nn.LSTM}, torch.qint8)
    return _saved(net.state_dict())


def script() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Net(nn.GRU).eval()), buffer)
    return buffer.getvalue()


def traced() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(Net(nn.LSTM, num_layers=2).eval(), X), buffer)
    return buffer.getvalue()


def exported() -> bytes:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(Net(nn.RNN).eval(), (X,)), buffer)
    return buffer.getvalue()


def safetensors() -> bytes:
    from safetensors.torch import save

    return save({name: value.clone() for name, value in Net(nn.LSTM).state_dict().items()})


# ------------------------------------------------------------------------------- ONNX

RNG = np.random.default_rng(0)


def _weights(gates: int, inputs: int, hidden: int, D: int, prefix: str) -> list[TensorProto]:
    shapes = {"W": (D, gates * hidden, inputs), "R": (D, gates * hidden, hidden)}
    shapes["B"] = (D, 2 * gates * hidden)
    return [
        numpy_helper.from_array(RNG.normal(size=shape).astype(np.float32), prefix + name)
        for name, shape in shapes.items()
    ]


def _model(nodes: list[object], inputs: list[object], outputs: list[object], stored: list[object]):
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    return model.SerializeToString()


def _value(name: str, *shape: object) -> object:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))


def _ints(name: str, *values: int) -> TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def onnx_stack() -> bytes:
    """Return two bidirectional layers, joined by a transpose and a reshape, and a readout."""
    stored = [*_weights(4, 3, 2, 2, "a"), *_weights(3, 4, 2, 2, "b")]
    stored += [_ints("shape", 0, 0, 4), numpy_helper.from_array(np.ones((4, 1), np.float32), "A")]
    nodes = [
        helper.make_node(
            "LSTM",
            ["x", "aW", "aR", "aB", "lens"],
            ["y"],
            "first",
            hidden_size=2,
            direction="bidirectional",
            clip=2.0,
        ),
        helper.make_node("Transpose", ["y"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["t", "shape"], ["u"]),
        helper.make_node(
            "GRU",
            ["u", "bW", "bR", "bB"],
            ["v"],
            "second",
            hidden_size=2,
            direction="bidirectional",
            linear_before_reset=1,
        ),
        helper.make_node("Transpose", ["v"], ["w"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["w", "shape"], ["f"]),
        helper.make_node("MatMul", ["f", "A"], ["out"]),
    ]
    lens = helper.make_tensor_value_info("lens", TensorProto.INT32, ["N"])
    return _model(nodes, [_value("x", "T", "N", 3), lens], [_value("out", "T", "N", 1)], stored)


def onnx_chain() -> bytes:
    """Return weights behind Constant, Unsqueeze, Concat, Slice and Cast, and states in a cache."""
    stored = [
        _ints("axis", 0),
        _ints("zero", 0),
        _ints("one", 1),
        _ints("two", 2),
        numpy_helper.from_array(RNG.normal(size=(2, 6, 3)).astype(np.float64), "both"),
        *_weights(3, 3, 2, 1, "g"),
    ]
    nodes = [
        helper.make_node("Slice", ["both", "zero", "one", "axis"], ["part"]),
        helper.make_node("Cast", ["part"], ["gW2"], to=TensorProto.FLOAT),
        helper.make_node("Slice", ["cache", "one", "two", "axis"], ["h"]),
        helper.make_node(
            "GRU",
            ["x", "gW2", "gR", "gB", "", "h"],
            ["y", "last"],
            "g",
            hidden_size=2,
            activations=["HardSigmoid", "LeakyRelu"],
            activation_alpha=[0.3, 0.02],
            activation_beta=[0.4],
        ),
        helper.make_node("Concat", ["last", "last"], ["caches"], axis=0),
    ]
    inputs = [_value("x", "T", "N", 3), _value("cache", 2, 1, 2)]
    return _model(
        nodes, inputs, [_value("y", None, None, None, None), _value("caches", 2, 1, 2)], stored
    )


def onnx_branches() -> bytes:
    """Return an RNN in each branch of an If inside an If."""
    stored = _weights(1, 3, 2, 1, "n")

    def branch(name: str, *nodes: object) -> object:
        return helper.make_graph(list(nodes), name, [], [_value(f"{name}_y", None, 1, None, 2)])

    def rnn(name: str) -> object:
        return helper.make_node("RNN", ["x", "nW", "nR", "nB"], [f"{name}_y"], name, hidden_size=2)

    inner = helper.make_node(
        "If",
        ["c"],
        ["other_y"],
        "inner",
        then_branch=branch("a", rnn("a")),
        else_branch=branch("b", rnn("b")),
    )
    outer = helper.make_node(
        "If",
        ["c"],
        ["y"],
        "outer",
        then_branch=branch("first", rnn("first")),
        else_branch=branch("other", inner),
    )
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    return _model(
        [outer], [_value("x", "T", "N", 3), condition], [_value("y", None, 1, None, 2)], stored
    )


def onnx_scan() -> bytes:
    """Return a hand-made cell in a Scan."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["h", "V"], ["a"]),
            helper.make_node("Add", ["a", "xt"], ["b"]),
            helper.make_node("Tanh", ["b"], ["h2"]),
            helper.make_node("Identity", ["h2"], ["yt"]),
        ],
        "body",
        [_value("h", 1, 3), _value("xt", 1, 3)],
        [_value("h2", 1, 3), _value("yt", 1, 3)],
    )
    stored = [numpy_helper.from_array(RNG.normal(size=(3, 3)).astype(np.float32) / 4, "V")]
    node = helper.make_node("Scan", ["h0", "x"], ["hT", "y"], "scan", body=body, num_scan_inputs=1)
    inputs = [_value("h0", 1, 3), _value("x", "T", 1, 3)]
    return _model([node], inputs, [_value("hT", 1, 3), _value("y", "T", 1, 3)], stored)


def onnx_loop() -> bytes:
    """Return a masked cell in a Loop that gathers its input by the counter."""
    body = helper.make_graph(
        [
            helper.make_node("Gather", ["x", "i"], ["xt"], axis=0),
            helper.make_node("MatMul", ["h", "V"], ["a"]),
            helper.make_node("Add", ["a", "xt"], ["b"]),
            helper.make_node("Sigmoid", ["b"], ["h2"]),
            helper.make_node("Identity", ["on"], ["more"]),
            helper.make_node("Identity", ["h2"], ["yt"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            _value("h", 1, 3),
        ],
        [
            helper.make_tensor_value_info("more", TensorProto.BOOL, []),
            _value("h2", 1, 3),
            _value("yt", 1, 3),
        ],
    )
    stored = [
        numpy_helper.from_array(RNG.normal(size=(3, 3)).astype(np.float32) / 4, "V"),
        numpy_helper.from_array(np.array(True), "go"),
    ]
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "first"], ["n"], axis=0),
        helper.make_node("Loop", ["n", "go", "h0"], ["hT", "y"], "loop", body=body),
    ]
    stored.append(numpy_helper.from_array(np.array(0, np.int64), "first"))
    inputs = [_value("x", "T", 1, 3), _value("h0", 1, 3)]
    return _model(nodes, inputs, [_value("hT", 1, 3), _value("y", "T", 1, 3)], stored)


BUILDERS: dict[str, Callable[[], bytes]] = {
    "checkpoint.ckpt": checkpoint,
    "legacy.pth": legacy,
    "normalised.pt": normalised,
    "quantised.pt": quantised,
    "script.pt": script,
    "traced.pt": traced,
    "exported.pt2": exported,
    "lstm.safetensors": safetensors,
    "stack.onnx": onnx_stack,
    "chain.onnx": onnx_chain,
    "branches.onnx": onnx_branches,
    "scan.onnx": onnx_scan,
    "loop.onnx": onnx_loop,
}


def read() -> Iterator[tuple[str, bytes]]:
    """Yield the files of the corpus, by name."""
    for path in sorted(FOLDER.iterdir()):
        yield path.name, path.read_bytes()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    FOLDER.mkdir(exist_ok=True)
    for name, build in BUILDERS.items():
        data = build()
        if name.endswith(".onnx"):
            onnx.checker.check_model(onnx.load_from_string(data))
        (FOLDER / name).write_bytes(data)
        print(f"{name:20} {len(data):6} bytes")
