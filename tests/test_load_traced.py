"""Recurrences written as operators are read as what ONNX Runtime computes, or refused by name."""

from __future__ import annotations

import re
import time

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from rnnaudit import cells
from rnnaudit.errors import LoadError, UnsupportedModelError
from rnnaudit.loaders import load
from rnnaudit.model import GRUCell

STEPS = 50
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def info(name, shape, kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def op(kind, inputs, outputs, **attributes):
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def graph(nodes, inputs, outputs, constants=None, name="g"):
    stored = [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()]
    return helper.make_graph(nodes, name, inputs, outputs, stored)


def model(nodes, inputs, outputs, constants=None, *, opset=17, functions=()):
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(f.domain, 1) for f in functions]
    made = graph(nodes, inputs, outputs, constants)
    return helper.make_model(made, opset_imports=imports, ir_version=8, functions=functions)


def draw(*shape, seed=0, scale=0.5):
    rng = np.random.default_rng(seed + sum(shape))
    return rng.normal(scale=scale, size=shape).astype(np.float32)


def read(tmp_path, proto):
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return load(path)


def runtime(proto, feeds):
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)


def states(recurrence, x):
    """Return the states [N, T, S] that follow zero under x [N, T, I]."""
    x = torch.as_tensor(x, dtype=torch.float64)
    return cells.trajectory(recurrence.cell, cells.reads(recurrence, x), recurrence.initial.value)


def only(found):
    (recurrence,) = found.recurrences()
    return recurrence


# --- Loop -------------------------------------------------------------------------------------


def masked_loop():
    """Write a loop as tf2onnx does: its own counter, a mask that holds, weights carried along."""
    body = graph(
        [
            op("Gather", "X t", "x", axis=0),
            op("Gather", "M t", "m", axis=0),
            op("MatMul", "x U_in", "xu"),
            op("MatMul", "h V", "hv"),
            op("Add", "xu hv", "a"),
            op("Tanh", "a", "n"),
            op("Where", "m n h", "h_next"),
            op("Add", "t one", "t_next"),
            op("Less", "t_next steps", "more"),
            op("Identity", "h_next", "y"),
            op("Identity", "U_in", "U_out"),
        ],
        [
            info("i", [], INT64),
            info("go", [], BOOL),
            info("t", [], INT64),
            info("h", ["N", 4]),
            info("U_in", [3, 4]),
        ],
        [
            info("more", [], BOOL),
            info("t_next", [], INT64),
            info("h_next", ["N", 4]),
            info("U_out", [3, 4]),
            info("y", ["N", 4]),
        ],
        {"one": np.array(1), "steps": np.array(STEPS)},
    )
    nodes = [
        op("Shape", "X", "shape"),
        op("Gather", "shape one_", "rows", axis=0),
        op("Unsqueeze", "rows axis0", "rows1"),
        op("Concat", "rows1 four", "wanted", axis=0),
        op("ConstantOfShape", "wanted", "h0"),
        op("Loop", "trips yes zero h0 U", "t_last h_last U_last Y", name="while", body=body),
    ]
    return model(
        nodes,
        [info("X", ["T", "N", 3]), info("M", ["T", "N", 1], BOOL)],
        [info("Y", ["T", "N", 4]), info("h_last", ["N", 4])],
        {
            "U": draw(3, 4),
            "V": draw(4, 4),
            "trips": np.array(STEPS),
            "yes": np.array(True),
            "zero": np.array(0),
            "one_": np.array(1),
            "axis0": np.array([0]),
            "four": np.array([4]),
        },
    )


def test_a_loop_with_a_mask_is_what_onnx_runtime_computes(tmp_path):
    proto = masked_loop()
    found = read(tmp_path, proto)
    recurrence = only(found)
    X = draw(STEPS, 2, 3, scale=1)
    M = np.random.default_rng(1).random((STEPS, 2, 1)) < 0.7
    Y, _ = runtime(proto, {"X": X, "M": M})
    x = np.concatenate([X, M], axis=2).swapaxes(0, 1)
    ours = cells.run(recurrence, torch.as_tensor(x, dtype=torch.float64))
    assert np.abs(ours.numpy() - Y.swapaxes(0, 1)).max() < 1e-5
    assert recurrence.cell.state_size == 4
    assert recurrence.initial.source == "zero"
    assert "RA131" in {f.id for f in found.findings}


