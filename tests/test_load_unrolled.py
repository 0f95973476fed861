"""Steps written out one by one are one recurrence, as ONNX Runtime computes it, or refused."""

from __future__ import annotations

import io
import re

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from torch import nn

from rnnaudit import cells
from rnnaudit.errors import UnsupportedModelError
from rnnaudit.model import GRUCell, LSTMCell
from tests.test_load_traced import draw, info, model, only, op, read, runtime

STEPS, INPUTS, H = 50, 3, 4

LSTM = """
u{t} = MatMul x{t} W{l}
v{t} = MatMul h{t} U{l}
uv{t} = Add u{t} v{t}
a{t} = Add uv{t} b{l}
i{t} f{t} g{t} o{t} = Split a{t}; axis:1
I{t} = Sigmoid i{t}
F{t} = Sigmoid f{t}
G{t} = Tanh g{t}
O{t} = Sigmoid o{t}
fc{t} = Mul F{t} c{t}
ig{t} = Mul I{t} G{t}
c{n} = Add fc{t} ig{t}
s{t} = Tanh c{n}
h{n} = Mul O{t} s{t}
"""

JOINED = LSTM.replace("u{t} = MatMul x{t} W{l}\n", "xh{t} = Concat x{t} h{t}; axis:1\n").replace(
    "v{t} = MatMul h{t} U{l}\nuv{t} = Add u{t} v{t}", "uv{t} = MatMul xh{t} WU{l}"
)

FOUR = (
    "".join(
        f"u{k}{{t}} = MatMul x{{t}} W{k}{{l}}\nv{k}{{t}} = MatMul h{{t}} U{k}{{l}}\n"
        f"{k}{{t}} = Add u{k}{{t}} v{k}{{t}}\n"
        for k in "ifgo"
    )
    + LSTM[LSTM.index("I{t}") :]
)

RESET_BEFORE = """
ur{t} = MatMul x{t} Wi{l}
vr{t} = MatMul h{t} Ui{l}
ar{t} = Add ur{t} vr{t}
r{t} = Sigmoid ar{t}
uz{t} = MatMul x{t} Wf{l}
vz{t} = MatMul h{t} Uf{l}
az{t} = Add uz{t} vz{t}
z{t} = Sigmoid az{t}
rh{t} = Mul r{t} h{t}
un{t} = MatMul x{t} Wg{l}
vn{t} = MatMul rh{t} Ug{l}
an{t} = Add un{t} vn{t}
n_{t} = Tanh an{t}
y{t} = Sub one z{t}
yn{t} = Mul y{t} n_{t}
zh{t} = Mul z{t} h{t}
h{n} = Add yn{t} zh{t}
"""

RESET_AFTER = RESET_BEFORE.replace("rh{t} = Mul r{t} h{t}\n", "").replace(
    "vn{t} = MatMul rh{t} Ug{l}", "q{t} = MatMul h{t} Ug{l}\nvn{t} = Mul r{t} q{t}"
)

COUPLED = """
p{t} = MatMul h{t} Ui{l}
q{t} = MatMul c{t} Uf{l}
u{t} = MatMul x{t} Wi{l}
a{t} = Sum p{t} q{t} u{t}
h{n} = Tanh a{t}
d{t} = MatMul h{t} Ug{l}
e{t} = MatMul c{t} Uo{l}
s{t} = Add d{t} e{t}
c{n} = Sin s{t}
"""


def stored(layer=0, inputs=INPUTS):
    l = str(layer)  # noqa: E741
    W, U = draw(inputs, 4 * H, seed=layer), draw(H, 4 * H, seed=9 + layer)
    parts = zip("ifgo", np.split(W, 4, axis=1), np.split(U, 4, axis=1), strict=True)
    each = {name + k + l: part for k, w, u in parts for name, part in (("W", w), ("U", u))}
    zeros = np.zeros((1, H), np.float32)
    return {
        **each,
        "W" + l: W,
        "U" + l: U,
        "WU" + l: np.concatenate([W, U]),
        "b" + l: draw(4 * H, seed=layer),
        "one": np.array(1, np.float32),
        f"h0_{l}": zeros,
        f"c0_{l}": zeros,
    }


