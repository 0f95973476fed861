"""Every way to write a recurrence is read as the runtime that runs it computes it.

Each is run for 50 steps, from one start and again step by step from the runtime's own
states, so that an error that a contraction hides, or that one which expands blows up, is
told apart from a wrong reading.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from rnnaudit import cells
from rnnaudit.loaders import load
from rnnaudit.model import LSTMCell, Recurrence
from tests.test_load_onnx import model as node_model
from tests.test_load_onnx import quantised, saved, weights
from tests.test_load_traced import BOOL, INT64, draw, graph, info, model, op

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz"),
    pytest.mark.filterwarnings("ignore:.*assigned during export"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch.*"),
]

STEPS, BATCH, INPUTS, H = 50, 2, 3, 4
FLOAT32 = 1e-5
GATES = {"elman": 1, "gru": 3, "gru reset before": 3, "lstm": 4}
CELL = {"elman": "elman", "gru": "gru", "gru reset before": "gru", "lstm": "lstm"}


def session(proto: onnx.ModelProto) -> Callable[..., dict[str, np.ndarray]]:
    """Return what runs a model; its outputs by name."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    made = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in made.get_outputs()]
    return lambda **feeds: dict(zip(names, made.run(None, feeds), strict=True))


def exact(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.float64))


def agrees(
    recurrence: Recurrence,
    x: np.ndarray,
    start: np.ndarray,
    came: np.ndarray,
    tolerance: float = FLOAT32,
) -> None:
    """Compare states [T, N, S] that followed ``start`` [N, S] on x [T, N, I], in reading order."""
    x_, s = exact(x).transpose(0, 1), exact(start)
    run = cells.trajectory(recurrence.cell, x_, s).transpose(0, 1)
    assert (run - exact(came)).abs().max() <= tolerance
    before = torch.cat([s.unsqueeze(0), exact(came)[:-1]])
    steps = cells.step(recurrence.cell, before, exact(x))
    assert (steps - exact(came)).abs().max() <= tolerance


# --- ONNX's own operators ---------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "GRU reset before", "LSTM", "LSTM of all options"])
def test_a_node_takes_the_same_50_steps(tmp_path, kind, direction):
    name, D = kind.split()[0], 1 + (direction == "bidirectional")
    constants = weights(name, D, scale=0.5)
    attributes: dict[str, object] = {"hidden_size": H, "direction": direction}
    if name == "GRU":
        attributes["linear_before_reset"] = int(kind == "GRU")
    states = ["h0", "c0"] if name == "LSTM" else ["h0"]
    used, inputs = ["W", "R", "B"], ["X", "W", "R", "B", "", *states]
    if kind == "LSTM of all options":
        attributes |= {
            "input_forget": 1,
            "clip": 1.5,
            "activations": ["Sigmoid", "Tanh", "Elu"] * D,
        }
        used, inputs = [*used, "P"], [*inputs, "P"]
    outputs = ["Y", "h", "c"][: 1 + len(states)]
    node = helper.make_node(name, inputs, outputs, **attributes)
    proto = node_model(
        [node],
        {"X": ["T", "N", INPUTS], **{name: [D, "N", H] for name in states}},
        dict.fromkeys(outputs),
        {key: constants[key] for key in used},
    )
    (layer,) = load(saved(tmp_path, proto)).stacks[0].layers
    run = session(proto)
    x = draw(STEPS, BATCH, INPUTS, scale=1)
    given = {s: draw(D, BATCH, H, seed=i) for i, s in enumerate(states)}
    whole = run(X=x, **given)
    for d, recurrence in enumerate(layer.recurrences):
        order = slice(None, None, -1 if recurrence.reverse else 1)
        parts, came = [given[s] for s in states], []
        for t in range(STEPS)[order]:
            out = run(X=x[t : t + 1], **dict(zip(states, parts, strict=True)))
            parts = [out[name] for name in outputs[1:]]
            came.append(np.concatenate([part[d] for part in parts], axis=-1))
        start = np.concatenate([given[s][d] for s in states], axis=-1)
        agrees(recurrence, x[order], start, np.stack(came))
        np.testing.assert_allclose(whole["Y"][order][:, d], np.stack(came)[..., :H], atol=FLOAT32)


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
def test_a_node_in_half_precision_differs_by_the_rounding_of_its_outputs(tmp_path, name):
    constants = weights(name, dtype=np.float16)
    node = helper.make_node(name, ["X", "W", "R", "B"], ["Y"], hidden_size=H)
    half = TensorProto.FLOAT16
    proto = node_model(
        [node],
        {"X": (["T", "N", INPUTS], half)},
        {"Y": (["T", 1, "N", H], half)},
        {key: constants[key] for key in "WRB"},
    )
    (layer,) = load(saved(tmp_path, proto)).stacks[0].layers
    x = draw(STEPS, BATCH, INPUTS, scale=1).astype(np.float16)
    y = exact(session(proto)(X=x)["Y"][:, 0])
    ours = cells.run_layer(layer, exact(x).transpose(0, 1)).transpose(0, 1)
    # The runtime computes in float32: one rounding to 11 bits is left, half a unit in the last.
    assert (ours - y).abs().max() <= 2.0**-12 + FLOAT32
    assert (ours - y).abs().max() > FLOAT32