def test_a_masked_step_forgets_nothing(tmp_path):
    cell = only(read(tmp_path, masked_loop())).cell
    s, x = torch.randn(4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    held = torch.cat([x, torch.zeros(1, dtype=torch.float64)])
    assert torch.equal(cells.step(cell, s, held), s)
    assert torch.equal(cells.jacobian(cell, s, held), torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("length", "trips", "said"),
    [
        (STEPS, 2**63 - 1, [f"its sequences at {STEPS} steps"]),
        ("T", STEPS, [f"at most {STEPS} steps"]),
        ("T", 2**63 - 1, []),
    ],
)
def test_a_loop_of_as_many_steps_as_the_graph_fixes_is_said_to_be(tmp_path, length, trips, said):
    proto = ended_loop("shorter than")
    proto.graph.input[0].CopyFrom(info("X", [length, "N", 3]))
    for stored in proto.graph.initializer:
        if stored.name == "trips":
            stored.CopyFrom(numpy_helper.from_array(np.array(trips), "trips"))
    messages = [f.message for f in read(tmp_path, proto).findings if f.id == "RA126"]
    assert len(messages) == len(said)
    assert all(text in message for text, message in zip(said, messages, strict=True))


def test_a_loop_that_counts_down_runs_in_reverse(tmp_path):
    body = graph(
        [
            op("Sub", "last i", "t"),
            op("Gather", "X t", "x", axis=1),
            op("MatMul", "h V", "hv"),
            op("Add", "x hv", "a"),
            op("Softsign", "a", "h_next"),
            op("Identity", "go", "more"),
        ],
        [info("i", [], INT64), info("go", [], BOOL), info("h", ["N", 4])],
        [info("more", [], BOOL), info("h_next", ["N", 4])],
        {"last": np.array(STEPS - 1)},
    )
    proto = model(
        [op("Loop", "trips yes h0", "h_last", name="while", body=body)],
        [info("X", ["N", STEPS, 4]), info("h0", ["N", 4])],
        [info("h_last", ["N", 4])],
        {"V": draw(4, 4), "trips": np.array(STEPS), "yes": np.array(True)},
    )
    recurrence = only(read(tmp_path, proto))
    assert recurrence.direction == "reverse"
    assert (recurrence.initial.source, recurrence.initial.name) == ("graph input", "h0")
    X = draw(2, STEPS, 4)
    (last,) = runtime(proto, {"X": X, "h0": np.zeros((2, 4), np.float32)})
    ours = cells.run(recurrence, torch.as_tensor(X, dtype=torch.float64))[:, 0]
    assert np.abs(ours.numpy() - last).max() < 1e-5


LSTM_STEP = [
    op("MatMul", "x W", "xw"),
    op("MatMul", "h U", "hu"),
    op("Add", "xw hu", "a"),
    op("Split", "a", "ai af ag ao", axis=1),
    op("Sigmoid", "ai", "i"),
    op("Sigmoid", "af", "f"),
    op("Tanh", "ag", "g"),
    op("Sigmoid", "ao", "o"),
    op("Mul", "f c", "fc"),
    op("Mul", "i g", "ig"),
    op("Add", "fc ig", "c_new"),
    op("Tanh", "c_new", "squashed"),
    op("Mul", "o squashed", "h_new"),
]

MASKS = {
    "shorter than": [op("Less", "t lengths", "mask"), op("Unsqueeze", "mask last", "m")],
    "not as long as": [
        op("GreaterOrEqual", "t lengths", "over"),
        op("Unsqueeze", "over last", "m"),
    ],
    "before and after": [
        op("Greater", "lengths t", "before"),
        op("GreaterOrEqual", "t first", "after"),
        op("And", "before after", "both"),
        op("Unsqueeze", "both last", "m"),
    ],
    "tiled": [
        op("Less", "t lengths", "mask"),
        op("Unsqueeze", "mask last", "column"),
        op("Cast", "column", "numbers", to=FLOAT),
        op("Tile", "numbers widths", "tiled"),
        op("Cast", "tiled", "m", to=BOOL),
    ],
}


def ended_loop(how, *, scanned=False, blended=False):
    """Write an LSTM whose states and outputs are masked past each sequence's length."""
    turned = how == "not as long as"
    sides = ("old", "new") if turned else ("new", "old")

    def choose(new, old, out):
        if blended:
            return [
                op("Mul", f"number {new}", f"{out}_new"),
                op("Mul", f"rest {old}", f"{out}_old"),
                op("Add", f"{out}_new {out}_old", out),
            ]
        given = {"new": new, "old": old}
        return [op("Where", f"m {given[sides[0]]} {given[sides[1]]}", out)]

    numbers = [op("Cast", "m", "number", to=FLOAT), op("Sub", "one number", "rest")]
    nodes = [
        *([] if scanned else [op("Gather", "X t", "x", axis=0)]),
        *LSTM_STEP,
        *MASKS[how],
        *(numbers if blended else []),
        *choose("h_new", "h", "h_next"),
        *choose("c_new", "c", "c_next"),
        *choose("h_new", "zeros", "y"),
        op("Identity", "go", "more"),
    ]
    states = [info("h", ["N", 4]), info("c", ["N", 4])]
    after = [info("h_next", ["N", 4]), info("c_next", ["N", 4])]
    y = info("y", ["N", 4])
    zero = {"zeros": np.zeros((1, 4), np.float32), "widths": np.array([1, 4])}
    constants = {
        "W": draw(3, 16),
        "U": draw(4, 16, seed=1),
        "trips": np.array(STEPS),
        "yes": np.array(True),
        "last": np.array([1]),
        "first": np.array(0),
        "one": np.array(1, np.float32),
        "steps": np.arange(STEPS),
    }
    outputs = "h_last c_last Y"
    if scanned:
        body = graph(
            nodes[:-1], [*states, info("x", ["N", 3]), info("t", [], INT64)], [*after, y], zero
        )
        node = op("Scan", "h0 c0 X steps", outputs, name="loop", body=body, num_scan_inputs=2)
    else:
        given = [info("t", [], INT64), info("go", [], BOOL), *states]
        body = graph(nodes, given, [info("more", [], BOOL), *after, y], zero)
        node = op("Loop", "trips yes h0 c0", outputs, name="loop", body=body)
    return model(
        [node],
        [
            info("X", [STEPS, "N", 3]),
            info("lengths", ["N"], INT64),
            info("h0", ["N", 4]),
            info("c0", ["N", 4]),
        ],
        [info("Y", [STEPS, "N", 4]), info("h_last", ["N", 4]), info("c_last", ["N", 4])],
        constants,
    )


@pytest.mark.parametrize("how", [*MASKS, "shorter than, multiplied by"])
@pytest.mark.parametrize("scanned", [False, True])
def test_a_mask_that_ends_sequences_lets_all_steps_of_full_ones_through(tmp_path, how, scanned):
    name, _, blended = how.partition(", ")
    proto = ended_loop(name, scanned=scanned, blended=bool(blended))
    found = read(tmp_path, proto)
    recurrence = only(found)
    assert (recurrence.cell.kind, recurrence.cell.input_size) == ("lstm", 3)
    assert "past the end of a sequence" in recurrence.rounded
    assert not found.whole
    (warning,) = (f.message for f in found.findings if f.id == "RA131")
    assert warning.startswith("'h' and 'c' kept as before where the step's number is past a length")
    X, zeros = draw(STEPS, 2, 3, scale=1), np.zeros((2, 4), np.float32)
    feeds = {"X": X, "lengths": np.array([STEPS, 20]), "h0": zeros, "c0": zeros}
    Y, h, c = runtime(proto, feeds)
    x = torch.as_tensor(X.swapaxes(0, 1), dtype=torch.float64)
    ours = cells.run(recurrence, x).numpy()
    assert np.abs(ours[0] - Y[:, 0]).max() < 1e-5
    assert np.abs(ours[1, :20] - Y[:20, 1]).max() < 1e-5
    end = states(recurrence, X.swapaxes(0, 1)).numpy()
    assert np.abs(end[1, 19] - np.concatenate([h[1], c[1]])).max() < 1e-5


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (
            [op("ReduceMax", "h", "most", keepdims=0), op("Greater", "most zero", "also")],
            "depends on the number of the step and on the state",
        ),
        (
            [op("ReduceMax", "x", "most", keepdims=0), op("Greater", "most zero", "also")],
            "depends on the number of the step and on 'x', which it reads",
        ),
    ],
)
def test_a_mask_that_depends_on_data_too_is_refused(tmp_path, extra, reason):
    proto = ended_loop("shorter than")
    body = next(a.g for a in proto.graph.node[0].attribute if a.name == "body")
    body.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "zero"))
    at = next(i for i, node in enumerate(body.node) if node.output[0] == "mask")
    body.node[at].output[0] = "short"
    for node in [op("And", "short also", "mask"), *extra[::-1]]:
        body.node.insert(at + 1, node)
    (skipped,) = read(tmp_path, proto).skipped
    assert reason in skipped.reason


def body_of(proto):
    return next(a.g for a in proto.graph.node[0].attribute if a.name == "body")