def written(text, t, layer, x):
    """Write one step of a layer, its names made unlike those of the other layers."""
    n = t + 1
    fixed = {"one", *(f"{w}{layer}" for w in ("W", "U", "b", "WU"))}
    fixed |= {f"{w}{k}{layer}" for w in "WU" for k in "ifgo"}
    names = {f"x{t}": x, f"h{t}": f"h{t}_{layer}", f"c{t}": f"c{t}_{layer}"}
    nodes = []
    for line in text.format(t=t, n=n, l=layer).strip().splitlines():
        left, right = line.split(" = ")
        call, _, attributes = right.partition(";")
        kind, *given = call.split()
        settings = {k: int(v) for k, v in (a.split(":") for a in attributes.split())}
        inputs = [v if v in fixed else names.get(v, f"{v}_{layer}") for v in given]
        nodes.append(
            op(kind, " ".join(inputs), " ".join(f"{v}_{layer}" for v in left.split()), **settings)
        )
    return nodes


def pick(way, t, axis, steps):
    """Cut entry t out of X, as exporters do."""
    if way == "Gather":
        return [op("Gather", f"X t{t}", f"e{t}", axis=axis)]
    if way == "Gather and Squeeze":
        return [op("Gather", f"X r{t}", f"k{t}", axis=axis), op("Squeeze", f"k{t} along", f"e{t}")]
    if way == "Slice":
        cut = op("Slice", f"X r{t} r{t + 1} along", f"k{t}")
        return [cut, op("Squeeze", f"k{t} along", f"e{t}")]
    if way == "Slice of every axis":
        cut = op("Slice", f"X from{t} to{t}", f"k{t}")
        return [cut, op("Squeeze", f"k{t} along", f"e{t}")]
    if way == "Split":
        first = [op("Split", "X", " ".join(f"k{i}" for i in range(steps)), axis=axis)]
        return (first if t == 0 else []) + [op("Squeeze", f"k{t} along", f"e{t}")]
    first = [op("SplitToSequence", "X", "entries", axis=axis, keepdims=0)]
    return (first if t == 0 else []) + [op("SequenceAt", f"entries t{t}", f"e{t}")]


def unrolled(text, *, way="Gather", axis=0, steps=STEPS, layers=(), change=None, backwards=False):
    """Unroll a step over a fixed time, further layers reading what the one before gives."""
    nodes, stack = [], [text, *layers]
    constants = {"along": np.array([axis])}
    shape = ["N", INPUTS]
    shape.insert(axis, steps)
    for layer in range(len(stack)):
        constants |= stored(layer, H if layer else INPUTS)
    for t in range(steps + 1):
        constants |= {f"t{t}": np.array(t), f"r{t}": np.array([t])}
        ends = [99, 99, 99]
        ends[axis] = t + 1
        starts = [0, 0, 0]
        starts[axis] = t
        constants |= {
            f"from{t}": np.array(starts),
            f"to{t}": np.array([2**62 if e == 99 else e for e in ends]),
        }
    cuts = [node for t in range(steps) for node in pick(way, t, axis, steps)]
    for t in range(steps):
        x = f"e{steps - 1 - t if backwards else t}"
        for layer, each in enumerate(stack):
            nodes += written(each, t, layer, x)
            x = f"h{t + 1}_{layer}"
    if change is not None:
        change(nodes, constants)
    last = f"h{steps}_{len(stack) - 1}"
    return model(cuts + nodes, [info("X", shape)], [info(last, ["N", H])], constants)


def agrees(proto, found, axis=0, rows=2):
    """Whether the recurrences, one after another, end where ONNX Runtime does."""
    X = draw(*([STEPS, rows] if axis == 0 else [rows, STEPS]), INPUTS, scale=1)
    (last,) = runtime(proto, {"X": X})
    x = torch.as_tensor(X if axis else X.swapaxes(0, 1), dtype=torch.float64)
    for recurrence in found.recurrences():
        x = cells.run(recurrence, x)
    at = 0 if recurrence.direction == "reverse" else -1
    assert np.abs(x[:, at].numpy() - last).max() < 1e-5