# --- the same cells written in operators ------------------------------------------------------


def written(kind: str, x: str, states: list[str], end: str) -> tuple[list, list[str]]:
    """Write one step from values x and ``states``; return its nodes and the next states."""

    def line(operator: str, inputs: str, outputs: str, **attributes: object) -> onnx.NodeProto:
        return op(operator, inputs, " ".join(o + end for o in outputs.split()), **attributes)

    h = states[0]
    nodes = [line("Gemm", f"{x} W b", "xw")]
    if kind in {"elman", "lstm"}:
        nodes += [line("MatMul", f"{h} U", "hu"), line("Add", f"xw{end} hu{end}", "a")]
    if kind == "elman":
        return [*nodes, line("Tanh", f"a{end}", "h_next")], [f"h_next{end}"]
    if kind == "lstm":
        nodes += [
            line("Split", f"a{end}", "ai af ag ao", axis=1),
            *(line("Sigmoid", f"a{g}{end}", g) for g in "ifo"),
            line("Tanh", f"ag{end}", "g"),
            line("Mul", f"f{end} {states[1]}", "fc"),
            line("Mul", f"i{end} g{end}", "ig"),
            line("Add", f"fc{end} ig{end}", "c_next"),
            line("Tanh", f"c_next{end}", "squashed"),
            line("Mul", f"o{end} squashed{end}", "h_next"),
        ]
        return nodes, [f"h_next{end}", f"c_next{end}"]
    nodes += [line("Split", f"xw{end}", "xr xz xn", axis=1)]
    if kind == "gru":
        nodes += [line("Gemm", f"{h} U c", "hu"), line("Split", f"hu{end}", "hr hz hn", axis=1)]
    else:
        nodes += [line("MatMul", f"{h} U{g}", f"h{g}") for g in "rz"]
    nodes += [
        line("Add", f"xr{end} hr{end}", "ar"),
        line("Sigmoid", f"ar{end}", "r"),
        line("Add", f"xz{end} hz{end}", "az"),
        line("Sigmoid", f"az{end}", "z"),
    ]
    if kind == "gru":
        nodes += [line("Mul", f"r{end} hn{end}", "reset")]
    else:
        nodes += [line("Mul", f"r{end} {h}", "rh"), line("MatMul", f"rh{end} Un", "reset")]
    nodes += [
        line("Add", f"xn{end} reset{end}", "an"),
        line("Tanh", f"an{end}", "n"),
        line("Sub", f"{h} n{end}", "d"),
        line("Mul", f"d{end} z{end}", "zd"),
        line("Add", f"n{end} zd{end}", "h_next"),
    ]
    return nodes, [f"h_next{end}"]