def written_at(body, output, nodes):
    """Put nodes where the one with this output stands, in its place."""
    at = next(i for i, node in enumerate(body.node) if node.output[0] == output)
    del body.node[at]
    for node in nodes[::-1]:
        body.node.insert(at, node)


@pytest.mark.parametrize("what", ["another sequence", "the sequence itself"])
def test_a_mask_on_numbers_that_every_step_reads_is_refused(tmp_path, what):
    # Whatever their names, they are no lengths: any of them may close any step.
    proto = ended_loop("shorter than", scanned=what == "another sequence")
    body = body_of(proto)
    if what == "another sequence":
        proto.graph.input.append(info("ends", [STEPS, "N"], INT64))
        body.input.append(info("end", ["N"], INT64))
        proto.graph.node[0].input.append("ends")
        next(a for a in proto.graph.node[0].attribute if a.name == "num_scan_inputs").i = 3
        written_at(body, "mask", [op("Less", "t end", "mask")])
    else:
        most = op("ReduceMax", "X", "most", axes=[0, 2], keepdims=0)
        written_at(
            body, "mask", [most, op("Cast", "t", "now", to=FLOAT), op("Less", "now most", "mask")]
        )
    (skipped,) = read(tmp_path, proto).skipped
    assert "depends on the number of the step" in skipped.reason


@pytest.mark.parametrize("blended", [False, True])
def test_a_mask_that_keeps_the_state_below_a_length_is_refused(tmp_path, blended):
    # On sequences of full length such a step never replaces what it keeps.
    proto = ended_loop("shorter than", blended=blended)
    turned = {"number": "rest", "rest": "number"}
    for node in body_of(proto).node:
        if node.op_type == "Where" and node.output[0] != "y":
            node.input[1], node.input[2] = node.input[2], node.input[1]
        elif node.op_type == "Mul" and node.input[0] in turned:
            node.input[0] = turned[node.input[0]]
    (skipped,) = read(tmp_path, proto).skipped
    assert "the number of the step" in skipped.reason


def test_a_state_that_is_kept_except_on_large_inputs_is_not_kept(tmp_path):
    proto = ended_loop("shorter than", blended=True)
    body = body_of(proto)
    body.initializer.append(numpy_helper.from_array(np.array(100, np.float32), "large"))
    nearly = [
        op("ReduceMax", "x", "top", axes=[1], keepdims=1),
        op("Sub", "top large", "over"),
        op("Relu", "over", "more_"),
        op("Add", "h more_", "nearly"),
        op("Mul", "rest nearly", "h_next_old"),
    ]
    written_at(body, "h_next_old", nearly)
    (skipped,) = read(tmp_path, proto).skipped
    assert "its state depends on the number of the step" in skipped.reason


def test_outputs_that_a_mask_blanks_are_not_claimed(tmp_path):
    proto = ended_loop("shorter than")
    for node in body_of(proto).node:
        if node.op_type == "Where" and node.output[0] != "y":
            node.op_type = "Identity"
            del node.input[2], node.input[0]
    found = read(tmp_path, proto)
    recurrence = only(found)
    assert "outputs past the end of a sequence" in recurrence.rounded
    (layer,) = found.stacks[0].layers
    assert layer.site.outlets.steps == "Y"
    assert "past the end of a sequence" in layer.site.outlets.obstacle


PICKS = {
    "at the condition": ([op("Cast", "go", "i", to=INT64)], op("Gather", "X i", "x_t", axis=0)),
    "as truth values": (
        [op("Cast", "t", "true", to=BOOL), op("Cast", "true", "i", to=INT64)],
        op("Gather", "X i", "x_t", axis=0),
    ),
    "in a type that wraps": (
        [op("Cast", "t", "byte", to=TensorProto.INT8), op("Cast", "byte", "i", to=INT64)],
        op("Gather", "X i", "x_t", axis=0),
    ),
    "two at once": ([op("Add", "t both", "i")], op("Gather", "X i", "two_", axis=0)),
    "a window": (
        [op("Unsqueeze", "t first", "i"), op("Add", "i two", "end")],
        op("Slice", "X i end first", "two_"),
    ),
    "all to the end": ([op("Unsqueeze", "t first", "i")], op("Slice", "X i last first", "two_")),
    "every other": (
        [op("Unsqueeze", "t first", "i"), op("Add", "i two", "end")],
        op("Slice", "X i end first two", "two_"),
    ),
    "one": (
        [op("Unsqueeze", "t first", "i"), op("Add", "i one", "end")],
        op("Slice", "X i end first one", "two_"),
    ),
}


@pytest.mark.parametrize("how", PICKS)
def test_a_loop_reads_one_entry_after_another_or_is_refused(tmp_path, how):
    index, pick = PICKS[how]
    more = [op("ReduceSum", "two_ first", "x_t", keepdims=0)] if pick.output[0] == "two_" else []
    body = graph(
        [
            *index,
            pick,
            *more,
            op("MatMul", "x_t W", "xw"),
            op("MatMul", "h V", "hv"),
            op("Add", "xw hv", "a"),
            op("Tanh", "a", "h_next"),
            op("Identity", "go", "more"),
            op("Identity", "h_next", "y"),
        ],
        [info("t", [], INT64), info("go", [], BOOL), info("h", ["N", 4])],
        [info("more", [], BOOL), info("h_next", ["N", 4]), info("y", ["N", 4])],
        {"first": np.array([0]), "one": np.array([1]), "two": np.array([2])}
        | {"both": np.array([0, 1]), "last": np.array([STEPS + 2])},
    )
    proto = model(
        [op("Loop", "trips yes h0", "h_last Y", name="loop", body=body)],
        [info("X", [STEPS + 2, "N", 3]), info("h0", ["N", 4])],
        [info("Y", [STEPS, "N", 4])],
        {"W": draw(3, 4), "V": draw(4, 4), "trips": np.array(STEPS), "yes": np.array(True)},
    )
    found = read(tmp_path, proto)
    if how != "one":
        (skipped,) = found.skipped
        assert "it reads 'X' in an order" in skipped.reason or "one entry of 'X'" in skipped.reason
        return
    X, zeros = draw(STEPS + 2, 2, 3, scale=1), np.zeros((2, 4), np.float32)
    (Y,) = runtime(proto, {"X": X, "h0": zeros})
    ours = states(only(found), X[:STEPS].swapaxes(0, 1)).numpy()
    assert np.abs(ours - Y.swapaxes(0, 1)).max() < 1e-5


