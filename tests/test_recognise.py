"""Steps written as operators are the cell that they are, and never one that they are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit import api, cells, export
from rnnaudit.cells.recognise import recognise
from rnnaudit.model import ElmanCell, GRUCell, LSTMCell, Operation, Port, TracedCell
from rnnaudit.reports import wording
from rnnaudit.truncation import Form
from tests import reports_by_hand as by_hand
from tests.test_load_traced import (
    BOOL,
    INT64,
    draw,
    graph,
    info,
    model,
    only,
    op,
    read,
    runtime,
)

INPUTS, H = 3, 4


def step(
    text, constants, *, states=("h",), after=("h_next",), x=(1, INPUTS), shapes=None, outputs=1
):
    """Make a traced cell of lines ``out, … = Op in, …``; attributes follow a semicolon."""
    operations = []
    for line in filter(None, map(str.strip, text.splitlines())):
        left, right = line.split(" = ")
        call, _, given_ = right.partition(";")
        kind, *names = call.split()
        attributes = {}
        for pair in given_.split():
            key, value = pair.split(":")
            numbers = tuple(float(v) if "." in v else int(v) for v in value.split(","))
            attributes[key] = numbers if key == "axes" else numbers[0]
        operations.append(Operation(kind, tuple(names), tuple(left.split()), attributes))
    shapes = shapes or {}
    return TracedCell(
        tuple(operations),
        {name: torch.as_tensor(np.asarray(value)) for name, value in constants.items()},
        (Port("x", (1, INPUTS)),),
        tuple(Port(name, shapes.get(name, (1, H))) for name in states),
        after,
        outputs,
    )


def weights(seed, gates, *, inputs=INPUTS):
    """Draw float32 weights, which float64 holds."""
    return {
        name: torch.from_numpy(draw(*shape, seed=seed)).double()
        for name, shape in (
            ("W", (inputs, gates * H)),
            ("U", (H, gates * H)),
            ("b", (gates * H,)),
            ("c", (gates * H,)),
        )
    } | {"one": torch.ones((), dtype=torch.float64)}


LSTM = """
xw = Gemm x W b
hu = MatMul h U
a = Add xw hu
i f g o = Split a; axis:1
i_ = Sigmoid i
f_ = Sigmoid f
g_ = Tanh g
o_ = Sigmoid o
fc = Mul f_ c0
ig = Mul i_ g_
c_next = Add fc ig
squashed = Tanh c_next
h_next = Mul o_ squashed
"""

GRU = """
xw = Gemm x W b
hu = Gemm h U c
xr xz xn = Split xw; axis:1
hr hz hn = Split hu; axis:1
ar = Add xr hr
r = Sigmoid ar
az = Add xz hz
z = Sigmoid az
rh = Mul r hn
an = Add xn rh
n = Tanh an
"""

BLENDS = {
    "(1 − z) n + z h": "y = Sub one z\nyn = Mul y n\nzh = Mul z h\nh_next = Add yn zh",
    "n + z (h − n)": "d = Sub h n\nzd = Mul d z\nh_next = Add zd n",
    "n − z n + z h": "zn = Mul z n\nm = Sub n zn\nzh = Mul h z\nh_next = Add m zh",
    "h + y (n − h)": "y = Sub one z\nd = Sub n h\nyd = Mul y d\nh_next = Add h yd",
    "complement gate": "y = Sub one z\nyh = Mul y h\nzn = Mul z n\nh_next = Add zn yh",
}

RESET_BEFORE = """
xw = Gemm x W b
xr xz xn = Split xw; axis:1
Ur Uz Un = Split U; axis:1
hr = MatMul h Ur
ar = Add xr hr
r = Sigmoid ar
hz = MatMul h Uz
az = Add xz hz
z = Sigmoid az
rh = Mul h r
hn = MatMul rh Un
an = Add xn hn
n = Tanh an
"""


def lstm(seed=0, text=LSTM, order=("h", "c0")):
    after = {"h": "h_next", "c0": "c_next"}
    return step(text, weights(seed, 4), states=order, after=tuple(after[name] for name in order))


def known(cell):
    parts = recognise(cell)
    assert parts is not None
    (part,) = parts
    return part


def agrees(cell, part):
    """Whether a part's step and Jacobian are the traced one's, at states far beyond the usual."""
    rng = torch.Generator().manual_seed(1)
    s = 3 * torch.randn(32, cell.state_size, generator=rng, dtype=torch.float64)
    x = 3 * torch.randn(32, cell.input_size, generator=rng, dtype=torch.float64)
    own = list(part.state)
    torch.testing.assert_close(
        cells.step(part.cell, s[:, own], x), cells.step(cell, s, x)[:, own], rtol=0, atol=1e-13
    )
    torch.testing.assert_close(
        cells.jacobian(part.cell, s[:, own], x),
        cells.jacobian(cell, s, x)[:, own][:, :, own],
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.parametrize("order", [("h", "c0"), ("c0", "h")])
@given(seed=st.integers(0, 2**16))
@settings(max_examples=3, deadline=None)
def test_an_lstm_is_recognised_whatever_the_order_of_its_states(order, seed):
    cell = lstm(seed, order=order)
    part = known(cell)
    first = order.index("h") * H
    assert isinstance(part.cell, LSTMCell)
    assert part.state[:H] == tuple(range(first, first + H))
    stored = cell.constants
    assert torch.equal(part.cell.W, stored["W"].T)
    assert torch.equal(part.cell.U, stored["U"].T)
    assert torch.equal(part.cell.b, stored["b"])
    agrees(cell, part)


def test_gates_in_another_order_are_told_by_what_they_do():
    text = LSTM.replace("i f g o = Split", "f o i g = Split")
    cell = lstm(text=text)
    part = known(cell)
    f, o, i, g = cell.constants["W"].T.chunk(4)
    assert torch.equal(part.cell.W, torch.cat([i, f, g, o]))
    agrees(cell, part)


def test_hard_sigmoids_keep_their_slope():
    text = LSTM.replace("Sigmoid i", "HardSigmoid i; alpha:0.25 beta:0.5")
    text = text.replace("Sigmoid f", "HardSigmoid f; alpha:0.25 beta:0.5")
    text = text.replace("Sigmoid o", "HardSigmoid o; alpha:0.25 beta:0.5")
    cell = lstm(text=text)
    part = known(cell)
    assert (part.cell.gate.name, part.cell.gate.alpha) == ("hardsigmoid", 0.25)
    agrees(cell, part)


def test_a_packed_state_is_taken_apart():
    text = "h = Gather s one_; axis:0\nc0 = Gather s zero; axis:0\n" + LSTM
    text += "h1 = Unsqueeze h_next; axes:0\nc1 = Unsqueeze c_next; axes:0\n"
    text += "s_next = Concat c1 h1; axis:0"
    constants = {**weights(0, 4), "zero": np.array(0), "one_": np.array(1)}
    cell = step(text, constants, states=("s",), after=("s_next",), shapes={"s": (2, 1, H)})
    part = known(cell)
    assert part.state == (*range(H, 2 * H), *range(H))
    agrees(cell, part)


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("reset", [GRU, RESET_BEFORE], ids=["after", "before"])
def test_every_way_to_write_a_gru_is_one(blend, reset):
    stored = weights(1, 3)
    stored |= dict(zip(("Ur", "Uz", "Un"), stored["U"].split(H, dim=1), strict=True))
    text = reset.replace("Ur Uz Un = Split U; axis:1\n", "") + BLENDS[blend]
    cell = step(text, stored)
    part = known(cell)
    assert isinstance(part.cell, GRUCell)
    assert part.cell.reset_after == (reset is GRU)
    agrees(cell, part)


@pytest.mark.parametrize(
    ("kind", "name"), [("Tanh", "tanh"), ("Relu", "relu"), ("Identity", "affine")]
)
def test_an_elman_step_is_one(kind, name):
    cell = step(
        f"xw = Gemm x W b\nhu = MatMul h U\na = Add xw hu\nh_next = {kind} a", weights(2, 1)
    )
    part = known(cell)
    assert isinstance(part.cell, ElmanCell)
    assert part.cell.activation.name == name
    agrees(cell, part)


PEEP = (LSTM.replace("Sigmoid i", "Sigmoid pi").replace("Sigmoid f", "Sigmoid pf")).replace(
    "Sigmoid o", "Sigmoid po"
)
PEEP = PEEP.replace(
    "i_ =", "ic = Mul c0 p_i\npi = Add i ic\nfc_ = Mul p_f c0\npf = Add fc_ f\ni_ ="
)
PEEP = PEEP.replace("o_ = Sigmoid po\n", "")
PEEP = PEEP.replace("squashed =", "oc = Mul p_o c_next\npo = Add o oc\no_ = Sigmoid po\nsquashed =")
COUPLED = LSTM.replace("f_ = Sigmoid f\n", "f_ = Sub one i_\n")
FORGETS = LSTM.replace("i_ = Sigmoid i\n", "").replace("g_ =", "i_ = Sub one f_\ng_ =")
PROJECTED = LSTM.replace("h_next = Mul o_ squashed", "m = Mul o_ squashed\nh_next = MatMul m R")
CLIPPED = LSTM.replace("i f g o =", "b_ = Clip a low high\ni f g o =").replace(
    "Split a", "Split b_"
)


def extras(seed, projected=None):
    rng = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=rng).double()

    stored = weights(seed, 4) | {name: drawn(H) for name in ("p_i", "p_f", "p_o")}
    stored |= {"low": torch.tensor(-0.5).double(), "high": torch.tensor(0.5).double()}
    stored |= {"p": torch.tensor(0.75).double(), "dense": drawn(H, H)}
    if projected is not None:
        stored |= {"R": drawn(H, projected), "U": drawn(projected, 4 * H)}
    return stored


MORE = {
    "peepholes": (PEEP, {"peephole": True}),
    "f = 1 − i": (COUPLED, {"input_forget": 1}),
    "i = 1 − f": (FORGETS, {"input_forget": 1}),
    "peepholes and f = 1 − i": (
        PEEP.replace("f_ = Sigmoid pf\n", "f_ = Sub one i_\n"),
        {"peephole": True, "input_forget": 1},
    ),
    "a clip": (CLIPPED, {"clip": 0.5}),
    "a clip of each gate and of c": (
        CLIPPED.replace("squashed =", "cc = Clip c_next low high\nsquashed =").replace(
            "Tanh c_next", "Tanh cc"
        ),
        {"clip": 0.5},
    ),
    "a projection": (PROJECTED, {"proj_size": 3}),
    "a projection to as many": (PROJECTED, {"proj_size": H}),
    "a projection, peepholes": (
        PEEP.replace("h_next = Mul o_ squashed", "m = Mul o_ squashed\nh_next = MatMul m R"),
        {"proj_size": 3, "peephole": True},
    ),
}


@pytest.mark.parametrize("order", [("h", "c0"), ("c0", "h")])
@pytest.mark.parametrize("how", MORE)
@given(seed=st.integers(0, 2**16))
@settings(max_examples=3, deadline=None)
def test_what_an_lstm_can_have_more_is_recognised(how, order, seed):
    text, options = MORE[how]
    P = options.get("proj_size", H)
    stored = extras(seed, P if "proj_size" in options else None)
    after = tuple({"h": "h_next", "c0": "c_next"}[name] for name in order)
    cell = step(text, stored, states=order, after=after, shapes={"h": (1, P)})
    part = known(cell)
    assert isinstance(part.cell, LSTMCell)
    assert {k: v for k, v in part.cell.options.items() if k != "activations"} == options
    assert part.cell.clip_output == ("of c" in how)
    if part.cell.peephole is not None:
        p_f = torch.zeros(H).double() if part.cell.input_forget else stored["p_f"]
        assert torch.equal(part.cell.peephole, torch.stack([stored["p_i"], p_f, stored["p_o"]]))
    agrees(cell, part)


@pytest.mark.parametrize("reset", [GRU, RESET_BEFORE], ids=["after", "before"])
def test_a_gru_may_be_clipped(reset):
    stored = weights(1, 3) | {
        "low": torch.tensor(-0.5).double(),
        "high": torch.tensor(0.5).double(),
    }
    stored |= dict(zip(("Ur", "Uz", "Un"), stored["U"].split(H, dim=1), strict=True))
    text = reset.replace("Ur Uz Un = Split U; axis:1\n", "") + BLENDS["(1 − z) n + z h"]
    for gate, function in (("r", "Sigmoid"), ("z", "Sigmoid"), ("n", "Tanh")):
        text = text.replace(
            f"{gate} = {function} a{gate}",
            f"b{gate} = Clip a{gate} low high\n{gate} = {function} b{gate}",
        )
    part = known(step(text, stored))
    assert (part.cell.kind, part.cell.clip) == ("gru", 0.5)
    agrees(step(text, stored), part)
    assert recognise(step(text.replace("Tanh bn", "Tanh an"), stored)) is None


@pytest.mark.parametrize(("kind", "name"), [("Tanh", "tanh"), ("Identity", "affine")])
def test_an_elman_step_may_be_clipped(kind, name):
    stored = weights(2, 1) | {
        "low": torch.tensor(-0.5).double(),
        "high": torch.tensor(0.5).double(),
    }
    text = "xw = Gemm x W b\nhu = MatMul h U\na_ = Add xw hu\na = Clip a_ low high\n"
    cell = step(text + f"h_next = {kind} a", stored)
    part = known(cell)
    assert (part.cell.activation.name, part.cell.clip) == (name, 0.5)
    agrees(cell, part)


FAR = {
    "a clip of one gate": CLIPPED.replace("Split b_", "Split a")
    .replace("Sigmoid f", "Sigmoid ff")
    .replace("f_ =", "ff = Clip f low high\nf_ =", 1),
    "bounds that differ": CLIPPED.replace("low high", "low p"),
    "a bound on one side": CLIPPED.replace("low high", "low"),
    "f = i − 1": COUPLED.replace("Sub one i_", "Sub i_ one"),
    "hard gates that are turned": FORGETS.replace("Sigmoid", "HardSigmoid"),
    "a clipped cell state": LSTM.replace(
        "c_next = Add fc ig", "cs = Add fc ig\nc_next = Clip cs low high"
    ),
    "a clip of c alone": LSTM.replace(
        "squashed = Tanh c_next", "cc = Clip c_next low high\nsquashed = Tanh cc"
    ),
    "a peephole at the state before in o": PEEP.replace("Mul p_o c_next", "Mul p_o c0"),
    "a peephole that mixes units": PEEP.replace("Mul c0 p_i", "MatMul c0 dense"),
    "a peephole in g": PEEP.replace("Tanh g", "Tanh pg").replace(
        "g_ =", "gc = Mul c0 p_i\npg = Add g gc\ng_ ="
    ),
    "a tanh after the projection": PROJECTED.replace(
        "h_next = MatMul m R", "q = MatMul m R\nh_next = Tanh q"
    ),
    "a bias after the projection": PROJECTED.replace(
        "h_next = MatMul m R", "q = MatMul m R\nh_next = Add q p"
    ),
}


@pytest.mark.parametrize("how", FAR)
def test_what_no_lstm_has_stays_traced(how):
    stored = extras(0, 3 if "projection" in how else None)
    P = 3 if "projection" in how else H
    after = ("h_next", "c_next")
    cell = step(FAR[how], stored, states=("h", "c0"), after=after, shapes={"h": (1, P)})
    cells.step(cell, torch.zeros(2, P + H).double(), torch.zeros(2, INPUTS).double())
    assert recognise(cell) is None


NEAR = {
    "a swapped sign": ("Add fc ig", "Sub fc ig"),
    "an extra tanh": ("h_next = Mul o_ squashed", "h_ = Mul o_ squashed\nh_next = Tanh h_"),
    "gates of two kinds": ("Sigmoid f", "HardSigmoid f"),
    "a clipped cell state": ("Tanh c_next", "Tanh fc"),
    "an output gate that reads c": ("Sigmoid o", "Sigmoid oc"),
    "a leak": ("h_next = Mul o_ squashed", "h_ = Mul o_ squashed\nh_next = Add h_ h"),
}


@pytest.mark.parametrize("change", NEAR)
def test_near_misses_stay_traced(change):
    text = LSTM.replace(*NEAR[change])
    text = text.replace("o_ =", "oc = Add o c0\no_ =", 1)
    cell = lstm(text=text)
    cells.step(cell, torch.zeros(2, 2 * H).double(), torch.zeros(2, INPUTS).double())
    assert recognise(cell) is None


def test_a_candidate_whose_units_are_permuted_is_an_lstm_with_permuted_rows():
    text = LSTM.replace("g_ = Tanh g", "gg = Gather g turned; axis:1\ng_ = Tanh gg")
    order = torch.tensor([1, 0, 2, 3])
    cell = step(
        text,
        {**weights(0, 4), "turned": order},
        states=("h", "c0"),
        after=("h_next", "c_next"),
    )
    part = known(cell)
    assert torch.equal(part.cell.W.chunk(4)[2], cell.constants["W"].T.chunk(4)[2][order])
    agrees(cell, part)


def test_a_masked_step_stays_traced():
    text = (
        LSTM.replace("h_next =", "hh =")
        .replace("c_next =", "cc =")
        .replace("Tanh c_next", "Tanh cc")
    )
    text += "m = Greater x zero\nm1 = Slice m from to axis\nh_next = Where m1 hh h\n"
    text += "c_next = Where m1 cc c0"
    extra = {"zero": torch.zeros((), dtype=torch.float64), "from": [0], "to": [1], "axis": [1]}
    cell = step(text, {**weights(0, 4), **extra}, states=("h", "c0"), after=("h_next", "c_next"))
    assert recognise(cell) is None


def test_a_product_of_two_stored_matrices_is_no_exact_weight():
    text = "xw = Gemm x W b\nhv = MatMul h U\nhu = MatMul hv U\na = Add xw hu\nh_next = Tanh a"
    assert recognise(step(text, weights(3, 1))) is None


def test_a_rounded_bias_is_told():
    stored = weights(0, 1) | {"tiny": torch.full((H,), 2.0**-80, dtype=torch.float64)}
    text = "xw = Gemm x W b\nhu = MatMul h U\na_ = Add xw hu\na = Add a_ tiny\nh_next = Tanh a"
    assert known(step(text, stored)).rounded
    assert not known(step(text.replace("tiny", "c"), stored)).rounded


def test_cells_that_feed_one_another_are_taken_apart():
    first = GRU + BLENDS["n + z (h − n)"]
    names = {"x": "h_next", "h": "k", "h_next": "k_next", "W": "V", "U": "R", "b": "e"}
    second = "\n".join(
        " ".join(names.get(word, word) for word in line.split()) for line in LSTM.splitlines()
    )
    deep = weights(5, 4, inputs=H)
    stored = weights(4, 3) | {"V": deep["W"], "R": deep["U"], "e": deep["b"]}
    cell = step(
        first + "\n" + second,
        stored,
        states=("k", "c0", "h"),
        after=("k_next", "c_next", "h_next"),
        outputs=3,
    )
    parts = recognise(cell)
    assert [(p.cell.kind, p.reads, p.cell.input_size) for p in parts] == [
        ("gru", None, INPUTS),
        ("lstm", 0, H),
    ]
    assert parts[0].state == tuple(range(2 * H, 3 * H))


# --- in a graph -------------------------------------------------------------------------------

STEPS = 24


def loop_lstm(*, steps=STEPS, first=0, stop=STEPS, last_only=False):
    """Write an LSTM as tf2onnx does: a Loop with a counter, a condition, captured weights."""
    lines = [line.split(" = ") for line in LSTM.strip().splitlines()]
    inner = []
    for left, right in lines:
        call, _, attributes = right.partition(";")
        kind, *names = call.split()
        given_ = {k: int(v) for k, v in (a.split(":") for a in attributes.split())}
        inner.append(op(kind, " ".join(names), left, **given_))
    body = graph(
        [
            op("Gather", "X t", "x", axis=0),
            *inner,
            op("Add", "t one", "t_next"),
            op("Less", "t_next stop", "more"),
            op("Identity", "h_next", "y"),
        ],
        [
            info("number", [], INT64),
            info("go", [], BOOL),
            info("t", [], INT64),
            info("h", ["N", H]),
            info("c0", ["N", H]),
        ],
        [
            info("more", [], BOOL),
            info("t_next", [], INT64),
            info("h_next", ["N", H]),
            info("c_next", ["N", H]),
            info("y", ["N", H]),
        ],
        {"one": np.array(1), "stop": np.array(stop)},
    )
    outputs = [info("h_last", ["N", H]), info("c_last", ["N", H])]
    tail = [] if last_only else [op("Tanh", "Y", "Z")]
    nodes = [
        op("Loop", "trips yes from z z", "t_last h_last c_last Y", name="while", body=body),
        *tail,
    ]
    stored = {k: v.float().numpy() for k, v in weights(0, 4).items() if k in "WUb"}
    return model(
        nodes,
        [info("X", [steps, 2, INPUTS])],
        outputs if last_only else [info("Z", [steps, 2, H]), *outputs],
        {
            **stored,
            "trips": np.array(STEPS),
            "yes": np.array(True),
            "from": np.array(first),
            "z": np.zeros((2, H), np.float32),
        },
    )


@pytest.mark.parametrize("form", [Form("window"), Form("chunk", 5), Form("chunk", 5, True)])
def test_a_loop_is_replaced_by_each_form(tmp_path, form):
    proto = loop_lstm()
    found = read(tmp_path, proto)
    assert only(found).cell.kind == "lstm"
    assert not export.obstacles(found, streaming=False)
    assert "exactly an LSTM" in found.findings[0].message
    x = draw(STEPS, 2, INPUTS)
    wanted = runtime(proto, {"X": x})
    cut = ir.to_proto(export.truncate_graph(found, {"while[0]": STEPS}, {"while[0]": form}))
    onnx.checker.check_model(cut, full_check=True)
    assert not [node for node in cut.graph.node if node.op_type == "Loop"]
    assert [node.op_type for node in cut.graph.node][-1] == "Tanh"
    for a, b in zip(wanted, runtime(cut, {"X": x}), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_loop_is_measured_on_data_and_over_all_the_steps_that_its_graph_fixes(tmp_path):
    path = tmp_path / "loop.onnx"
    onnx.save(loop_lstm(), path)
    data = np.asarray(draw(6, STEPS, INPUTS), np.float64)
    report = api.truncate(path, tmp_path / "cut.onnx", data=data, eps=1e-6, time_budget=5.0)
    (each,) = report.recurrences
    (measured,) = [d.measured for d in each.depths if d.eps == 1e-6]
    assert STEPS / 2 < measured.k <= STEPS  # more than half of any longer sequence would show
    assert (measured.sequences, measured.synthetic) == (6, False)
    assert report.export is not None
    assert report.equivalence.passed
    # The graph takes two rows: each of the six sequences is one of them.
    assert report.equivalence.left_out == ()
    known = {f.id for f in report.findings}
    assert not known & {"RA202", "RA204", "RA305"}


def test_a_truncated_loop_forgets_what_lies_before_its_depth(tmp_path):
    found = read(tmp_path, loop_lstm())
    cut = ir.to_proto(export.truncate_graph(found, {"while[0]": 3}))
    x = draw(STEPS, 2, INPUTS)
    far = np.concatenate([np.zeros_like(x[:-3]), x[-3:]])
    session = onnxruntime.InferenceSession(cut.SerializeToString())
    for a, b in zip(
        session.run(None, {"X": x})[1:], session.run(None, {"X": far})[1:], strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "change", [{"steps": STEPS + 1}, {"first": 1, "steps": STEPS + 1}, {"stop": 7}]
)
def test_a_loop_that_skips_entries_stays(tmp_path, change):
    found = read(tmp_path, loop_lstm(**change))
    assert only(found).cell.kind == "lstm"
    (reason,) = export.obstacles(found, streaming=False).values()
    assert "one step for every entry" in reason


def test_a_loop_inside_a_branch_is_read(tmp_path):
    proto = loop_lstm(last_only=True)
    outputs = [info("h_last", [2, H])]
    branch = graph([proto.graph.node[0]], [], outputs, name="then")
    other = graph([op("Identity", "z", "zeros")], [], [info("zeros", [2, H])], name="else")
    nodes = [op("If", "which", "result", name="pick", then_branch=branch, else_branch=other)]
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    inputs = [info("X", [STEPS, 2, INPUTS]), info("which", [], BOOL)]
    whole = model(nodes, inputs, [info("result", [2, H])], stored)
    onnx.checker.check_model(whole)
    found = read(tmp_path, whole)
    recurrence = only(found)
    assert (recurrence.label, recurrence.cell.kind) == ("pick[then]/while[0]", "lstm")
    cut = ir.to_proto(export.truncate_graph(found, {recurrence.label: STEPS}))
    feeds = {"X": draw(STEPS, 2, INPUTS), "which": np.array(True)}
    np.testing.assert_allclose(runtime(whole, feeds)[0], runtime(cut, feeds)[0], atol=1e-6)


def test_a_report_suggests_no_truncation_where_no_node_can_be_replaced():
    report = by_hand.STABLE
    traced = [replace(r, cell="traced") for r in report.recurrences]
    assert wording.next_command(report)[0][:2] == ("rnnaudit", "truncate")
    assert wording.next_command(replace(report, recurrences=tuple(traced))) == (None, "")