def stored(kind: str) -> dict[str, np.ndarray]:
    g = GATES[kind]
    found = {
        "W": draw(INPUTS, g * H, seed=1),
        "U": draw(H, g * H, seed=2),
        "b": draw(g * H, seed=3),
    }
    if kind == "gru":
        found["c"] = draw(g * H, seed=4)
    if kind == "gru reset before":
        found |= dict(zip(["Ur", "Uz", "Un"], np.split(found.pop("U"), 3, axis=1), strict=True))
    return found


def starts(kind: str) -> list[str]:
    return ["h0", "c0"] if kind == "lstm" else ["h0"]


def edge(kind: str) -> list[onnx.ValueInfoProto]:
    return [info(name, ["N", H]) for name in starts(kind)]


def of_steps(kind: str) -> list[onnx.ValueInfoProto]:
    return [info(name, ["T", "N", H]) for name in ("Y", "C")[: len(starts(kind))]]


def body_of(kind: str, more: tuple = ((), (), ()), x: str = "x", **constants: np.ndarray):
    """Write a body that carries the states and gives them out after each step."""
    nodes, names = written(kind, x, ["h", "c"][: len(starts(kind))], "")
    first, inputs, outputs = more
    given = [info(name, ["N", H]) for name in ("h", "c")[: len(names)]]
    last = [info(name, ["N", H]) for name in names]
    scans = [info(f"out_{name}", ["N", H]) for name in names]
    nodes += [op("Identity", name, f"out_{name}") for name in names]
    read = [info("x", ["N", INPUTS])] if x == "x" and not inputs else []
    return graph(
        [*first, *nodes],
        [*inputs, *given, *read],
        [*outputs, *last, *scans],
        constants,
    )


def outputs_of(kind: str) -> str:
    return " ".join([*(f"last_{s}" for s in starts(kind)), *"YC"[: len(starts(kind))]])


def scan(kind: str, *, backwards: bool = False) -> onnx.ModelProto:
    ways: dict[str, object] = {"body": body_of(kind), "num_scan_inputs": 1}
    if backwards:
        count = len(starts(kind))
        ways |= {"scan_input_directions": [1], "scan_output_directions": [1] * count}
    node = op("Scan", " ".join([*starts(kind), "X"]), outputs_of(kind), name="scan", **ways)
    return model([node], [info("X", ["T", "N", INPUTS]), *edge(kind)], of_steps(kind), stored(kind))


def loop(kind: str, *, backwards: bool = False, batch_first: bool = False) -> onnx.ModelProto:
    count = [info("step", [], INT64), info("go", [], BOOL)]
    first, where = [op("Identity", "go", "more")], "step"
    if backwards:
        first, where = [*first, op("Sub", "last step", "t")], "t"
    if batch_first:  # x[:, t], as PyTorch writes it
        first.append(op("Slice", "X from to rows", "all"))
        first.append(op("Gather", f"all {where}", "x_t", axis=1))
    else:
        first.append(op("Gather", f"X {where}", "x_t", axis=0))
    more = (first, count, [info("more", [], BOOL)])
    body = body_of(kind, more, "x_t", last=np.array(STEPS - 1))
    node = op(
        "Loop", " ".join(["trips yes", *starts(kind)]), outputs_of(kind), name="loop", body=body
    )
    constants = {**stored(kind), "trips": np.array(STEPS), "yes": np.array(True)}
    constants |= {"from": np.array([0]), "to": np.array([2**63 - 1]), "rows": np.array([0])}
    X = info("X", ["N", "T", INPUTS] if batch_first else ["T", "N", INPUTS])
    return model([node], [X, *edge(kind)], of_steps(kind), constants)