CLOCKS = {
    "below a number": [op("Less", "t five", "mask")],
    "from a number on": [op("GreaterOrEqual", "t five", "mask")],
    "now and then": [op("Mod", "t five", "rest_"), op("Less", "rest_ one_", "mask")],
    "up to a half": [op("Mul", "t five", "more_"), op("Less", "more_ lengths", "mask")],
    "up to a length reckoned": [op("Sub", "lengths five", "less_"), op("Less", "t less_", "mask")],
    "either": [
        op("Less", "t lengths", "one__"),
        op("Less", "t five", "two__"),
        op("And", "one__ two__", "mask"),
    ],
    "at no step": [op("Less", "t five", "one__"), op("Not", "one__", "mask")],
    "at every step": [op("GreaterOrEqual", "t first", "mask")],
    "at every step, or below a length": [
        op("GreaterOrEqual", "t first", "one__"),
        op("Less", "t lengths", "two__"),
        op("Or", "one__ two__", "mask"),
    ],
    "below a length and not below it": [
        op("Less", "t lengths", "one__"),
        op("LessOrEqual", "lengths t", "two__"),
        op("And", "one__ two__", "mask"),
    ],
    "in a type that wraps": [
        op("Cast", "t", "short_", to=TensorProto.INT8),
        op("Cast", "short_", "long_", to=INT64),
        op("Less", "long_ lengths", "mask"),
    ],
    "by another's operator": [op("Less", "t lengths", "mask", domain="com.example")],
}


@pytest.mark.parametrize(
    ("how", "blended"),
    [
        (how, blended)
        for how in CLOCKS
        for blended in (False, True)
        if not (blended and how == "below a length and not below it")  # two are never multiplied by
    ],
)
def test_a_mask_that_no_given_length_opens_is_refused(tmp_path, how, blended):
    # What a state keeps from step 5 on it keeps for ever, whatever the length.
    proto = ended_loop("shorter than", blended=blended)
    body = next(a.g for a in proto.graph.node[0].attribute if a.name == "body")
    numbers = {"five": np.array([5]), "one_": np.array([1])}
    body.initializer.extend(numpy_helper.from_array(v, n) for n, v in numbers.items())
    at = next(i for i, node in enumerate(body.node) if node.output[0] == "mask")
    del body.node[at]
    for node in CLOCKS[how][::-1]:
        body.node.insert(at, node)
    (skipped,) = read(tmp_path, proto).skipped
    assert "not on a length that is given" in skipped.reason


@pytest.mark.parametrize(
    ("start", "by", "after", "read_"),
    [
        (0, 1, ("Add", "n by"), True),
        (-2, 1, ("Add", "n by"), False),
        (9, -1, ("Add", "n by"), False),
        (0, -1, ("Sub", "n by"), True),
        (0, -1, ("Sub", "by n"), False),
    ],
)
def test_a_counter_passes_a_bound_where_it_starts_there_and_never_falls(
    tmp_path, start, by, after, read_
):
    # From 9 down, steps from the eleventh on are below 0, and keep the state for ever; so does
    # every other step where −1 − n follows n.
    proto = ended_loop("before and after")
    (node,) = proto.graph.node
    body = next(a.g for a in node.attribute if a.name == "body")
    body.input.append(info("n", [], INT64))
    body.output.insert(3, info("n_next", [], INT64))
    body.node.append(op(*after, "n_next"))
    body.initializer.append(numpy_helper.from_array(np.array(by), "by"))
    next(n for n in body.node if n.output[0] == "after").input[0] = "n"
    proto.graph.initializer.append(numpy_helper.from_array(np.array(start), "n0"))
    node.input.append("n0")
    node.output.insert(2, "n_last")
    found = read(tmp_path, proto)
    if read_:
        assert only(found).cell.kind == "lstm"
    else:
        assert "not on a length that is given" in found.skipped[0].reason


def test_a_step_that_depends_on_its_number_otherwise_is_refused(tmp_path):
    proto = ended_loop("shorter than")
    body = next(a.g for a in proto.graph.node[0].attribute if a.name == "body")
    for node in body.node:
        if node.output[0] == "h_next":
            node.input[2] = "c"
    (skipped,) = read(tmp_path, proto).skipped
    assert "its state depends on the number of the step" in skipped.reason


@pytest.mark.parametrize(("looped", "rows"), [(True, "N"), (True, 2), (False, "N")])
def test_a_step_that_mixes_the_sequences_of_a_batch_is_refused(tmp_path, looped, rows):
    # For one sequence h − reversed(h) is 0, and nothing is remembered; of two it holds for ever.
    step = [
        op("Slice", "h back end first back", "turned"),
        op("Sub", "h turned", "d"),
        op("MatMul", "d V", "hv"),
        op("MatMul", "x W", "xw"),
        op("Add", "xw hv", "a"),
        op("Tanh", "a", "h_next"),
    ]
    stored = {
        "back": np.array([-1]),
        "end": np.array([-99]),
        "first": np.array([0]),
        "W": np.eye(3, 4, dtype=np.float32),
        "V": 2 * np.eye(4, dtype=np.float32),
    }
    h, x = [rows, 4], [rows, 3]
    if looped:
        body = graph(step, [info("h", h), info("x", x)], [info("h_next", h)])
        scan = op("Scan", "h0 X", "h_last", body=body, num_scan_inputs=1)
        proto = model([scan], [info("h0", h), info("X", ["T", *x])], [info("h_last", h)], stored)
        X = np.zeros((40, 2, 3), np.float32)
        X[0, 0] = 1
        (last,) = runtime(proto, {"h0": np.zeros((2, 4), np.float32), "X": X})
        assert np.abs(last[:, :3]).min() > 0.9
    else:
        proto = model(step, [info("h", h), info("x", x)], [info("h_next", h)], stored)
    found = read(tmp_path, proto)
    assert not list(found.recurrences())
    assert "mixes the sequences of a batch" in found.skipped[0].reason


MIXING = {
    "beyond a threshold": (
        [
            op("Slice", "h back end first back", "turned"),
            op("Sub", "turned far", "over"),
            op("Relu", "over", "d"),
        ],
        ["N", 4],
        "not known to keep the sequences of a batch apart",
    ),
    "by their mean": (
        [op("ReduceMean", "h", "d", axes=[0])],
        ["N", 4],
        "mixes the sequences of a batch",
    ),
    "by a transposed product": (
        [op("Transpose", "h", "turned"), op("MatMul", "turned h", "q"), op("MatMul", "h q", "d")],
        ["N", 4],
        "mixes the sequences of a batch",
    ),
    "along a second axis": (
        [op("Slice", "h back end second back", "d")],
        ["N", "M"],
        "mixes the entries of an axis of unknown length",
    ),
    "by a share of each": (
        [op("Softmax", "h", "d", axis=1)],
        ["N", "M"],
        "mixes the entries of an axis of unknown length",
    ),
}