WAYS = ["Gather", "Gather and Squeeze", "Slice", "Slice of every axis", "Split", "SequenceAt"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("axis", [0, 1])
def test_however_entries_are_cut_out_an_unrolled_lstm_is_one(tmp_path, way, axis):
    proto = unrolled(LSTM, way=way, axis=axis)
    onnx.checker.check_model(proto)
    found = read(tmp_path, proto)
    recurrence = only(found)
    weights = stored()
    assert isinstance(recurrence.cell, LSTMCell)
    assert recurrence.initial.source == "zero"
    assert torch.equal(recurrence.cell.U, torch.from_numpy(weights["U0"].T).double())
    assert torch.equal(recurrence.cell.W, torch.from_numpy(weights["W0"].T).double())
    (reading,) = found.stacks[0].layers[0].site.reads
    assert (reading.value, reading.time, reading.batch) == ("X", axis, 1 - axis)
    assert not found.skipped
    agrees(proto, found, axis)


CELLS = {
    "one product with input and state": (JOINED, LSTMCell),
    "a matrix for each gate": (FOUR, LSTMCell),
    "a GRU that resets before": (RESET_BEFORE, GRUCell),
    "a GRU that resets after": (RESET_AFTER, GRUCell),
}


@pytest.mark.parametrize("how", CELLS)
def test_the_cell_is_recognised_however_its_step_is_written(tmp_path, how):
    text, kind = CELLS[how]
    proto = unrolled(text)
    found = read(tmp_path, proto)
    assert isinstance(only(found).cell, kind)
    assert not found.skipped
    agrees(proto, found, rows=1)


def test_states_that_need_one_another_are_one_state(tmp_path):
    proto = unrolled(COUPLED)
    found = read(tmp_path, proto)
    assert (only(found).cell.kind, only(found).cell.state_size) == ("traced", 2 * H)
    agrees(proto, found)


@pytest.mark.parametrize("second", [LSTM, RESET_BEFORE])
def test_unrolled_layers_that_feed_one_another_are_a_stack(tmp_path, second):
    proto = unrolled(LSTM, layers=(second,))
    found = read(tmp_path, proto)
    (stack,) = found.stacks
    kinds = ["lstm", "lstm" if second is LSTM else "gru"]
    assert [r.cell.kind for r in stack.recurrences()] == kinds
    assert not found.skipped
    agrees(proto, found)


def test_an_unrolled_recurrence_may_run_backwards(tmp_path):
    proto = unrolled(LSTM, backwards=True)
    found = read(tmp_path, proto)
    assert only(found).direction == "reverse"
    agrees(proto, found)


END = 2**62
BOUNDS = {
    "from the front": (lambda t: (t, t + 1), STEPS, "zero"),
    "from the end": (lambda t: (t - STEPS, t - STEPS + 1 or END), "T", "zero"),
    "from the end, to the length": (lambda t: (t - STEPS, t - STEPS + 1 or STEPS), STEPS, "zero"),
    "up to 0, which takes nothing": (lambda t: (t - STEPS + 1, t - STEPS + 2), "T", "refused"),
    "past the end": (lambda t: (t + 2, t + 3), STEPS, "refused"),
    "before the front": (lambda t: (t - STEPS - 1, t - STEPS), STEPS, "computed"),
    "from the last on to the first": (lambda t: (t - 1, t or END), "T", "computed"),
    "two at once": (lambda t: (t, t + 2), STEPS, "refused"),
}
"""Bounds at step t, the sequence's length, and what its state starts from: a first step that
is unlike the others computes it."""


@pytest.mark.parametrize("how", BOUNDS)
def test_slices_are_entries_where_each_takes_one_next_to_the_one_before(tmp_path, how):
    bounds, length, start = BOUNDS[how]
    proto = unrolled(LSTM, way="Slice")
    proto.graph.input[0].CopyFrom(info("X", [length, "N", INPUTS]))
    cuts = [node for node in proto.graph.node if node.op_type == "Slice"]
    for t, node in enumerate(cuts):
        for i, number in enumerate(bounds(t), 1):
            node.input[i] = f"bound{t}_{i}"
            kept = numpy_helper.from_array(np.array([number]), node.input[i])
            proto.graph.initializer.append(kept)
    found = read(tmp_path, proto)
    if start == "refused":
        assert found.skipped
        return
    assert only(found).initial.source == start
    if start == "zero":
        agrees(proto, found)


def test_slices_along_an_axis_that_only_the_caller_knows_are_no_entries(tmp_path):
    proto = unrolled(LSTM, way="Slice")
    proto.graph.input.append(info("axis", [1], TensorProto.INT64))
    for node in proto.graph.node:
        if node.op_type == "Slice":
            node.input[3] = "axis"
    assert read(tmp_path, proto).skipped


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_of_every_axis_are_entries_of_one_sequence_of_a_fixed_batch_too(tmp_path, axis):
    proto = unrolled(LSTM, way="Slice of every axis", axis=axis)
    shape = [1, INPUTS]
    shape.insert(axis, STEPS)
    proto.graph.input[0].CopyFrom(info("X", shape))
    found = read(tmp_path, proto)
    assert not found.skipped
    agrees(proto, found, axis, rows=1)


# --- steps that are not alike -----------------------------------------------------------------


def _node(nodes, name):
    return next(node for node in nodes if name in node.output)


def _swap_gates(nodes, _):
    node = _node(nodes, "i7_0")
    node.output[0], node.output[1] = node.output[1], node.output[0]


def _other_constant(nodes, constants):
    constants["other"] = 2 * constants["b0"]
    _node(nodes, "a7_0").input[1] = "other"


def _other_kind(nodes, _):
    _node(nodes, "G7_0").op_type = "Sigmoid"


def _earlier_cell(nodes, _):
    _node(nodes, "fc7_0").input[1] = "c6_0"


def _every_second(nodes, _):
    _node(nodes, "u7_0").input[0] = "e8"


CHANGES = {
    "gates change places": (_swap_gates, "'I6_0' is made|'i6_0' is made|'f6_0' is made"),
    "another constant": (_other_constant, "differ in the constant 'b0'"),
    "another activation": (_other_kind, "differ in how 'G6_0' is made"),
    "a state of the step before last": (_earlier_cell, "differ in which states"),
    "an entry is left out": (_every_second, "reads 'X' in an order that is not followed"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_one_step_that_is_unlike_the_others_is_no_recurrence(tmp_path, how):
    change, reason = CHANGES[how]
    found = read(tmp_path, unrolled(LSTM, steps=12, change=change))
    assert not list(found.recurrences())
    (skipped,) = found.skipped
    assert skipped.where == "U0"
    assert re.search(reason, skipped.reason), skipped.reason


@given(
    text=st.sampled_from([LSTM, FOUR, RESET_BEFORE, RESET_AFTER]),
    at=st.integers(1, 5),
    which=st.integers(0, 100),
    other=st.integers(0, 500),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_step_that_is_changed_is_refused_or_read_as_it_is(tmp_path, text, at, which, other):
    def change(nodes, _):
        """Let one input of one step be some other value that is there before."""
        own = [i for i, node in enumerate(nodes) if f"{at}_0" in node.output[0]]
        i = own[which % len(own)]
        values = ["h0_0", f"e{at}", *(name for node in nodes[:i] for name in node.output)]
        nodes[i].input[0] = values[other % len(values)]

    proto = unrolled(text, steps=8, change=change)
    proto.graph.output.append(info("h7_0", ["N", H]))
    X = draw(8, 1, INPUTS, scale=1)
    try:
        wanted = runtime(proto, {"X": X})[1]
    except Exception:  # the change may not run
        return
    try:
        found = list(read(tmp_path, proto).recurrences())
    except UnsupportedModelError:  # the changed step needs none before it: nothing is carried on
        return
    for recurrence in found:
        if recurrence.initial.source == "computed":
            continue  # from its second step on
        x = torch.as_tensor(X.swapaxes(0, 1), dtype=torch.float64)
        assert np.abs(cells.run(recurrence, x)[:, 6].numpy() - wanted).max() < 1e-5


def test_settings_that_are_tensors_are_compared(tmp_path):
    def fill(nodes, constants):
        constants["size"] = np.array([1])
        for t in range(12):
            value = onnx.helper.make_tensor("v", 1, [1], [2.0 if t == 7 else 1.0])
            nodes.insert(0, op("ConstantOfShape", "size", f"ones{t}", value=value))
            squash = _node(nodes, f"s{t}_0")
            nodes.insert(nodes.index(squash), op("Mul", f"c{t + 1}_0 ones{t}", f"w{t}"))
            squash.input[0] = f"w{t}"

    found = read(tmp_path, unrolled(LSTM, steps=12, change=fill))
    assert not list(found.recurrences())
    assert "differ in the constant 'ones" in found.skipped[0].reason


def test_unrolled_steps_that_mix_the_sequences_of_a_batch_are_refused(tmp_path):
    def mix(nodes, constants):
        constants |= {"back": np.array([-1]), "end": np.array([-99]), "first": np.array([0])}
        for t in range(12):
            product = _node(nodes, f"v{t}_0")
            turned = op("Slice", f"h{t}_0 back end first back", f"turned{t}")
            nodes.insert(nodes.index(product), turned)
            product.input[0] = f"turned{t}"

    proto = unrolled(LSTM, steps=12, change=mix)
    found = read(tmp_path, proto)
    assert not list(found.recurrences())
    assert "mixes the sequences of a batch" in found.skipped[0].reason


# --- what PyTorch exports ---------------------------------------------------------------------


class Unrolled(nn.Module):
    """Cells called in a Python loop, which a trace writes out."""

    def __init__(self, cut):
        super().__init__()
        self.first, self.second, self.cut = nn.LSTMCell(INPUTS, H), nn.GRUCell(H, H), cut

    def forward(self, x):
        h = c = k = x.new_zeros(x.shape[1], H)
        for entry in x.unbind(0) if self.cut == "unbind" else (x[t] for t in range(len(x))):
            h, c = self.first(entry, (h, c))
            k = self.second(h, k)
        return k


@pytest.mark.parametrize("cut", ["unbind", "index"])
@pytest.mark.filterwarnings("ignore")
def test_cells_that_pytorch_traces_in_a_loop_are_a_stack(tmp_path, cut):
    torch.manual_seed(0)
    module, file = Unrolled(cut).eval(), io.BytesIO()
    torch.onnx.export(
        module, (torch.zeros(STEPS, 2, INPUTS),), file, dynamo=False, opset_version=17
    )
    proto = onnx.load_from_string(file.getvalue())
    found = read(tmp_path, proto)
    (stack,) = found.stacks
    lstm, gru = stack.recurrences()
    assert torch.equal(lstm.cell.U.chunk(4)[0], module.first.weight_hh.double().chunk(4)[0])
    assert torch.equal(gru.cell.U, module.second.weight_hh.double())
    X = draw(STEPS, 2, INPUTS, scale=1)
    (last,) = runtime(proto, {proto.graph.input[0].name: X})
    x = torch.as_tensor(X.swapaxes(0, 1), dtype=torch.float64)
    ours = cells.run(gru, cells.run(lstm, x))
    assert np.abs(ours[:, -1].numpy() - last).max() < 1e-5


class ByHand(nn.Module):
    """An LSTM with peepholes and a projection, its gates cut by ``chunk``."""

    def __init__(self):
        super().__init__()
        self.W, self.R = nn.Linear(INPUTS + H, 4 * H), nn.Linear(H, H, bias=False)
        self.p = nn.Parameter(torch.randn(3, H))

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], H)
        for t in range(x.shape[1]):
            i, f, g, o = self.W(torch.cat([x[:, t], h], 1)).chunk(4, 1)
            i, f = torch.sigmoid(i + self.p[0] * c), torch.sigmoid(f + self.p[1] * c)
            c = f * c + i * torch.tanh(g)
            h = self.R(torch.sigmoid(o + self.p[2] * c) * torch.tanh(c))
        return h


@pytest.mark.parametrize("rows", [None, {0: "N"}])
@pytest.mark.filterwarnings("ignore")
def test_shapes_that_no_export_declares_follow_from_the_operators(tmp_path, rows):
    torch.manual_seed(0)
    module, file = ByHand().eval(), io.BytesIO()
    settings_ = {"input_names": ["x"], "dynamic_axes": rows and {"x": rows}}
    x = torch.zeros(2, STEPS, INPUTS)
    torch.onnx.export(module, (x,), file, dynamo=False, opset_version=17, **settings_)
    proto = onnx.load_from_string(file.getvalue())
    found = read(tmp_path, proto)
    recurrence = only(found)
    assert not found.skipped
    assert isinstance(recurrence.cell, LSTMCell)
    assert torch.equal(recurrence.cell.peephole, module.p.double())
    assert torch.equal(recurrence.cell.projection, module.R.weight.double())
    if recurrence.initial.source == "zero":
        X = draw(2, STEPS, INPUTS, scale=1)
        (last,) = runtime(proto, {"x": X})
        ours = cells.run(recurrence, torch.as_tensor(X, dtype=torch.float64))[:, -1]
        assert np.abs(ours.numpy() - last).max() < 1e-5
    else:  # the export folded the zeros of the first step into constants
        assert "RA115" in {each.id for each in found.findings}