def function(kind: str) -> onnx.ModelProto:
    """Write a Scan in a function, its step in another one."""
    names, constants = ["h", "c"][: len(starts(kind))], stored(kind)
    nodes, after = written(kind, "x", names, "")
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    inner = helper.make_function("mine", "Step", ["x", *names, *constants], after, nodes, imports)
    call = helper.make_node("Step", ["x", *names, *constants], after, domain="mine")
    outs = [f"out_{name}" for name in after]
    body = graph(
        [call, *(op("Identity", a, b) for a, b in zip(after, outs, strict=True))],
        [*(info(name, ["N", H]) for name in names), info("x", ["N", INPUTS])],
        [info(name, ["N", H]) for name in (*after, *outs)],
    )
    layer = op(
        "Scan", " ".join([*starts(kind), "X"]), outputs_of(kind), body=body, num_scan_inputs=1
    )
    given = [*starts(kind), "X", *constants]
    gives = [*"YC"[: len(names)]]
    outer = helper.make_function("mine", "Layer", given, gives, [layer], imports)
    node = helper.make_node("Layer", given, gives, domain="mine", name="call")
    inputs = [info("X", ["T", "N", INPUTS]), *edge(kind)]
    return model([node], inputs, of_steps(kind), constants, functions=[inner, outer])


def one_step(kind: str) -> onnx.ModelProto:
    nodes, after = written(kind, "x", starts(kind), "")
    last = [info(name, ["N", H]) for name in after]
    return model(nodes, [info("x", ["N", INPUTS]), *edge(kind)], last, stored(kind))


def unrolled(kind: str) -> onnx.ModelProto:
    """Write 50 steps out, from a stored zero state, with every state an output."""
    nodes, at = [], starts(kind)
    constants = stored(kind) | {name: np.zeros((1, H), np.float32) for name in at}
    each: list[list[str]] = [[] for _ in at]
    for t in range(STEPS):
        constants[f"t{t}"] = np.array(t)
        nodes.append(op("Gather", f"X t{t}", f"x_{t}", axis=0))
        step, at = written(kind, f"x_{t}", at, f"_{t}")
        nodes += step
        for names, name in zip(each, at, strict=True):
            names.append(name)
    constants["axis"] = np.array([0])
    for name, names in zip("YC", each, strict=False):
        nodes += [op("Unsqueeze", f"{n} axis", f"{n}_row") for n in names]
        nodes.append(op("Concat", " ".join(f"{n}_row" for n in names), name, axis=0))
    return model(nodes, [info("X", [STEPS, "N", INPUTS])], of_steps(kind), constants)


WRITINGS = {
    "Scan": scan,
    "Scan backwards": lambda kind: scan(kind, backwards=True),
    "Loop": loop,
    "Loop backwards": lambda kind: loop(kind, backwards=True),
    "Loop, batch first": lambda kind: loop(kind, batch_first=True),
    "function": function,
    "one step per call": one_step,
    "unrolled": unrolled,
}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("writing", WRITINGS)
def test_a_cell_written_in_operators_takes_the_same_50_steps(tmp_path, writing, kind):
    proto = WRITINGS[writing](kind)
    onnx.checker.check_model(proto)
    found = load(saved(tmp_path, proto))
    assert not found.skipped
    (recurrence,) = found.recurrences()
    assert (recurrence.cell.kind, recurrence.cell.hidden_size) == (CELL[kind], H)
    assert recurrence.reverse == ("backwards" in writing)
    x = draw(STEPS, BATCH, INPUTS, scale=1)
    given = {name: draw(BATCH, H, seed=7 + i) for i, name in enumerate(starts(kind))}
    if writing == "unrolled":
        given = {name: np.zeros((BATCH, H), np.float32) for name in given}
        assert not recurrence.initial.value.any()
    run = session(proto)
    if writing == "one step per call":
        now, rows = given, []
        for row in x:
            after = list(run(x=row, **now).values())
            now = dict(zip(now, after, strict=True))
            rows.append(np.concatenate(after, axis=-1))
        came = np.stack(rows)
    else:
        X = x.swapaxes(0, 1) if "batch first" in writing else x
        out = run(X=X, **({} if writing == "unrolled" else given))
        came = np.concatenate([out[name] for name in "YC"[: len(given)]], axis=-1)
    if writing == "Scan backwards":  # its outputs are aligned with what it reads
        came = came[::-1]
    agrees(
        recurrence,
        x[::-1] if recurrence.reverse else x,
        np.concatenate(list(given.values()), axis=-1),
        came,
    )