def elementwise(nodes, shape):
    """Write a Scan that keeps half of h, and adds what ``nodes`` make of h and what it reads."""
    step = [*nodes, op("Mul", "h half", "kept"), op("Sum", "kept d x", "h_next")]
    stored = {
        "half": np.array(0.5, np.float32),
        "far": np.array(100, np.float32),
        "back": np.array([-1]),
        "end": np.array([-99]),
        "first": np.array([0]),
        "second": np.array([1]),
    }
    body = graph(step, [info("h", shape), info("x", shape)], [info("h_next", shape)])
    scan = op("Scan", "h0 X", "h_last", body=body, num_scan_inputs=1)
    inputs = [info("h0", shape), info("X", ["T", *shape])]
    return model([scan], inputs, [info("h_last", shape)], stored)


@pytest.mark.parametrize("how", MIXING)
def test_mixing_is_refused_however_it_is_written(tmp_path, how):
    nodes, shape, reason = MIXING[how]
    found = read(tmp_path, elementwise(nodes, shape))
    assert not list(found.recurrences())
    assert reason in found.skipped[0].reason


@pytest.mark.parametrize("shape", [["N", 4], ["N", "M"], ["N", "M", 2, "K"]])
def test_axes_of_unknown_length_may_be_many_where_no_entries_meet(tmp_path, shape):
    recurrence = only(read(tmp_path, elementwise([op("Tanh", "h", "d")], shape)))
    units = [n for n in shape if isinstance(n, int)]
    assert recurrence.cell.state_size == np.prod(units)


PIECES = {
    "squash": "Tanh {a} -> {b}",
    "multiply": "MatMul {a} V -> {b}",
    "halve": "Mul {a} half -> {b}",
    "add the input": "Add {a} x -> {b}",
    "add the state": "Add {a} h -> {b}",
    "turn units": "Slice {a} back end second back -> {b}",
    "turn sequences": "Slice {a} back end first back -> {b}",
    "share among units": "Softmax {a} -> {b}; axis=1",
    "share among sequences": "Softmax {a} -> {b}; axis=0",
    "center": "ReduceMean {a} -> {b}m; axes=[1]|Sub {a} {b}m -> {b}",
    "center sequences": "ReduceMean {a} -> {b}m; axes=[0]|Sub {a} {b}m -> {b}",
    "there and back": "Transpose {a} -> {b}t|Tanh {b}t -> {b}u|Transpose {b}u -> {b}",
    "mix units": "Transpose {a} -> {b}t|MatMul V {b}t -> {b}u|Transpose {b}u -> {b}",
    "flatten": "Reshape {a} flat -> {b}t|Tanh {b}t -> {b}u|Reshape {b}u rows -> {b}",
    "roll over sequences": "Reshape {a} flat -> {b}t|Slice {b}t back end first back -> {b}u"
    "|Reshape {b}u rows -> {b}",
    "far": "Sub {a} far -> {b}t|Slice {b}t back end first back -> {b}u|Relu {b}u -> {b}v"
    "|Add {a} {b}v -> {b}",
}


def pieced(pieces):
    """Write a Scan whose step is a row of pieces."""
    nodes, at = [op("Add", "h x", "p0")], "p0"
    for i, piece in enumerate(pieces, 1):
        for line in PIECES[piece].format(a=at, b=f"p{i}").split("|"):
            call, _, given = line.partition(";")
            left, right = call.split(" -> ")
            kind, inputs = left.split(" ", 1)
            settings = dict([pair.split("=") for pair in given.split()])
            settings = {k: [int(v[1:-1])] if "[" in v else int(v) for k, v in settings.items()}
            nodes.append(op(kind, inputs, right, **settings))
        at = f"p{i}"
    nodes.append(op("Tanh", at, "h_next"))
    stored = {
        "V": draw(4, 4),
        "half": np.array(0.5, np.float32),
        "far": np.array(0.2, np.float32),
        "flat": np.array([-1]),
        "rows": np.array([-1, 4]),
        "back": np.array([-1]),
        "end": np.array([-99]),
        "first": np.array([0]),
        "second": np.array([1]),
    }
    return scan_of(nodes, stored)


@given(st.lists(st.sampled_from(list(PIECES)), max_size=6))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_read_of_one_sequence_holds_of_each_of_several(tmp_path, pieces):
    proto = pieced(pieces)
    recurrences = list(read(tmp_path, proto).recurrences())
    X = draw(6, 3, 4, scale=1)
    together = runtime(proto, {"h0": np.zeros((3, 4), np.float32), "X": X})[0]
    alone = [
        runtime(proto, {"h0": np.zeros((1, 4), np.float32), "X": X[:, [i]]})[0] for i in range(3)
    ]
    kept_apart = np.abs(np.concatenate(alone) - together).max() < 1e-5
    assert kept_apart or not recurrences
    if recurrences:
        ours = states(recurrences[0], X.swapaxes(0, 1))[:, -1].numpy()
        assert np.abs(ours - together).max() < 1e-5
    mixing = {
        "turn sequences",
        "share among sequences",
        "center sequences",
        "roll over sequences",
        "far",
    }
    if not mixing & {*pieces}:
        assert recurrences


def test_a_step_that_reads_a_memory_of_unknown_length_is_refused(tmp_path):
    # Of a memory of one entry alone, softmax gives 1 whatever the state is.
    body = graph(
        [
            op("Unsqueeze", "h second", "query"),
            op("Mul", "query memory", "products"),
            op("ReduceSum", "products last", "scores"),
            op("Softmax", "scores", "weights", axis=1),
            op("Mul", "weights memory", "weighed"),
            op("ReduceSum", "weighed second", "d", keepdims=0),
            op("Sum", "d x", "h_next"),
        ],
        [info("h", ["N", 4]), info("x", ["N", 4])],
        [info("h_next", ["N", 4])],
    )
    proto = model(
        [op("Scan", "h0 X", "h_last", body=body, num_scan_inputs=1)],
        [info("h0", ["N", 4]), info("X", ["T", "N", 4]), info("memory", ["N", "S", 4])],
        [info("h_last", ["N", 4])],
        {"second": np.array([1]), "last": np.array([2])},
    )
    runtime(
        proto, {n: draw(*s) for n, s in (("h0", (2, 4)), ("X", (3, 2, 4)), ("memory", (2, 5, 4)))}
    )
    (skipped,) = read(tmp_path, proto).skipped
    assert "mixes the entries of an axis of unknown length" in skipped.reason


