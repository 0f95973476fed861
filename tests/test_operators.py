"""Every operator that a step may hold is read as ONNX Runtime computes it, in every opset."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from rnnaudit import cells
from rnnaudit.cells.operators import OPERATORS
from rnnaudit.loaders import load
from tests.test_load_onnx import saved
from tests.test_load_traced import graph, info, model, op

LENGTH = 5
SHAPE = (1, 3, 4)
FLOAT32 = 1e-5
OPSETS = (8, 9, 10, 11, 12, 13, 14, 16, 17, 18, 20, 21)
"""Each step runs in the first and last of these in which its operators are as it says."""

DRAWN = np.random.default_rng(0)
A, B, C = (DRAWN.normal(size=s).astype(np.float32) for s in (SHAPE, SHAPE, (4, 2)))
SQUARE = DRAWN.normal(size=(4, 4)).astype(np.float32)
ROW = DRAWN.normal(size=4).astype(np.float32)
COLUMN = DRAWN.normal(size=(3, 1)).astype(np.float32)


def ints(*numbers):
    return np.array(numbers, np.int64)


class Step(NamedTuple):
    """A step from x to y: lines ``out … = Op in … ; attribute:value …``, and its opsets."""

    text: str
    shape: tuple[int, ...]
    opsets: range
    constants: dict[str, np.ndarray]


def case(text, shape=SHAPE, first=8, last=99, **constants):
    return Step(text, shape, range(first, last + 1), constants)


def unary(name, first=8, **constants):
    return case(f"y = {name} x", first=first, **constants)


def truth(name, first=8):
    return case(f"b = {name} x a\ny = Cast b; to:1", first=first, a=A)


def logical(name):
    lines = f"p = Less x a\nq = Less x b\nr = {name} p q\ny = Cast r; to:1"
    return case(lines, first=9, a=A, b=B)


def reduced(name, new=18):
    """Reduce over axes that are an attribute before opset ``new`` and an input from there on."""
    return [
        case(f"y = {name} x; axes:1,2", (1, 1, 1), last=new - 1),
        case(f"y = {name} x; axes:-1 keepdims:0", (1, 3), 11, new - 1),
        case(f"y = {name} x", (1, 1, 1)),
        case(f"y = {name} x a", (1, 1, 4), new, a=ints(1)),
        case(f"y = {name} x a; keepdims:0", (1, 4), new, a=ints(-2)),
        case(f"y = {name} x; noop_with_empty_axes:1", SHAPE, new)
        if name in {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"}
        else case(f"y = {name} x; keepdims:0", ()),
    ]


CASES = {
    "Add": [case("y = Add x a", a=ROW), case("y = Add a x", a=COLUMN)],
    "Sub": [case("y = Sub x a", a=COLUMN), case("y = Sub a x", a=A)],
    "Mul": [case("y = Mul x x"), case("y = Mul a x", (2, 3, 4), a=np.ones((2, 1, 1), np.float32))],
    "Div": [
        case("y = Div x a", a=A),
        case("i = Cast x; to:7\nj = Div i two\ny = Cast j; to:1", two=ints(2)),
    ],
    "Pow": [
        case("y = Pow x a", a=np.float32(3)),
        case("y = Pow x a", first=12, a=ints(2)),
        case("e = Abs x\ny = Pow e a", a=np.abs(A)),
    ],
    "Where": [
        case("p = Less x a\ny = Where p x b", first=9, a=A, b=ROW),
        case("y = Where p a x", first=9, a=B, p=A > 0),
    ],
    "Equal": [
        case("i = Floor x\nj = Equal i a\ny = Cast j; to:1", first=11, a=np.float32(0)),
        case("i = Cast x; to:7\nj = Equal i a\ny = Cast j; to:1", a=ints(0)),
    ],
    "Less": [truth("Less", 9)],
    "LessOrEqual": [truth("LessOrEqual", 12)],
    "Greater": [truth("Greater", 9)],
    "GreaterOrEqual": [truth("GreaterOrEqual", 12)],
    "And": [logical("And")],
    "Or": [logical("Or")],
    "Xor": [logical("Xor")],
    "Not": [case("p = Less x a\nq = Not p\ny = Cast q; to:1", first=9, a=A)],
    "Min": [case("y = Min x a b", first=8, a=ROW, b=B), unary("Min")],
    "Max": [case("y = Max x a b", first=8, a=COLUMN, b=B)],
    "Sum": [case("y = Sum x a b x", first=8, a=ROW, b=COLUMN), unary("Sum")],
    "Neg": [unary("Neg")],
    "Abs": [unary("Abs")],
    "Exp": [unary("Exp")],
    "Log": [case("e = Exp x\ny = Log e")],
    "Sqrt": [case("e = Exp x\ny = Sqrt e")],
    "Reciprocal": [case("e = Exp x\ny = Reciprocal e")],
    "Erf": [unary("Erf", 9)],
    "Sin": [unary("Sin")],
    "Cos": [unary("Cos")],
    "Sign": [unary("Sign", 9)],
    "Floor": [unary("Floor")],
    "Ceil": [unary("Ceil")],
    "Identity": [unary("Identity")],
    "Dropout": [
        unary("Dropout"),
        case("y = Dropout x; ratio:0.9", last=11),
        case("y = Dropout x r t", first=12, r=np.float32(0.9), t=np.array(False)),
    ],
    "Sigmoid": [unary("Sigmoid")],
    "Tanh": [unary("Tanh")],
    "Relu": [unary("Relu")],
    "LeakyRelu": [unary("LeakyRelu"), case("y = LeakyRelu x; alpha:0.3")],
    "Elu": [unary("Elu"), case("y = Elu x; alpha:0.3")],
    "Selu": [unary("Selu"), case("y = Selu x; alpha:0.3 gamma:2.0")],
    "Gelu": [unary("Gelu", 20), case("y = Gelu x; approximate:tanh", first=20)],
    "HardSigmoid": [unary("HardSigmoid"), case("y = HardSigmoid x; alpha:0.7 beta:0.1")],
    "HardSwish": [unary("HardSwish", 14)],
    "Softplus": [unary("Softplus")],
    "Softsign": [unary("Softsign")],
    "Clip": [
        case("y = Clip x; min:-0.5 max:0.25", last=10),
        case("y = Clip x", last=10),
        case("y = Clip x a b", first=11, a=np.float32(-0.5), b=np.float32(0.25)),
        case("y = Clip x _ b", first=11, b=np.float32(0.25)),
        case("y = Clip x a", first=11, a=np.float32(-0.5)),
        case(
            "i = Cast x; to:7\nj = Clip i a b\ny = Cast j; to:1",
            first=12,
            a=ints(0)[0],
            b=ints(1)[0],
        ),
    ],
    "Cast": [
        case("i = Cast x; to:7\ny = Cast i; to:1"),
        case("i = Cast x; to:6\nb = Cast i; to:9\ny = Cast b; to:1"),
    ],
    "MatMul": [
        case("y = MatMul x a", (1, 3, 2), a=C),
        case("y = MatMul x a", (1, 3), a=ROW),
        case("y = MatMul a x", (1, 4), a=COLUMN[:, 0].copy()),
        case("y = MatMul a x", (5, 1, 2, 4), a=np.ones((5, 1, 2, 3), np.float32)),
        case(
            "v = Slice x; starts:0,0 ends:1,1 axes:0,1\ns = Squeeze v; axes:0,1\ny = MatMul s a",
            (2,),
            last=9,
            a=C,
        ),
        case("t = Transpose x; perm:0,2,1\ny = MatMul x t", (1, 3, 3)),
    ],
    "Gemm": [
        case("f = Flatten x; axis:2\ny = Gemm f a b", (3, 2), a=C, b=COLUMN),
        case(
            "f = Flatten x; axis:2\ny = Gemm f a b; transA:1 alpha:0.5 beta:2.0",
            (4, 4),
            a=DRAWN.normal(size=(3, 4)).astype(np.float32),
            b=ROW,
        ),
        case("f = Flatten x; axis:2\ny = Gemm f a; transB:1 alpha:0.5", (3, 4), 11, a=SQUARE),
    ],
    "Transpose": [
        case("y = Transpose x", (4, 3, 1)),
        case("y = Transpose x; perm:1,0,2", (3, 1, 4)),
    ],
    "Reshape": [
        case("y = Reshape x a", (2, 6), a=ints(2, -1)),
        case("y = Reshape x a", (1, 3, 2, 2), a=ints(0, 0, 2, -1)),
    ],
    "Flatten": [
        case("y = Flatten x", (1, 12)),
        case("y = Flatten x; axis:0", (1, 12)),
        case("y = Flatten x; axis:-1", (3, 4), 11),
    ],
    "Squeeze": [
        case("y = Squeeze x", (3, 4)),
        case("y = Squeeze x; axes:0", (3, 4), last=12),
        case("y = Squeeze x a", (3, 4), 13, a=ints(-3)),
    ],
    "Unsqueeze": [
        case("y = Unsqueeze x; axes:1,4", (1, 1, 3, 4, 1), last=12),
        case("y = Unsqueeze x a", (1, 3, 1, 4, 1), 13, a=ints(-1, 2)),
    ],
    "Split": [
        case("p y q = Split x; axis:2 split:1,2,1", (1, 3, 2), last=12),
        case("y p = Split x; axis:-1", (1, 3, 2), 11, 12),
        case("p y = Split x a; axis:1", (1, 2, 4), 13, a=ints(1, 2)),
        case("p y = Split x; axis:2", (1, 3, 2), 13, 17),
        case("y p = Split x; axis:1 num_outputs:2", (1, 2, 4), 18),
        case("p y = Split x; axis:1 num_outputs:2", (1, 1, 4), 18),
    ],
    "Slice": [
        case("y = Slice x; starts:1,0 ends:3,-1 axes:1,2", (1, 2, 3), last=9),
        case("y = Slice x; starts:0,-2 ends:9,99", (1, 2, 4), last=9),
        case("y = Slice x a b c d", (1, 3, 2), 10, a=ints(3), b=ints(-9), c=ints(2), d=ints(-2)),
        case("y = Slice x a b c d", (1, 3, 2), 10, a=ints(-1), b=ints(-3), c=ints(-1), d=ints(-1)),
        case("y = Slice x a b", (1, 2, 4), 10, a=ints(0, 1), b=ints(2**62, 2**62)),
        case("y = Slice x a b c", (1, 3, 4), 10, a=ints(-99), b=ints(2**62), c=ints(2)),
        case(
            "y = Slice x a b c d",
            (1, 3, 1),
            10,
            a=ints(-99),
            b=ints(-(2**62)),
            c=ints(2),
            d=ints(-1),
        ),
        case(
            "y = Slice x a b c d",
            (1, 3, 4),
            10,
            a=ints(99),
            b=ints(-(2**62)),
            c=ints(2),
            d=ints(-1),
        ),
    ],
    "Gather": [
        case("y = Gather x a; axis:2", (1, 3), a=ints(2)[0]),
        case("y = Gather x a; axis:1", (1, 2, 2, 4), a=ints(0, 2, 1, 1).reshape(2, 2)),
        case("y = Gather x a; axis:-1", (1, 3, 2), 11, a=ints(-1, 0)),
        case(
            "e = Abs x\nm = Clip e; max:2.0\ni = Cast m; to:7\ny = Gather a i",
            SHAPE,
            last=10,
            a=ROW,
        ),
        case(
            "e = Abs x\nm = Clip e; max:2.0\ni = Cast m; to:7\ny = Gather a i; axis:1",
            (4, 1, 3, 4),
            last=10,
            a=SQUARE,
        ),
    ],
    "Concat": [
        case("y = Concat x a x; axis:1", (1, 9, 4), a=A),
        case("y = Concat a x; axis:-1", (1, 3, 8), 11, a=A),
    ],
    "Expand": [
        case("y = Expand x a", (2, 3, 4), 8, a=ints(2, 1, 1)),
        case("y = Expand x a", (5, 1, 3, 4), 8, a=ints(5, 1, 1, 4)),
    ],
    "Tile": [case("y = Tile x a", (2, 3, 12), a=ints(2, 1, 3))],
    "Shape": [
        case("s = Shape x\nf = Cast s; to:1\nm = ReduceSum f\ny = Mul x m", last=12),
        case("s = Shape x; start:-2 end:-1\nf = Cast s; to:1\ny = Mul x f", first=15),
    ],
    "Size": [case("s = Size x\nf = Cast s; to:1\ny = Mul x f")],
    "ConstantOfShape": [
        case("s = Shape x\nz = ConstantOfShape s\ny = Sub z x", first=9),
        case("z = ConstantOfShape a; value:2.5\ny = Mul z x", first=9, a=ints(3, 1)),
    ],
    "ReduceSum": reduced("ReduceSum", 13),
    "ReduceMean": reduced("ReduceMean"),
    "ReduceMax": reduced("ReduceMax"),
    "ReduceMin": reduced("ReduceMin"),
    "ReduceL2": reduced("ReduceL2"),
    "ReduceSumSquare": reduced("ReduceSumSquare"),
    "Softmax": [
        unary("Softmax"),
        case("y = Softmax x; axis:1"),
        case("y = Softmax x; axis:2"),
        case("y = Softmax x; axis:-1", first=11),
        case("f = Flatten x; axis:2\ny = Softmax f", (3, 4)),
        case("y = Softmax x; axis:0"),
    ],
    "LayerNormalization": [
        case("y = LayerNormalization x a b; epsilon:0.1", first=17, a=ROW, b=ROW + 1),
        case("y = LayerNormalization x a; axis:1", first=17, a=A[0]),
    ],
}


def parsed(text):
    """Yield a node for each line."""
    for line in text.splitlines():
        left, right = line.strip().split(" = ")
        call, _, settings = right.partition(";")
        kind, *names = call.split()
        attributes = {}
        for pair in settings.split():
            key, written = pair.split(":")
            numbers = written.split(",")
            if not written.translate(str.maketrans("", "", "-.,")).isdigit():
                attributes[key] = written
            elif "." in written:
                attributes[key] = float(written)
            else:
                listed = key in {"axes", "perm", "split", "starts", "ends"}
                attributes[key] = [int(n) for n in numbers] if listed else int(written)
        if kind == "ConstantOfShape" and "value" in attributes:
            fill = np.array([attributes["value"]], np.float32)
            attributes["value"] = numpy_helper.from_array(fill)
        given = ["" if name == "_" else name for name in names]
        yield helper.make_node(kind, given, left.split(), **attributes)


def scan(text, size, constants, opset):
    """Write a Scan that keeps half of its state and adds what the step makes of its input."""
    stored = [("half", np.array(0.5, np.float32)), ("flat", ints(1, size)), *constants.items()]
    float_ = TensorProto.FLOAT
    body = helper.make_graph(
        [
            *parsed(text),
            helper.make_node("Reshape", ["y", "flat"], ["row"]),
            helper.make_node("Mul", ["h", "half"], ["kept"]),
            helper.make_node("Add", ["kept", "row"], ["h_next"]),
            helper.make_node("Identity", ["h_next"], ["out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("h", float_, [1, size]),
            helper.make_tensor_value_info("x", float_, SHAPE),
        ],
        [helper.make_tensor_value_info(name, float_, [1, size]) for name in ("h_next", "out")],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in stored],
    )
    old = opset < 9
    names, batch = (["", "h0", "X"], [1]) if old else (["h0", "X"], [])
    graph = helper.make_graph(
        [helper.make_node("Scan", names, ["last", "Y"], "scan", body=body, num_scan_inputs=1)],
        "graph",
        [
            helper.make_tensor_value_info("h0", float_, [*batch, 1, size]),
            helper.make_tensor_value_info("X", float_, [*batch, "T", *SHAPE]),
        ],
        [helper.make_tensor_value_info("Y", float_, [*batch, "T", 1, size])],
    )
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


STEPS_OF_ONE = [step for steps in CASES.values() for step in steps]


@pytest.mark.parametrize("step", STEPS_OF_ONE, ids=[step.text for step in STEPS_OF_ONE])
def test_a_step_of_one_operator_is_what_onnx_runtime_computes(tmp_path, step):
    fitting = [opset for opset in OPSETS if opset in step.opsets]
    size = math.prod(step.shape)
    X = 1.5 * np.random.default_rng(1).normal(size=(LENGTH, *SHAPE)).astype(np.float32)
    for opset in sorted({fitting[0], fitting[-1]}):
        proto = scan(step.text, size, step.constants, opset)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
        batch = (1,) if opset < 9 else ()
        start = np.zeros((*batch, 1, size), np.float32)
        (came,) = session.run(["Y"], {"X": X.reshape(*batch, *X.shape), "h0": start})
        found = load(saved(tmp_path, proto))
        assert not found.skipped
        (recurrence,) = found.recurrences()
        x = torch.from_numpy(X.astype(np.float64)).reshape(1, LENGTH, -1)
        ours = cells.run(recurrence, x).numpy().reshape(LENGTH, -1)
        np.testing.assert_allclose(ours, came.reshape(LENGTH, -1), atol=FLOAT32, err_msg=str(opset))


def test_no_operator_is_left_out():
    assert set(CASES) == set(OPERATORS)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_softmax_of_old_shares_out_all_axes_from_its_own(tmp_path, axis):
    """Before opset 13; those of a batch too, where it begins with them."""
    shape = ["N", 3, 4]
    body = graph(
        [op("Softmax", "h", "s", axis=axis), op("Add", "s x", "h_next"), op("Neg", "h_next", "y")],
        [info("h", shape), info("x", shape)],
        [info("h_next", shape), info("y", shape)],
    )
    proto = model(
        [op("Scan", "h0 X", "last Y", body=body, num_scan_inputs=1)],
        [info("h0", shape), info("X", ["T", *shape])],
        [info("last", shape), info("Y", ["T", *shape])],
        opset=11,
    )
    found = load(saved(tmp_path, proto))
    if axis == 0:
        assert "mixes the sequences of a batch" in found.skipped[0].reason
        return
    (recurrence,) = found.recurrences()
    X = np.random.default_rng(1).normal(size=(LENGTH, 2, 3, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    (came,) = session.run(["last"], {"X": X, "h0": np.zeros((2, 3, 4), np.float32)})
    x = torch.from_numpy(X.astype(np.float64)).transpose(0, 1).reshape(2, LENGTH, -1)
    ours = cells.trajectory(recurrence.cell, x, recurrence.initial.value)[:, -1]
    np.testing.assert_allclose(ours.numpy(), came.reshape(2, -1), atol=FLOAT32)