@pytest.mark.parametrize("gemm", [False, True])
def test_what_a_loop_reads_has_the_size_that_operators_before_it_tell(tmp_path, gemm):
    """The input's product may be taken before the loop, and no shape is declared."""
    body = graph(
        [
            op("Gather", "u step", "u_t", axis=0),
            op("MatMul", "h U", "hu"),
            op("Add", "u_t hu", "a"),
            op("Tanh", "a", "h_next"),
            op("Identity", "go", "more"),
            op("Identity", "h_next", "y"),
        ],
        [info("step", [], INT64), info("go", [], BOOL), info("h", None)],
        [info("more", [], BOOL), info("h_next", None), info("y", None)],
    )
    before = [op("MatMul", "X W", "xw"), op("Add", "b xw", "sum"), op("Elu", "sum", "u")]
    if gemm:
        flat = [op("Reshape", "X rows", "flat"), op("Gemm", "flat W b", "g"), op("Elu", "g", "e")]
        before = [*flat, op("Reshape", "e back", "u")]
    constants = {"W": draw(INPUTS, H), "b": draw(H), "U": draw(H, H), "h0": draw(1, H, seed=9)}
    constants |= {"rows": np.array([-1, INPUTS]), "back": np.array([STEPS, 1, H])}
    constants |= {"trips": np.array(STEPS), "yes": np.array(True)}
    proto = model(
        [*before, op("Loop", "trips yes h0", "last Y", name="loop", body=body)],
        [info("X", ["T", 1, INPUTS])],
        [info("Y", None), info("u", None)],
        constants,
    )
    found = load(saved(tmp_path, proto))
    assert not found.skipped
    (recurrence,) = found.recurrences()
    assert recurrence.cell.kind == "elman"
    out = session(proto)(X=draw(STEPS, 1, INPUTS, scale=1))
    agrees(recurrence, out["u"], constants["h0"], out["Y"])


@pytest.mark.parametrize("over", ["time", "sequences"])
@pytest.mark.parametrize("ends", [(0, 0), (3, 3), (3, 0)])
def test_axes_are_the_same_from_either_end(tmp_path, ends, over):
    """Two Scans; the second runs over time as the first, or over the sequences of the batch."""
    along = (1 if over == "time" else 0) - ends[1]
    nodes, constants = [], {"h0": np.zeros((BATCH, H), np.float32)}
    constants["h1"] = np.zeros((BATCH if over == "time" else STEPS, H), np.float32)
    for n, (x, reads, axes) in enumerate(
        [("X", INPUTS, (0, 1 - ends[0])), ("Y0", H, (along, along))]
    ):
        step, _ = written("elman", "x", ["h"], "")
        body = graph(
            [*step, op("Identity", "h_next", "y")],
            [info("h", ["N", H]), info("x", ["N", reads])],
            [info(name, ["N", H]) for name in ("h_next", "y")],
            {"W": draw(reads, H, seed=n), "U": draw(H, H, seed=5 + n), "b": draw(H, seed=n)},
        )
        ways = {"scan_input_axes": [axes[0]], "scan_output_axes": [axes[1]]}
        names = f"h{n} {x}", f"last{n} Y{n}"
        nodes.append(op("Scan", *names, name=f"scan{n}", body=body, num_scan_inputs=1, **ways))
    outputs = [info(f"Y{n}", None) for n in (0, 1)]
    proto = model(nodes, [info("X", ["T", "N", INPUTS])], outputs, constants)
    found = load(saved(tmp_path, proto))
    assert [len(s.layers) for s in found.stacks] == ([2] if over == "time" else [1, 1])
    x = draw(STEPS, BATCH, INPUTS, scale=1)
    out = session(proto)(X=x)
    assert out["Y0"].shape == out["Y1"].shape == (BATCH, STEPS, H)
    first, second = found.recurrences()
    agrees(first, x, np.zeros((BATCH, H)), out["Y0"].swapaxes(0, 1))
    y, z = (out[n].swapaxes(0, 1) if over == "time" else out[n] for n in ("Y0", "Y1"))
    agrees(second, y, np.zeros((y.shape[1], H)), z)
    layouts = [layer.site.layout for stack in found.stacks for layer in stack.layers]
    assert layouts == [0, int(over == "time")]