@pytest.mark.parametrize(("mixed", "size"), [(False, 4), (True, 8)])
def test_sequences_that_the_graph_fixes_are_one_state_only_where_they_meet(tmp_path, mixed, size):
    step = [
        op("Slice", "h back end first back", "turned") if mixed else op("Tanh", "h", "turned"),
        op("MatMul", "turned V", "hv"),
        op("MatMul", "x W", "xw"),
        op("Add", "hv xw", "a"),
        op("Tanh", "a", "h_next"),
    ]
    stored = {"V": draw(4, 4), "W": draw(3, 4)}
    stored |= {"back": np.array([-1]), "end": np.array([-99]), "first": np.array([0])}
    proto = model(step, [info("h", [2, 4]), info("x", [2, 3])], [info("h_next", [2, 4])], stored)
    recurrence = only(read(tmp_path, proto))
    assert recurrence.cell.state_size == size
    X, h, steps = draw(STEPS, 2, 3, scale=1), np.zeros((2, 4), np.float32), []
    for x in X:
        (h,) = runtime(proto, {"h": h, "x": x})
        steps.append(h)
    x = X.reshape(1, STEPS, 6) if mixed else X.swapaxes(0, 1)
    ours = (
        states(recurrence, x).numpy().reshape(-1, STEPS, 4)
        if not mixed
        else (states(recurrence, x).numpy().reshape(STEPS, 2, 4).swapaxes(0, 1))
    )
    assert np.abs(ours - np.stack(steps, axis=1)).max() < 1e-5


# --- Scan -------------------------------------------------------------------------------------


def closed_loop(direction=0):
    body = graph(
        [
            op("Add", "u y", "x"),
            op("MatMul", "x U", "xu"),
            op("MatMul", "h V", "hv"),
            op("Add", "xu hv", "a"),
            op("Tanh", "a", "h_next"),
            op("MatMul", "h_next C", "y_next"),
            op("Identity", "y_next", "out"),
        ],
        [info("h", ["N", 4]), info("y", ["N", 2]), info("u", ["N", 2])],
        [info("h_next", ["N", 4]), info("y_next", ["N", 2]), info("out", ["N", 2])],
    )
    return model(
        [
            op(
                "Scan",
                "h0 y0 X",
                "h_last y_last Y",
                name="scan",
                body=body,
                num_scan_inputs=1,
                scan_input_directions=[direction],
                scan_output_directions=[direction],
            )
        ],
        [info("X", ["T", 1, 2])],
        [info("Y", ["T", 1, 2])],
        {
            "U": draw(2, 4),
            "V": draw(4, 4),
            "C": draw(4, 2),
            "h0": draw(1, 4, seed=5),
            "y0": draw(1, 2, seed=6),
        },
    )


@pytest.mark.parametrize("direction", [0, 1])
def test_a_scan_carries_all_that_it_feeds_back(tmp_path, direction):
    proto = closed_loop(direction)
    found = read(tmp_path, proto)
    recurrence = only(found)
    assert found.whole
    assert (recurrence.cell.hidden_size, recurrence.cell.state_size) == (2, 6)
    assert recurrence.direction == ("reverse" if direction else "forward")
    assert recurrence.initial.source == "constant"
    X = draw(STEPS, 1, 2, scale=1)
    (Y,) = runtime(proto, {"X": X})
    ours = cells.run(recurrence, torch.as_tensor(X.swapaxes(0, 1), dtype=torch.float64))
    assert np.abs(ours.numpy() - Y.swapaxes(0, 1)).max() < 1e-5


def test_a_batch_first_scan_of_opset_8_reads_each_sequence(tmp_path):
    body = graph(
        [
            op("MatMul", "h V", "hv"),
            op("Add", "x hv", "a"),
            op("Tanh", "a", "h_next"),
            op("Identity", "h_next", "y"),
        ],
        [info("h", [4]), info("x", [4])],
        [info("h_next", [4]), info("y", [4])],
    )
    proto = model(
        [helper.make_node("Scan", ["", "h0", "X"], ["h_last", "Y"], body=body, num_scan_inputs=1)],
        [info("h0", ["N", 4]), info("X", ["N", "T", 4])],
        [info("h_last", ["N", 4]), info("Y", ["N", "T", 4])],
        {"V": draw(4, 4)},
        opset=8,
    )
    recurrence = only(read(tmp_path, proto))
    X = draw(2, STEPS, 4)
    _, Y = runtime(proto, {"X": X, "h0": np.zeros((2, 4), np.float32)})
    ours = cells.run(recurrence, torch.as_tensor(X, dtype=torch.float64))
    assert np.abs(ours.numpy() - Y).max() < 1e-5


# --- refusals ---------------------------------------------------------------------------------


def scan_of(nodes, constants):
    body = graph(
        nodes,
        [info("h", ["N", 4]), info("x", ["N", 4])],
        [info("h_next", ["N", 4])],
    )
    return model(
        [op("Scan", "h0 X", "h_last", name="scan", body=body, num_scan_inputs=1)],
        [info("X", ["T", "N", 4]), info("h0", ["N", 4])],
        [info("h_last", ["N", 4])],
        constants,
    )


def test_an_operator_that_is_not_read_is_named(tmp_path):
    proto = scan_of([op("Add", "x h", "a"), op("Det", "a", "d"), op("Mul", "d h", "h_next")], {})
    (skipped,) = read(tmp_path, proto).skipped
    assert skipped.where == "scan"
    assert skipped.reason == "Scan: the step holds Det, an operator that is not read there"


def test_a_state_that_changes_its_shape_is_refused(tmp_path):
    proto = scan_of([op("Add", "x h", "a"), op("Transpose", "a", "h_next")], {})
    (skipped,) = read(tmp_path, proto).skipped
    assert "the state h has shape [1, 4] before a step and [4, 1] after it" in skipped.reason


SIZES = {
    "negative": ([1, -4], "carries -4 and reads -4 in 2 axes"),
    "negative twice": ([-4, -4], "carries (16|-4) and reads (16|-4) in 2 axes"),
    "endless": ([1, 2**40], "carries 1,099,511,627,776 and reads 1,099,511,627,776 in 2 axes"),
    "none": ([1, 0], "carries 0 and reads 0 in 2 axes"),
    "of many axes": ([1] * 60, "carries 1 and reads 1 in 60 axes"),
}


@pytest.mark.parametrize("how", SIZES)
@pytest.mark.parametrize("looped", [True, False])
def test_absurd_sizes_of_a_state_are_refused_in_one_line(tmp_path, how, looped):
    shape, reason = SIZES[how]
    if looped:
        proto = elementwise([op("Tanh", "h", "d")], shape)
    else:
        step = [op("Mul", "h half", "kept"), op("Add", "kept x", "h_next")]
        ends = [info("h", shape), info("x", shape)], [info("h_next", shape)]
        proto = model(step, *ends, {"half": np.array(0.5, np.float32)})
    found = read(tmp_path, proto)
    assert not list(found.recurrences())
    (skipped,) = found.skipped
    assert re.search(reason, skipped.reason), skipped.reason
    assert "\n" not in skipped.reason