def test_layers_that_pack_their_states_take_the_same_50_steps(tmp_path):
    """Two LSTMs in one step per call, with all of their states in one value."""
    first, h_c = written("lstm", "x", ["h1", "c1"], "_1")
    second, k_d = written("lstm", h_c[0], ["h2", "c2"], "_2")
    for node in second:  # weights of its own
        node.input[:] = [f"{n}2" if n in {"W", "U", "b"} else n for n in node.input]
    names = ["h1", "c1", "h2", "c2"]
    nodes = [
        op("Split", "state", " ".join(f"{n}_" for n in names), axis=1),
        *(op("Squeeze", f"{n}_ one", n) for n in names),
        *first,
        *second,
        *(op("Unsqueeze", f"{n} one", f"{n}_row") for n in (*h_c, *k_d)),
        op("Concat", " ".join(f"{n}_row" for n in (*h_c, *k_d)), "next", axis=1),
        op("Identity", k_d[0], "y"),
    ]
    constants = {**stored("lstm"), "one": np.array([1])}
    constants |= {"W2": draw(H, 4 * H, seed=5), "U2": draw(H, 4 * H, seed=6), "b2": draw(4 * H)}
    proto = model(
        nodes,
        [info("x", ["N", INPUTS]), info("state", ["N", 4, H])],
        [info("y", ["N", H]), info("next", ["N", 4, H])],
        constants,
    )
    found = load(saved(tmp_path, proto))
    a, b = found.recurrences()
    assert [(r.cell.kind, r.layer) for r in (a, b)] == [("lstm", 0), ("lstm", 1)]
    run, x, states = (
        session(proto),
        draw(STEPS, BATCH, INPUTS, scale=1),
        [draw(BATCH, 4, H, seed=8)],
    )
    for row in x:
        states.append(run(x=row, state=states[-1])["next"])
    all_ = np.stack(states).reshape(STEPS + 1, BATCH, 4 * H)
    start, came = all_[0], all_[1:]
    agrees(a, x, start[:, : 2 * H], came[..., : 2 * H])
    agrees(b, came[..., :H], start[:, 2 * H :], came[..., 2 * H :])


# --- eight bits -------------------------------------------------------------------------------


def rounded_to(values: Tensor, levels: int) -> float:
    """Return how far a value may move when it is rounded to so many levels of its range."""
    wide = max(float(values.max()), 0.0) - min(float(values.min()), 0.0)
    return wide / levels / 2 * 1.02  # the zero point is rounded too


def rounding_bound(cell: LSTMCell, s: Tensor, x: Tensor, levels: int) -> float:
    """Bound what rounding x and h moves in one step of an LSTM from s [N, S].

    |σ'| ≤ 1/4 and |tanh'| ≤ 1, so that |δc'| ≤ |c| δf/4 + δi/4 + δg and |δh'| ≤ δo/4 + |δc'|.
    """
    h, c = s[:, : cell.hidden_size], s[:, cell.hidden_size :]
    moved = cell.W.abs().sum(1) * rounded_to(x, levels)
    moved = moved + cell.U.abs().sum(1) * rounded_to(h, levels)
    i, f, g, o = moved.chunk(4)
    c_moved = c.abs() * f / 4 + i / 4 + g
    return float(torch.maximum(c_moved, o / 4 + c_moved).max()) + FLOAT32