@pytest.mark.parametrize(
    "nodes",
    [
        [op("Identity", "b", "a"), op("Identity", "a", "b")],
        [op("Add", "b x", "a"), op("Mul", "a h", "b")],
        [op("Identity", "a", "a")],
    ],
)
@pytest.mark.parametrize("looped", [True, False])
def test_a_step_that_is_made_of_itself_is_refused(tmp_path, nodes, looped):
    step = [*nodes, op("Sum", "x h a", "h_next")]
    if looped:
        proto = scan_of(step, {})
    else:
        ends = [info("h", ["N", 4]), info("x", ["N", 4])], [info("h_next", ["N", 4])]
        proto = model(step, *ends)
    found = read(tmp_path, proto)
    assert not list(found.recurrences())
    (skipped,) = found.skipped
    assert re.search("'a', which is made of itself|shape of 'a' is not known", skipped.reason)


@pytest.mark.parametrize(
    "nodes",
    [
        [op("Identity", "q", "p"), op("Identity", "p", "q"), op("Add", "p i", "t")],
        [op("Add", "q i", "p"), op("Add", "p one", "q"), op("Identity", "p", "t")],
        [op("Add", "t i", "t")],
        # Followed one by one, the first number of this sum would be met 2¹⁰⁰ times.
        [
            op("Add", f"{f'p{k - 1}' * (k > 0) or 'i'} {f'p{k - 1}' * (k > 0) or 'i'}", f"p{k}")
            for k in range(100)
        ]
        + [op("Identity", "p99", "t")],
        # Followed by recursion, this one would be too deep.
        [op("Add", f"{f'p{k - 1}' * (k > 0) or 'i'} zero", f"p{k}") for k in range(2000)]
        + [op("Identity", "p1999", "t")],
    ],
)
def test_an_index_without_an_end_is_refused(tmp_path, nodes):
    step = [
        *nodes,
        op("Gather", "X t", "x"),
        op("Add", "x h", "h_next"),
        op("Identity", "go", "more"),
    ]
    body = graph(
        step,
        [info("i", [], INT64), info("go", [], BOOL), info("h", ["N", 4])],
        [info("more", [], BOOL), info("h_next", ["N", 4])],
        {"one": np.array(1), "zero": np.array(0)},
    )
    proto = model(
        [op("Loop", "trips yes h0", "h_last", name="while", body=body)],
        [info("X", [50, "N", 4]), info("h0", ["N", 4])],
        [info("h_last", ["N", 4])],
        {"trips": np.array(50), "yes": np.array(True)},
    )
    (skipped,) = read(tmp_path, proto).skipped
    assert skipped.reason == "Loop: it reads 'X' in an order that is not followed"


def test_long_steps_are_read_in_seconds(tmp_path):
    nodes = [op("Tanh", f"p{k - 1}" if k else "h", f"p{k}") for k in range(4000)]
    began = time.monotonic()
    recurrence = only(read(tmp_path, scan_of([*nodes, op("Add", "p3999 x", "h_next")], {})))
    assert time.monotonic() - began < 30  # comparing each with each took minutes
    assert len(recurrence.cell.operations) == 4001


# --- functions --------------------------------------------------------------------------------


def test_recurrences_inside_functions_are_read(tmp_path):
    inner = helper.make_function(
        "mine",
        "Step",
        ["x", "h", "V"],
        ["h_next"],
        [op("MatMul", "h V", "hv"), op("Add", "x hv", "a"), op("Tanh", "a", "h_next")],
        [helper.make_opsetid("", 17)],
    )
    body = graph(
        [
            helper.make_node("Step", ["x", "h", "V"], ["h_next"], domain="mine"),
            op("Identity", "h_next", "y"),
        ],
        [info("h", ["N", 4]), info("x", ["N", 4])],
        [info("h_next", ["N", 4]), info("y", ["N", 4])],
    )
    outer = helper.make_function(
        "mine",
        "Layer",
        ["X", "h0", "V"],
        ["Y"],
        [op("Scan", "h0 X", "h_last Y", name="scan", body=body, num_scan_inputs=1)],
        [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)],
    )
    proto = model(
        [
            op("MatMul", "X A", "Z"),
            helper.make_node("Layer", ["Z", "h0", "V"], ["Y"], domain="mine", name="call"),
        ],
        [info("X", ["T", "N", 4])],
        [info("Y", ["T", "N", 4])],
        {"V": draw(4, 4), "A": draw(4, 4, seed=3), "h0": np.zeros((1, 4), np.float32)},
        functions=[inner, outer],
    )
    found = read(tmp_path, proto)
    recurrence = only(found)
    assert not found.skipped
    X = draw(STEPS, 1, 4)
    (Y,) = runtime(proto, {"X": X})
    z = torch.as_tensor((X @ draw(4, 4, seed=3)).swapaxes(0, 1), dtype=torch.float64)
    assert np.abs(cells.run(recurrence, z).numpy() - Y.swapaxes(0, 1)).max() < 1e-5


def test_functions_that_multiply_without_end_are_refused(tmp_path):
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    functions = [helper.make_function("mine", "F0", ["a"], ["b"], [op("Tanh", "a", "b")], imports)]
    for i in range(1, 40):
        twice = [
            helper.make_node(f"F{i - 1}", ["a"], ["m"], domain="mine"),
            helper.make_node(f"F{i - 1}", ["m"], ["b"], domain="mine"),
        ]
        functions.append(helper.make_function("mine", f"F{i}", ["a"], ["b"], twice, imports))
    proto = model(
        [helper.make_node("F39", ["X"], ["Y"], domain="mine")],
        [info("X", [1])],
        [info("Y", [1])],
        functions=functions,
    )
    with pytest.raises(LoadError, match="make 549,755,813,888 nodes, more than the 200,000"):
        read(tmp_path, proto)


# --- one step per call ------------------------------------------------------------------------


def gru_step(names=("state", "next"), nodes=(), outputs=()):
    """Write one step of a GRU in operators, its state at the graph's edge."""
    before, after = names
    return model(
        [
            op("Gemm", "x W b", "gx", transB=1),
            op("Gemm", f"{before} U c", "gh", transB=1),
            op("Split", "gx", "xr xz xn", axis=1),
            op("Split", "gh", "hr hz hn", axis=1),
            op("Add", "xr hr", "ar"),
            op("Add", "xz hz", "az"),
            op("Sigmoid", "ar", "r"),
            op("Sigmoid", "az", "z"),
            op("Mul", "r hn", "q"),
            op("Add", "xn q", "an"),
            op("Tanh", "an", "n"),
            op("Sub", f"{before} n", "d"),
            op("Mul", "d z", "zd"),
            op("Add", "zd n", after),
            op("MatMul", f"{after} C", "y"),
            *nodes,
        ],
        [info("x", ["N", 4]), info(before, ["N", 4])],
        [info("y", ["N", 4]), info(after, ["N", 4]), *outputs],
        {
            "W": draw(12, 4),
            "U": draw(12, 4, seed=1),
            "b": draw(12),
            "c": draw(12, seed=2),
            "C": draw(4, 4, seed=3),
        },
        opset=13,
    )