@pytest.mark.parametrize("columns", [False, True])
def test_a_quantised_node_differs_by_the_rounding_of_one_step(tmp_path, columns):
    proto, _ = quantised(1, columns)
    node = proto.graph.node[0]
    node.input[5], node.input[6] = "h0", "c0"
    node.output.extend(["h", "c"])
    proto.graph.input.extend(info(name, [1, "N", H]) for name in ("h0", "c0"))
    proto.graph.output.extend(info(name, [1, "N", H]) for name in "hc")
    (recurrence,) = load(saved(tmp_path, proto)).recurrences()
    run, x = session(proto), draw(STEPS, BATCH, INPUTS, scale=1)
    h = c = np.zeros((1, BATCH, H), np.float32)
    largest = 0.0
    for t in range(STEPS):
        s = exact(np.concatenate([h[0], c[0]], axis=-1))
        out = run(X=x[t : t + 1], h0=h, c0=c)
        h, c = out["h"], out["c"]
        ours = cells.step(recurrence.cell, s, exact(x[t]))
        error = (ours - exact(np.concatenate([h[0], c[0]], axis=-1))).abs().max()
        assert error <= rounding_bound(recurrence.cell, s, exact(x[t]), 255)
        largest = max(largest, float(error))
    assert largest > FLOAT32  # it does round


def test_a_quantised_module_differs_by_the_rounding_of_one_step(tmp_path):
    if "x86" not in torch.backends.quantized.supported_engines:
        pytest.skip("no quantised engine on this machine")
    torch.backends.quantized.engine = "x86"
    torch.manual_seed(0)
    plain = nn.ModuleDict({"rnn": nn.LSTM(INPUTS, H)}).eval()
    net = torch.ao.quantization.quantize_dynamic(plain, {nn.LSTM}, torch.qint8)
    torch.save(net.state_dict(), tmp_path / "state.pt")
    (recurrence,) = load(tmp_path / "state.pt").recurrences()
    x = torch.from_numpy(draw(STEPS, BATCH, INPUTS, scale=1))
    h = c = torch.zeros(1, BATCH, H)
    largest = 0.0
    for row in x:
        s = torch.cat([h[0], c[0]], dim=-1).double()
        _, (h, c) = net["rnn"](row.unsqueeze(0), (h, c))
        ours = cells.step(recurrence.cell, s, row.double())
        error = float((ours - torch.cat([h[0], c[0]], dim=-1).double()).abs().max())
        # PyTorch keeps one bit of eight back from activations on x86.
        assert error <= rounding_bound(recurrence.cell, s, row.double(), 127)
        largest = max(largest, error)
    assert largest > FLOAT32


# --- PyTorch ----------------------------------------------------------------------------------


class Net(nn.Module):
    """A recurrence alone, batch first."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = kind(INPUTS, H, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


def as_state_dict(path, net, _):
    torch.save(net.state_dict(), path / "m.pt")
    return path / "m.pt"


def as_trace(path, net, x):
    torch.jit.trace(net, x, check_trace=False).save(path / "m.pt")
    return path / "m.pt"


def as_script(path, net, _):
    torch.jit.script(net).save(path / "m.pt")
    return path / "m.pt"


def as_export(path, net, x):
    torch.export.save(torch.export.export(net, (x,)), path / "m.pt2")
    return path / "m.pt2"


RECURRENT = [
    (nn.RNN, {"bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
    (nn.GRU, {"num_layers": 2}),
    (nn.GRU, {"bidirectional": True, "bias": False}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
]
SAVED = [
    (save, kind, options)
    for save, some in (
        (as_state_dict, RECURRENT),
        (as_trace, RECURRENT),
        (as_script, RECURRENT),
        (as_export, RECURRENT[1::3]),  # an export takes seconds
    )
    for kind, options in some
    if (save, "nonlinearity" in options) != (as_state_dict, True)  # which no state_dict tells
]


@pytest.mark.parametrize(("save", "kind", "options"), SAVED)
def test_what_pytorch_saves_takes_the_same_50_steps(tmp_path, save, kind, options):
    net = Net(kind, **options).eval()
    x = torch.from_numpy(draw(BATCH, STEPS, INPUTS, scale=1))
    path = save(tmp_path, net, x)
    (stack,) = load(path).stacks
    loaded = {as_state_dict: lambda: net, as_export: lambda: torch.export.load(path).module()}
    run = loaded.get(save, lambda: torch.jit.load(path))()
    with torch.no_grad():
        came = run(x)
    assert (cells.run_stack(stack, x.double()) - came).abs().max() <= FLOAT32