@pytest.mark.parametrize("names", [("state", "next"), ("p", "s")])
def test_a_state_at_the_edge_is_recognised_by_wiring(tmp_path, names):
    proto = gru_step(names)
    found = read(tmp_path, proto)
    recurrence = only(found)
    assert (recurrence.cell.input_size, recurrence.cell.state_size) == (4, 4)
    assert (recurrence.initial.source, recurrence.initial.name) == ("graph input", names[0])
    (note,) = found.findings
    assert note.id == "RA130"
    assert f"{names[0]!r} → {names[1]!r}" in note.message
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    X, h, steps = draw(STEPS, 2, 4, scale=1), np.zeros((2, 4), np.float32), []
    for x in X:
        _, h = session.run(None, {"x": x, names[0]: h})
        steps.append(h)
    ours = states(recurrence, X.swapaxes(0, 1))
    assert np.abs(ours.numpy() - np.stack(steps, axis=1)).max() < 1e-5


def test_the_jacobian_of_a_traced_step_is_that_of_the_same_gru(tmp_path):
    cell = only(read(tmp_path, gru_step())).cell
    order = np.split(np.arange(12), 3)
    W, U, b, c = draw(12, 4), draw(12, 4, seed=1), draw(12), draw(12, seed=2)
    same = GRUCell(
        *(torch.as_tensor(a[np.concatenate(order)], dtype=torch.float64) for a in (W, U, b, c))
    )
    s, x = torch.randn(3, 7, 4).double(), torch.randn(3, 7, 4).double()
    assert torch.allclose(cells.step(cell, s, x), cells.step(same, s, x), atol=1e-14)
    assert torch.allclose(cells.jacobian(cell, s, x), cells.jacobian(same, s, x), atol=1e-14)
    v = torch.randn(3, 7, 4).double()
    for derivative in (cells.jvp, cells.vjp):
        assert torch.allclose(derivative(cell, s, x, v), derivative(same, s, x, v), atol=1e-14)


def test_a_network_without_memory_has_no_state(tmp_path):
    nodes = [
        op("MatMul", "x A", "a"),
        op("Tanh", "a", "t"),
        op("MatMul", "t A", "m"),
        op("Add", "m k", "y"),
    ]
    proto = model(
        nodes,
        [info("x", ["N", 4]), info("k", ["N", 4])],
        [info("y", ["N", 4])],
        {"A": draw(4, 4)},
    )
    proto.graph.node[-1].input[1] = "t"
    with pytest.raises(UnsupportedModelError, match="no recurrence found"):
        read(tmp_path, proto)


def test_a_cache_that_is_only_moved_along_is_named(tmp_path):
    nodes = [op("Concat", "cache x", "both", axis=1), op("Slice", "both one end axis", "kept")]
    proto = gru_step(nodes=nodes, outputs=[info("kept", ["N", 12])])
    proto.graph.input.append(info("cache", ["N", 12]))
    for name, value in {"one": [4], "end": [99], "axis": [1]}.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    found = read(tmp_path, proto)
    assert len(list(found.recurrences())) == 1
    assert [f.where for f in found.findings if f.id == "RA124"] == ["cache"]


# --- unrolled ---------------------------------------------------------------------------------


def unrolled(steps=6, last="Tanh"):
    nodes, h = [], "h0"
    for t in range(steps):
        nodes += [
            op("Gather", f"X t{t}", f"x{t}", axis=0),
            op("MatMul", f"x{t} U", f"u{t}"),
            op("MatMul", f"{h} V", f"v{t}"),
            op("Add", f"u{t} v{t}", f"a{t}"),
            op(last if t == steps // 2 else "Tanh", f"a{t}", f"h{t + 1}"),
        ]
        h = f"h{t + 1}"
    constants = {f"t{t}": np.array(t) for t in range(steps)}
    constants |= {"U": draw(3, 4), "V": draw(4, 4), "h0": np.zeros((1, 4), np.float32)}
    return model(nodes, [info("X", ["T", "N", 3])], [info(h, ["N", 4])], constants)


def test_steps_that_share_their_weights_are_one_recurrence(tmp_path):
    proto = unrolled()
    found = read(tmp_path, proto)
    recurrence = only(found)
    assert (recurrence.name, recurrence.cell.input_size, recurrence.cell.state_size) == ("V", 3, 4)
    (note,) = found.findings
    assert note.id == "RA126"
    assert note.message.startswith("unrolled to 6 steps that share their weights, over 'X'")
    X = draw(6, 2, 3, scale=1)
    (last,) = runtime(proto, {"X": X})
    assert np.abs(states(recurrence, X.swapaxes(0, 1))[:, -1].numpy() - last).max() < 1e-5


def test_steps_that_differ_are_named(tmp_path):
    (skipped,) = read(tmp_path, unrolled(last="Relu")).skipped
    assert skipped.where == "V"
    assert skipped.reason == "unrolled to 6 steps: its steps differ in how 'h3' is made"


def test_sizes_that_are_summed_from_one_another_are_told_once(tmp_path):
    nodes = [op("Elu", "X", "E"), op("Shape", "E", "v0")]
    nodes += [op("Add", f"v{i} v{i}", f"v{i + 1}") for i in range(60)]
    nodes += [op("Reshape", "X v60", "R"), op("MatMul", "R W", "RW"), op("MatMul", "h U", "hu")]
    nodes += [op("Add", "RW hu", "a"), op("Tanh", "a", "h2")]
    weights = {"W": draw(3, 4), "U": draw(4, 4)}
    edges = [info("X", ["N"]), info("h", ["N", 4])], [info("h2", None)]
    begin = time.process_time()
    with pytest.raises(UnsupportedModelError, match="no recurrence found"):
        read(tmp_path, model(nodes, *edges, weights))
    assert time.process_time() - begin < 10  # each told twice takes 2⁶⁰ times as long


def test_a_step_is_read_behind_an_operator_whose_shapes_are_not_followed(tmp_path):
    nodes = [op("Conv", "X K", "E"), op("Flatten", "E", "F"), op("MatMul", "F W", "FW")]
    nodes += [op("MatMul", "h U", "hu"), op("Add", "FW hu", "a"), op("Tanh", "a", "h2")]
    weights = {"K": draw(3, 3, 1, seed=1), "W": draw(3, 4), "U": draw(4, 4)}
    edges = [info("X", ["N", 3, 1]), info("h", ["N", 4])], [info("h2", ["N", 4])]
    recurrence = only(read(tmp_path, model(nodes, *edges, weights)))
    assert (recurrence.cell.input_size, recurrence.cell.state_size) == (3, 4)
