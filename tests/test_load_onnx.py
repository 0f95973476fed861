"""What is read from an ONNX file is what ONNX Runtime computes, or is refused by name."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from rnnaudit import api, cells, export
from rnnaudit.cli.app import main
from rnnaudit.errors import LoadError, UnsupportedModelError
from rnnaudit.loaders import load
from rnnaudit.loaders.onnx import LOADER
from rnnaudit.model import ElmanCell, GRUCell, LSTMCell, fingerprint

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
USES = {"RNN": 1, "GRU": 2, "LSTM": 3}
ALPHA = {"LeakyRelu", "ThresholdedRelu", "Elu", "HardSigmoid", "Affine", "ScaledTanh"}
BETA = {"HardSigmoid", "Affine", "ScaledTanh"}
FUNCTIONS = ["Tanh", "Relu", "Sigmoid", "Softsign", "Softplus", *sorted(ALPHA)]


# --- building models --------------------------------------------------------------------------


def model(nodes, inputs, outputs, constants=None, *, opset=17, functions=()):
    """Make a model; inputs and outputs are name: shape (or name: (shape, type))."""

    def info(name, shape):
        shape, kind = shape if isinstance(shape, tuple) else (shape, TensorProto.FLOAT)
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        nodes,
        "g",
        [info(*item) for item in inputs.items()],
        [info(*item) for item in outputs.items()],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()],
    )
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(f.domain, 1) for f in functions]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, functions=functions)


def weights(op, directions=1, *, inputs=3, hidden=4, seed=0, scale=0.6, dtype=np.float32):
    rng = np.random.default_rng(seed)
    gates = GATES[op]

    def draw(*shape):
        return rng.normal(scale=scale, size=shape).astype(dtype)

    return {
        "W": draw(directions, gates * hidden, inputs),
        "R": draw(directions, gates * hidden, hidden),
        "B": draw(directions, 2 * gates * hidden),
        "P": draw(directions, 3 * hidden),
        "h0": draw(directions, 1, hidden),
        "c0": draw(directions, 1, hidden),
    }


def one_node(op="LSTM", inputs=("X", "W", "R", "B"), constants=None, opset=17, **attributes):
    """Make a model of one recurrent node with its Y as the output."""
    attributes.setdefault("hidden_size", 4)
    inputs = list(inputs)
    while not inputs[-1]:
        inputs.pop()
    constants = weights(op) if constants is None else constants
    used = {name: constants[name] for name in inputs if name in constants}
    shapes = {"X": ["T", "N", 3], "h0": [1, "N", 4], "c0": [1, "N", 4]}
    node = helper.make_node(op, inputs, ["Y"], name="cell", **attributes)
    free = [n for n in inputs if n in shapes and n not in used]
    return model([node], {n: shapes[n] for n in free}, {"Y": ["T", "D", "N", 4]}, used, opset=opset)


def saved(tmp_path, proto, name="m.onnx"):
    path = tmp_path / name
    path.write_bytes(proto.SerializeToString())
    return path


def read(tmp_path, proto):
    return load(saved(tmp_path, proto))


def runtime_outputs(proto, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def inputs(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def check_layer(layer, proto, x, tolerance=1e-5):
    """Compare our float64 run with the first output of ONNX Runtime, Y [T, D, N, H]."""
    ours = cells.run_layer(layer, torch.from_numpy(x).double().transpose(0, 1))
    (y, *_) = runtime_outputs(proto, {"X": x})
    theirs = torch.from_numpy(y).permute(2, 0, 1, 3).flatten(2).double()
    assert (ours - theirs).abs().max() <= tolerance * (1 + theirs.abs().max())


# --- one node ---------------------------------------------------------------------------------


@st.composite
def nodes(draw):
    """Draw a node with every attribute and optional input that its operator has."""
    op = draw(st.sampled_from(sorted(GATES)))
    direction = draw(st.sampled_from(["forward", "reverse", "bidirectional"]))
    directions = 1 + (direction == "bidirectional")
    opset = draw(st.integers(7, 24))
    attributes = {"direction": direction, "hidden_size": 4}
    if draw(st.booleans()):
        attributes["activations"] = draw(
            st.lists(
                st.sampled_from(FUNCTIONS),
                min_size=USES[op] * directions,
                max_size=USES[op] * directions,
            )
        )
        takes_alpha = sum(a in ALPHA for a in attributes["activations"])
        takes_beta = sum(a in BETA for a in attributes["activations"])
        # Fewer values than there are functions that take one: the defaults fill in.
        some = st.floats(0.125, 0.75, width=32)
        alphas = draw(st.lists(some, max_size=takes_alpha))
        betas = draw(st.lists(some, max_size=takes_beta))
        if alphas:
            attributes["activation_alpha"] = alphas
        if betas:
            attributes["activation_beta"] = betas
    if draw(st.booleans()):
        attributes["clip"] = draw(st.floats(0.25, 3.0, width=32))
    if op == "GRU":
        attributes["linear_before_reset"] = draw(st.integers(0, 1))
    if op == "LSTM":
        attributes["input_forget"] = draw(st.integers(0, 1))
    names = [draw(st.sampled_from([name, ""])) for name in ("B", "h0", "c0", "P")]
    given_ = ["X", "W", "R", names[0], "", names[1], *(names[2:] if op == "LSTM" else [])]
    constants = weights(op, directions, seed=draw(st.integers(0, 2**31)), scale=0.3)
    return op, given_, constants, opset, attributes


@settings(max_examples=120)
@given(node=nodes(), seed=st.integers(0, 2**31))
def test_a_node_is_read_as_onnx_runtime_runs_it(tmp_path_factory, node, seed):
    op, names, constants, opset, attributes = node
    proto = one_node(op, names, constants, opset, **attributes)
    found = read(tmp_path_factory.mktemp("node"), proto)
    (stack,), (layer,) = found.stacks, found.stacks[0].layers
    assert stack.name == "cell"
    assert found.whole
    check_layer(layer, proto, inputs(4, 1, 3, seed=seed))


@pytest.mark.parametrize("op", sorted(GATES))
def test_double_weights_are_kept_exactly(tmp_path, op):
    constants = weights(op, dtype=np.float64)
    node = helper.make_node(op, ["X", "W", "R", "B"], ["Y"], hidden_size=4)
    proto = model(
        [node],
        {"X": (["T", "N", 3], TensorProto.DOUBLE)},
        {"Y": (["T", 1, "N", 4], TensorProto.DOUBLE)},
        {k: constants[k] for k in "WRB"},
    )
    found = read(tmp_path, proto)
    assert found.dtype == "float64"
    cell = found.stacks[0].layers[0].recurrences[0].cell
    W = cell.U if isinstance(cell, ElmanCell) else cell.W
    assert set(W.flatten().tolist()) == set(constants["W"].ravel().tolist())


@pytest.mark.parametrize(
    ("kind", "name"), [(TensorProto.FLOAT16, "float16"), (TensorProto.BFLOAT16, "bfloat16")]
)
def test_half_precision_weights_convert_exactly(tmp_path, kind, name):
    stored = {k: helper.make_tensor(k, kind, v.shape, v.ravel()) for k, v in weights("GRU").items()}
    node = helper.make_node("GRU", ["X", "W", "R"], ["Y"], hidden_size=4)
    proto = model([node], {"X": (["T", "N", 3], kind)}, {"Y": (["T", 1, "N", 4], kind)}, opset=22)
    proto.graph.initializer.extend([stored["W"], stored["R"]])
    found = read(tmp_path, proto)
    assert found.dtype == name
    cell = found.stacks[0].layers[0].recurrences[0].cell
    wanted = numpy_helper.to_array(stored["R"]).astype(np.float64)[0]
    z, r, n = np.split(wanted, 3)  # ONNX: z, r, h
    np.testing.assert_array_equal(cell.U.numpy(), np.concatenate([r, z, n]))


def test_gates_are_reordered_and_biases_summed_only_where_that_is_exact(tmp_path):
    blocks = np.arange(4, dtype=np.float32)
    constants = {
        "W": np.repeat(blocks, 2).reshape(1, 8, 1) * np.ones((1, 8, 3), np.float32),
        "R": np.repeat(10 + blocks, 2).reshape(1, 8, 1) * np.ones((1, 8, 2), np.float32),
        "B": np.concatenate([np.repeat(blocks, 2), np.repeat(100 * blocks, 2)]).reshape(1, 16),
        "P": np.repeat(np.float32([1, 2, 3]), 2).reshape(1, 6),
    }
    node = helper.make_node("LSTM", ["X", "W", "R", "B", "", "", "", "P"], ["Y"], hidden_size=2)
    proto = model([node], {"X": ["T", "N", 3]}, {"Y": ["T", 1, "N", 2]}, constants)
    cell = read(tmp_path, proto).stacks[0].layers[0].recurrences[0].cell
    assert isinstance(cell, LSTMCell)
    assert cell.W[::2, 0].tolist() == [0, 2, 3, 1]  # i, o, f, c becomes i, f, g, o
    assert cell.U[::2, 0].tolist() == [10, 12, 13, 11]
    assert cell.b[::2].tolist() == [0, 202, 303, 101]
    assert cell.peephole[:, 0].tolist() == [1, 3, 2]  # i, o, f becomes i, f, o
    gru = read(tmp_path, one_node("GRU")).stacks[0].layers[0].recurrences[0].cell
    assert isinstance(gru, GRUCell)
    B = weights("GRU")["B"][0]
    np.testing.assert_array_equal(gru.b_recurrent[:4], B[12 + 4 : 12 + 8].astype(np.float64))
    np.testing.assert_array_equal(gru.b_input[8:], B[8:12].astype(np.float64))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 5}, "hidden_size is 5 and R has 4 columns"),
        ({"direction": "sideways"}, "direction must be one of forward, reverse, bidirectional"),
        ({"activations": ["Tanh"]}, r"must name 3 activations, got 1 \(Tanh\)"),
        ({"activations": ["Tanh", "Swish", "Tanh"]}, "activation 'Swish' is not one of ONNX's"),
        ({"clip": -1.0}, "clip must be a positive number, got -1"),
        ({"layout": 2}, "layout must be 0 or 1, got 2"),
        ({"output_sequence": 1}, "attribute 'output_sequence' is not one that LSTM has"),
        ({"hidden_size": "four"}, r"attribute 'hidden_size' has the wrong type \(STRING\)"),
        ({"opset": 1}, "LSTM of opset 1 is not read, only 7 and later"),
    ],
)
def test_what_is_not_understood_is_left_out_by_name(tmp_path, changes, reason):
    found = read(tmp_path, one_node("LSTM", **changes))
    assert found.stacks == ()
    (skipped,) = found.skipped
    assert skipped.where == "cell"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(skipped.reason)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("W", (1, 15, 3), r"W must have shape \(1, 16, inputs\), got \(1, 15, 3\)"),
        ("W", (1, 16, 0), "W must read at least 1 feature, got 0"),
        ("R", (2, 16, 4), r"R must have shape \(1, 4·hidden, hidden\), got \(2, 16, 4\)"),
        ("B", (1, 31), r"B must have shape \(1, 32\), got \(1, 31\)"),
        ("W", (1, 16, 2), "X has 3 features, W reads 2"),
    ],
)
def test_weights_of_a_wrong_shape_are_left_out_by_name(tmp_path, name, shape, reason):
    constants = {**weights("LSTM"), name: np.zeros(shape, np.float32)}
    (skipped,) = read(tmp_path, one_node("LSTM", constants=constants)).skipped
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(skipped.reason)


def test_weights_that_only_the_caller_has_are_asked_for(tmp_path):
    constants = weights("LSTM")
    node = helper.make_node("LSTM", ["X", "W", "R"], ["Y"], name="cell", hidden_size=4)
    proto = model(
        [node],
        {"X": ["T", "N", 3], "W": [1, 16, 3]},
        {"Y": ["T", 1, "N", 4]},
        {"R": constants["R"]},
    )
    (skipped,) = read(tmp_path, proto).skipped
    assert skipped.reason == (
        "LSTM: weights W are the graph input 'W': their values are not in the file; give them with "
        "--weights FILE, or store them as an initializer"
    )
    doubled = helper.make_node("Relu", ["R"], ["R2"], name="twice")
    node.input[2] = "R2"
    proto = model([doubled, node], {"X": ["T", "N", 3]}, {"Y": ["T", 1, "N", 4]}, constants)
    (skipped,) = read(tmp_path, proto).skipped
    assert "weights R ('R2') are computed by Relu, not stored" in skipped.reason


@pytest.fixture
def asking(tmp_path):
    """A file whose LSTM takes W and R as graph inputs, one that stores them, and their values."""
    constants = {name: weights("LSTM")[name] for name in ("W", "R")}
    stores = one_node("LSTM", ["X", "W", "R"], constants)
    asks = onnx.ModelProto.FromString(stores.SerializeToString())
    asks.ir_version = 3
    asks.opset_import[0].version = 7
    del asks.graph.initializer[:]
    for name, array in constants.items():
        asks.graph.input.append(helper.make_tensor_value_info(name, 1, ["a", *array.shape[1:]]))
    return saved(tmp_path, asks, "asks.onnx"), saved(tmp_path, stores, "stores.onnx"), constants


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_weights_that_are_given_are_those_of_the_graph(tmp_path, asking, suffix):
    asks, stores, constants = asking
    file = tmp_path / f"weights.{suffix}"
    np.savez(file, **constants) if suffix == "npz" else save_file(constants, file)
    found, wanted = load(asks, weights=file), load(stores)
    assert found.skipped == ()
    assert found.whole == wanted.whole
    [ours], [theirs] = ([fingerprint(r) for r in m.recurrences()] for m in (found, wanted))
    assert ours == theirs
    report = api.truncate(found, tmp_path / "small.onnx", depth=40, eps=1e-3)
    assert report.equivalence.passed
    assert report.equivalence.reference.startswith("the original in ONNX Runtime")
    x = inputs(50, 2, 3)
    small = onnx.load(tmp_path / "small.onnx")
    (cut,), (full,) = (runtime_outputs(m, {"X": x}) for m in (small, onnx.load(stores)))
    assert np.abs(cut - full).max() < 1e-3
    assert api.verify(found, stores, eps=1e-5).equivalence.passed


def test_weights_that_do_not_fit_are_refused_naming_the_input(tmp_path, asking):
    asks, stores, constants = asking
    file = tmp_path / "weights.npz"
    wrong = {
        r"holds 'w', which is none; the inputs are X, W, R": {"w": constants["W"]},
        r"'W' takes float of shape \('a', '16', '3'\), and .* holds float64 of": {
            "W": constants["W"].astype(np.float64)
        },
        r"holds float32 of shape \(1, 16, 4\)": {"W": constants["R"]},
        r"holds float32 of shape \(16,\)": {"W": constants["R"][0, :, 0]},
        r"R \('R'\) of LSTM node 'cell' holds NaN": constants | {"R": constants["R"] * np.nan},
    }
    for message, arrays in wrong.items():
        np.savez(file, **arrays)
        with pytest.raises(LoadError, match=message):
            load(asks, weights=file)
    np.savez(file, W=constants["W"])
    (skipped,) = load(asks, weights=file).skipped
    assert skipped.reason.startswith("LSTM: weights R are the graph input 'R'")
    np.savez(file, W=np.array([object()]))
    for other in (file, stores, tmp_path / "none.npz"):  # a pickle, no archive, nothing
        with pytest.raises(LoadError, match=r"must be arrays in a \.npz or \.safetensors file"):
            load(asks, weights=other)
    torch.save({"weight_hh": torch.ones(3, 3)}, tmp_path / "model.pt")
    with pytest.raises(LoadError, match=r"to graph inputs of an ONNX model, and .* is none"):
        load(tmp_path / "model.pt", weights=file)


def test_weights_are_given_on_the_command_line(tmp_path, asking, capsys, monkeypatch):
    asks, stores, constants = asking
    monkeypatch.chdir(tmp_path)
    np.savez("weights.npz", **constants)
    given_ = ["--weights", "weights.npz"]
    quick = ["--time-budget", "1", "-q"]
    assert main(["inspect", asks.name, *given_, *quick]) == 0
    assert main(["gate", asks.name, *given_, *quick, "--require", "any"]) == 0
    assert main(["truncate", asks.name, *given_, "--depth", "9", "--eps", "1", "-q"]) == 0
    assert main(["verify", asks.name, stores.name, *given_, "-q"]) == 0
    capsys.readouterr()
    assert main(["inspect", asks.name, *given_, "--trust-pickle"]) == 2
    assert "--weights excludes --factory and --trust-pickle" in capsys.readouterr().err
    assert main(["inspect", asks.name, "--weights", "none.npz"]) == 3


def test_values_that_nothing_gives_are_named(tmp_path, capfd):
    found = read(tmp_path, one_node("GRU", ["X", "W", "nowhere"]))
    assert found.skipped[0].reason == "GRU: weights R ('nowhere') are defined nowhere in the file"
    found = read(tmp_path, one_node("GRU", ["X", "W", "R", "", "", "gone"]))
    assert found.skipped[0].reason == "GRU: initial_h ('gone') is defined nowhere in the file"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_naming_tensor_and_node(tmp_path, bad):
    constants = weights("GRU")
    constants["R"][0, 3, 1] = bad
    with pytest.raises(LoadError, match=r"R \('R'\) of GRU node 'cell' holds NaN or infinity"):
        read(tmp_path, one_node("GRU", constants=constants))


# --- deviations that are said -----------------------------------------------------------------


def ids(found):
    return [finding.id for finding in found.findings]


def test_clip_is_read_as_onnx_runtime_does_it_and_the_difference_is_said(tmp_path):
    constants = weights("LSTM")
    constants["B"][0, 8:12] += 3.0  # an open forget gate lets c grow past the clip
    proto = one_node("LSTM", constants=constants, clip=0.4)
    found = read(tmp_path, proto)
    assert ids(found) == ["RA110"]
    x = 3 * inputs(20, 2, 3)
    check_layer(found.stacks[0].layers[0], proto, x)
    assert ids(read(tmp_path, one_node("GRU", clip=0.4))) == []


@pytest.mark.parametrize("function", sorted(ALPHA))
def test_missing_parameters_are_those_of_onnx_runtime(tmp_path, function):
    proto = one_node("RNN", activations=[function])
    found = read(tmp_path, proto)
    check_layer(found.stacks[0].layers[0], proto, inputs(9, 2, 3))
    disputed = function in {"Affine", "ScaledTanh", "ThresholdedRelu"}
    assert ids(found) == (["RA111"] if disputed else [])


def test_batch_first_nodes_are_read_with_their_states_turned(tmp_path):
    constants = weights("LSTM", 2)
    turned = {**constants, "h0": constants["h0"].transpose(1, 0, 2)}
    names = ["X", "W", "R", "B", "", "h0"]
    attributes = {"hidden_size": 4, "direction": "bidirectional"}
    plain = model(
        [helper.make_node("LSTM", names, ["Y"], name="cell", **attributes)],
        {"X": ["T", 1, 3]},
        {"Y": None},
        constants,
    )
    first = model(
        [helper.make_node("LSTM", names, ["Y"], name="cell", layout=1, **attributes)],
        {"X": [1, "T", 3]},
        {"Y": None},
        turned,
    )
    a, b = read(tmp_path, plain), read(tmp_path, first)
    assert ids(b) == ["RA112"]
    assert b.stacks[0].layers[0].site.layout == 1
    for ours, other in zip(a.recurrences(), b.recurrences(), strict=True):
        assert torch.equal(ours.initial.value, other.initial.value)
    assert a.whole
    assert b.whole


@pytest.mark.parametrize(
    ("shape", "steps"),
    [([20, -1, 3], 20), ([-1, 20, 3], 20), ([-1, 2, 3], None), ([0, -1, 3], None)],
)
def test_steps_that_a_reshape_before_the_node_fixes_are_said(tmp_path, shape, steps):
    turned = shape == [-1, 20, 3]
    nodes = [
        helper.make_node("Reshape", ["flat", "shape"], ["made"]),
        helper.make_node("Transpose", ["made"], ["X"], perm=[1, 0, 2] if turned else [0, 1, 2]),
        helper.make_node("GRU", ["X", "W", "R", "B"], ["Y"], hidden_size=4, linear_before_reset=1),
    ]
    constants = {k: v for k, v in weights("GRU").items() if k in "WRB"} | {"shape": np.array(shape)}
    found = read(tmp_path, model(nodes, {"flat": ["T", "M"]}, {"Y": None}, constants))
    messages = [f.message for f in found.findings if f.id == "RA126"]
    assert bool(messages) == (steps is not None)
    assert all(f"at {steps} steps" in message for message in messages)


def test_sequence_lengths_are_recorded_and_said(tmp_path):
    constants = weights("GRU")
    node = helper.make_node("GRU", ["X", "W", "R", "B", "lens"], ["Y"], name="cell", hidden_size=4)
    proto = model(
        [node],
        {"X": ["T", "N", 3], "lens": (["N"], TensorProto.INT32)},
        {"Y": ["T", 1, "N", 4]},
        constants,
    )
    found = read(tmp_path, proto)
    assert found.stacks[0].layers[0].site.sequence_lens == "lens"
    assert ids(found) == ["RA113"]
    assert not found.whole


# --- initial states ---------------------------------------------------------------------------


def initial(found):
    (recurrence,) = found.recurrences()
    return recurrence.initial


def test_states_that_the_caller_gives_are_named_and_zero_is_assumed(tmp_path):
    constants = {k: v for k, v in weights("LSTM").items() if k in "WRB"}
    names = ["X", "W", "R", "B", "", "h0", "c0"]
    found = initial(read(tmp_path, one_node("LSTM", names, constants)))
    assert (found.source, found.name) == ("graph input", "h0, c0")
    assert not found.value.any()


def test_states_packed_in_one_input_are_followed_through_slices(tmp_path):
    constants = weights("LSTM") | {"zero": np.array(0), "one": np.array(1), "ax": np.array([0])}
    nodes = [
        helper.make_node("Gather", ["state", "zero"], ["h1"], axis=0),
        helper.make_node("Gather", ["state", "one"], ["c1"], axis=0),
        helper.make_node("Unsqueeze", ["h1", "ax"], ["h"]),
        helper.make_node("Unsqueeze", ["c1", "ax"], ["c"]),
        helper.make_node("LSTM", ["X", "W", "R", "B", "", "h", "c"], ["Y"], hidden_size=4),
    ]
    shapes = {"X": ["T", "N", 3], "state": [2, "N", 4]}
    found = initial(read(tmp_path, model(nodes, shapes, {"Y": None}, constants)))
    assert (found.source, found.name) == ("graph input", "state")


def cached(overwrite):
    """Make two GRUs whose states share one input; the first writes its new state into a copy."""
    rows = np.array([[[overwrite]]])
    constants = weights("GRU") | {f"s{i}": np.array([i]) for i in range(3)} | {"at": rows}
    node = {"hidden_size": 4}
    nodes = [
        helper.make_node("Slice", ["cache", "s0", "s1"], ["h"]),
        helper.make_node("GRU", ["X", "W", "R", "B", "", "h"], ["Y", "new"], name="a", **node),
        helper.make_node("Unsqueeze", ["new", "s0"], ["update"]),
        helper.make_node("ScatterND", ["cache", "at", "update"], ["cache2"]),
        helper.make_node("Slice", ["cache2", "s1", "s2"], ["h2"]),
        helper.make_node("GRU", ["X", "W", "R", "B", "", "h2"], ["Z"], name="b", **node),
    ]
    return model(nodes, {"X": ["T", 1, 3], "cache": [2, 1, 4]}, dict.fromkeys("YZ"), constants)


@pytest.mark.parametrize(("overwrite", "source"), [(0, "graph input"), (1, "computed")])
def test_states_in_a_cache_are_followed_entry_by_entry(tmp_path, overwrite, source):
    found = read(tmp_path, cached(overwrite))
    first, second = (r.initial for r in found.recurrences())
    assert (first.source, first.name) == ("graph input", "cache")
    assert second.source == source
    assert ids(found) == ([] if source == "graph input" else ["RA115"])


@pytest.mark.parametrize(
    ("names", "attributes"),
    [(["cache"], {}), ([], {}), (["cache", "at", "update"], {"reduction": 1})],
)
def test_a_cache_written_by_a_broken_operator_gives_a_state_that_is_computed(
    tmp_path, names, attributes
):
    proto = cached(overwrite=0)
    broken = next(node for node in proto.graph.node if node.op_type == "ScatterND")
    broken.input[:] = names
    broken.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())
    _, second = (r.initial for r in read(tmp_path, proto).recurrences())
    assert second.source == "computed"


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_states_filled_for_a_batch_of_any_size_are_constants(tmp_path, value):
    fill = helper.make_tensor("v", TensorProto.FLOAT, [1], [value])
    nodes = [
        helper.make_node("Shape", ["X"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["n"], axis=0),
        helper.make_node("Unsqueeze", ["n", "ax"], ["n1"]),
        helper.make_node("Concat", ["front", "n1", "back"], ["target"], axis=0),
        helper.make_node("ConstantOfShape", ["target"], ["both"], value=fill),
        helper.make_node("Slice", ["both", "ax", "ones"], ["h"]),
        helper.make_node("GRU", ["X", "W", "R", "B", "", "h"], ["Y"], hidden_size=4),
    ]
    constants = weights("GRU") | {
        "one": np.array(1),
        "ax": np.array([0]),
        "ones": np.array([1]),
        "front": np.array([2]),
        "back": np.array([4]),
    }
    proto = model(nodes, {"X": ["T", "N", 3]}, {"Y": None}, constants)
    read_ = read(tmp_path, proto)
    found = initial(read_)
    assert found.source == ("constant" if value else "zero")
    assert found.value.tolist() == [value] * 4
    assert ids(read_) == []
    check_layer(read_.stacks[0].layers[0], proto, inputs(6, 2, 3))


def expanded(constants, batch):
    """Expand a stored state [1, batch, 4] to the batch of X."""
    nodes = [
        helper.make_node("Shape", ["X"], ["shape"], start=1, end=2),
        helper.make_node("Concat", ["one", "shape", "four"], ["target"], axis=0),
        helper.make_node("Expand", ["stored", "target"], ["h"]),
        helper.make_node("GRU", ["X", "W", "R", "B", "", "h"], ["Y"], name="cell", hidden_size=4),
    ]
    h0 = np.repeat(constants["h0"], batch, axis=1)
    constants = constants | {"stored": h0, "one": np.array([1]), "four": np.array([4])}
    return model(nodes, {"X": ["T", "N", 3]}, {"Y": None}, constants)


def test_a_stored_state_that_is_expanded_to_the_batch_leaves_the_batch_free(tmp_path):
    constants = weights("GRU")
    proto = expanded(constants, 1)
    found = read(tmp_path, proto)
    assert initial(found).source == "constant"
    assert ids(found) == []
    check_layer(found.stacks[0].layers[0], proto, inputs(6, 3, 3))


def test_a_state_stored_for_one_batch_size_fixes_it_and_that_is_said(tmp_path):
    found = read(tmp_path, expanded(weights("GRU"), 3))
    assert initial(found).source == "constant"
    (finding,) = found.findings
    assert finding.id == "RA114"
    assert finding.message == "the batch size is fixed at 3 by initial_h, stored in the model"


def test_a_state_stored_with_unequal_rows_is_said_and_zero_is_assumed(tmp_path):
    constants = weights("GRU")
    constants["h0"] = inputs(1, 2, 4)
    found = read(tmp_path, one_node("GRU", ["X", "W", "R", "B", "", "h0"], constants))
    assert initial(found).source == "computed"
    assert ids(found) == ["RA115"]
    assert "another state for each of 2 batch rows" in found.findings[0].message


def test_a_state_that_another_node_leaves_is_said_and_zero_is_assumed(tmp_path):
    constants = weights("GRU")
    nodes = [
        helper.make_node("GRU", ["X", "W", "R", "B"], ["", "last"], name="coder", hidden_size=4),
        helper.make_node("GRU", ["X", "W", "R", "B", "", "last"], ["Y"], name="d", hidden_size=4),
    ]
    found = read(tmp_path, model(nodes, {"X": ["T", "N", 3]}, {"Y": None}, constants))
    assert [r.initial.source for r in found.recurrences()] == ["zero", "computed"]
    assert "from the final state of GRU 'coder'" in found.findings[0].message


# --- constants --------------------------------------------------------------------------------


def test_weights_behind_chains_of_constants_are_the_weights_that_run(tmp_path):
    stored = weights("LSTM")
    W, R, B = (stored[k] for k in "WRB")
    packed = np.concatenate([W[0].T, R[0].T])  # [7, 16]
    q = np.round(B * 50).astype(np.int8)
    constants = {
        "packed": packed,
        "cut": np.array([3], dtype=np.int64),
        "end": np.array([2**31 - 1], dtype=np.int64),
        "zero": np.array([0], dtype=np.int64),
        "parts": np.array([16, 16]),
        "flat": np.array([0, -1]),
        "q": q.reshape(32),
        "scale": np.float32(0.02),
        "point": np.int8(0),
        "two": np.float32(2.0),
    }
    nodes = [
        helper.make_node("Slice", ["packed", "zero", "cut", "zero"], ["w0"]),
        helper.make_node("Slice", ["packed", "cut", "end", "zero"], ["r0"]),
        helper.make_node("Transpose", ["w0"], ["w1"], perm=[1, 0]),
        helper.make_node("Transpose", ["r0"], ["r1"]),
        helper.make_node("Unsqueeze", ["w1", "zero"], ["w2"]),
        helper.make_node("Identity", ["w2"], ["W"]),
        helper.make_node("Unsqueeze", ["r1", "zero"], ["r2"]),
        helper.make_node("Mul", ["r2", "two"], ["r3"]),
        helper.make_node("Div", ["r3", "two"], ["R"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "point"], ["b0"]),
        helper.make_node("Split", ["b0", "parts"], ["b1", "b2"], axis=0),
        helper.make_node("Neg", ["b2"], ["b3"]),
        helper.make_node("Concat", ["b1", "b3"], ["b4"], axis=0),
        helper.make_node("Unsqueeze", ["b4", "zero"], ["b5"]),
        helper.make_node("Reshape", ["b5", "flat"], ["B"]),
        helper.make_node("LSTM", ["X", "W", "R", "B"], ["Y"], hidden_size=4),
    ]
    proto = model(nodes, {"X": ["T", "N", 3]}, {"Y": None}, constants)
    found = read(tmp_path, proto)
    check_layer(found.stacks[0].layers[0], proto, inputs(8, 2, 3))


def test_a_gru_that_contradicts_pytorch_is_said_to(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.GRU(3, 4)
    torch.save(module.state_dict(), tmp_path / "m.pt")

    def turned(*parts):  # PyTorch's gates are r, z, n, ONNX's z, r, n
        rows = [torch.cat([part.detach().chunk(3)[k] for k in (1, 0, 2)]) for part in parts]
        return torch.cat(rows)[None].numpy()

    constants = {
        "W": turned(module.weight_ih_l0),
        "R": turned(module.weight_hh_l0),
        "B": turned(module.bias_ih_l0, module.bias_hh_l0),
    }
    ids, judged = {}, {}
    for producer, after in [("pytorch", 0), ("pytorch", 1), ("other", 0)]:
        operators = [
            helper.make_node("Transpose", ["x"], ["X"], perm=[1, 0, 2]),
            helper.make_node(
                "GRU", ["X", "W", "R", "B"], ["Y"], hidden_size=4, linear_before_reset=after
            ),
            helper.make_node("Squeeze", ["Y", "one"], ["squeezed"]),
            helper.make_node("Transpose", ["squeezed"], ["y"], perm=[1, 0, 2]),
        ]
        shapes = {"x": ["N", "T", 3]}, {"y": ["N", "T", 4]}
        proto = model(operators, *shapes, constants | {"one": np.array([1])})
        proto.producer_name = producer
        path = saved(tmp_path, proto)
        ids[producer, after] = [f.id for f in load(path).findings]
        report = api.verify(tmp_path / "m.pt", path, eps=1e-5)
        judged[producer, after] = report.equivalence.passed, report.findings
    assert ids == {("pytorch", 0): ["RA133"], ("pytorch", 1): [], ("other", 0): []}
    assert judged["pytorch", 1] == (True, ())
    passed, found = judged["other", 0]
    assert not passed
    [said] = [f.message for f in found if f.id == "RA133"]
    assert said == (
        "it holds the weights of gru[0] in the original, which computes r ⊙ (U h), and computes "
        "U (r ⊙ h)"
    )


def test_older_forms_of_the_same_operators_are_folded_too(tmp_path):
    stored = weights("GRU")
    nodes = [
        helper.make_node("Constant", [], ["raw"], value=numpy_helper.from_array(stored["W"][0])),
        helper.make_node("Unsqueeze", ["raw"], ["W"], axes=[0]),
        helper.make_node("Slice", ["twice"], ["half"], axes=[1], starts=[0], ends=[1]),
        helper.make_node("Squeeze", ["half"], ["R"], axes=[1]),
        helper.make_node("Split", ["bb"], ["B", "unused"], axis=0, split=[1, 1]),
        helper.make_node("GRU", ["X", "W", "R", "B"], ["Y"], hidden_size=4),
    ]
    constants = {
        "twice": np.stack([stored["R"], 2 * stored["R"]], axis=1),
        "bb": np.concatenate([stored["B"], 2 * stored["B"]]),
    }
    proto = model(nodes, {"X": ["T", "N", 3]}, {"Y": ["T", 1, "N", 4]}, constants, opset=9)
    check_layer(read(tmp_path, proto).stacks[0].layers[0], proto, inputs(8, 2, 3))


def test_a_constant_that_would_be_huge_is_not_computed(tmp_path):
    nodes = [
        helper.make_node("Expand", ["R", "huge"], ["big"]),
        helper.make_node("GRU", ["X", "W", "big"], ["Y"], name="cell", hidden_size=4),
    ]
    constants = weights("GRU") | {"huge": np.array([10**6, 10**6, 12, 4])}
    proto = model(nodes, {"X": ["T", "N", 3]}, {"Y": None}, constants)
    (skipped,) = read(tmp_path, proto).skipped
    assert "are computed by Expand" in skipped.reason


# --- stacks -----------------------------------------------------------------------------------


def stacked(readout=True, bidirectional=True, reshape="zeros", between=()):
    """Make two layers as exporters write them, batch first outside, then a linear layer."""
    d = 1 + bidirectional
    direction = "bidirectional" if bidirectional else "forward"
    first, second = weights("LSTM", d), weights("LSTM", d, inputs=4 * d, seed=5)
    constants = {f"{k}{i}": w[k] for i, w in enumerate((first, second)) for k in "WRB"}
    constants |= {
        "A": np.random.default_rng(3).normal(size=(4 * d, 2)).astype(np.float32),
        "a": np.float32([0.5, -1.0]),
        "flat": np.array([0, 0, -1]),
        "last": np.array([-1]),
    }

    def layer(i, x, y):
        attributes = {"name": f"lstm{i}", "hidden_size": 4, "direction": direction}
        yield helper.make_node("LSTM", [x, f"W{i}", f"R{i}", f"B{i}"], [f"raw{i}"], **attributes)
        yield helper.make_node("Transpose", [f"raw{i}"], [f"swap{i}"], perm=[0, 2, 1, 3])
        target = "flat"
        if reshape == "shape":
            yield helper.make_node("Shape", [f"swap{i}"], [f"s{i}"], start=0, end=2)
            yield helper.make_node("Concat", [f"s{i}", "last"], [f"target{i}"], axis=0)
            target = f"target{i}"
        yield helper.make_node("Reshape", [f"swap{i}", target], [y])

    nodes = [
        helper.make_node("Transpose", ["X"], ["x"], perm=[1, 0, 2]),
        *layer(0, "x", "y0"),
        *(between or [helper.make_node("Identity", ["y0"], ["x1"])]),
        *layer(1, "x1", "y1"),
        helper.make_node("Transpose", ["y1"], ["out"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["out", "A"], ["p"], name="head"),
        helper.make_node("Add", ["a", "p"], ["Z"]),
    ]
    if not readout:
        nodes = nodes[:-2]
    leaves = "Z" if readout else "out"
    return model(nodes, {"X": ["N", "T", 3]}, {leaves: ["N", "T", "F"]}, constants)


@pytest.mark.parametrize("readout", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("reshape", ["zeros", "shape"])
def test_layers_joined_by_layout_operators_are_one_stack(tmp_path, readout, bidirectional, reshape):
    proto = stacked(readout, bidirectional, reshape)
    found = read(tmp_path, proto)
    assert found.whole
    (stack,) = found.stacks
    assert [r.label for r in stack.recurrences() if not r.reverse] == ["lstm0[0]", "lstm1[1]"]
    assert (stack.readout is not None) == readout
    if stack.readout:
        assert stack.readout.name == "head"
    x = inputs(2, 9, 3)
    ours = cells.run_stack(stack, torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(ours, runtime_outputs(proto, {"X": x})[0], atol=1e-5)


@pytest.mark.parametrize(
    "between",
    [
        [helper.make_node("Relu", ["y0"], ["x1"])],
        [helper.make_node("Transpose", ["y0"], ["x1"], perm=[1, 0, 2])],  # time for batch
    ],
)
def test_layers_with_something_else_between_are_two_stacks(tmp_path, between):
    found = read(tmp_path, stacked(between=between))
    assert [stack.name for stack in found.stacks] == ["lstm0", "lstm1"]
    assert not found.whole


def test_features_in_another_order_do_not_join_layers(tmp_path):
    """[T, D, N, H] to [T, N, H, D] has the right shape and the wrong units."""
    proto = stacked()
    for node in proto.graph.node:
        if node.output[0] == "swap0":
            node.attribute[0].ints[:] = [0, 2, 3, 1]
    assert len(read(tmp_path, proto).stacks) == 2


def gemm_head(**attributes):
    constants = weights("RNN") | {
        "rows": np.array([-1, 4]),
        "A": np.random.default_rng(3).normal(size=(4, 2)).astype(np.float32),
        "a": np.float32([0.5, -1.0]),
    }
    if attributes.get("transB"):
        constants["A"] = np.ascontiguousarray(constants["A"].T)
    nodes = [
        helper.make_node("RNN", ["X", "W", "R", "B"], ["Y"], hidden_size=4),
        helper.make_node("Reshape", ["Y", "rows"], ["flat"]),
        helper.make_node("Gemm", ["flat", "A", "a"], ["Z"], **attributes),
    ]
    return model(nodes, {"X": ["T", "N", 3]}, {"Z": ["M", 2]}, constants)


@pytest.mark.parametrize("attributes", [{}, {"transB": 1}, {"alpha": 0.5, "beta": -2.0}])
def test_a_gemm_over_all_rows_is_a_readout(tmp_path, attributes):
    proto = gemm_head(**attributes)
    found = read(tmp_path, proto)
    assert found.whole
    x = inputs(5, 2, 3)
    ours = cells.run_stack(found.stacks[0], torch.from_numpy(x).double().transpose(0, 1))
    theirs = runtime_outputs(proto, {"X": x})[0].reshape(5, 2, 2)
    np.testing.assert_allclose(ours.transpose(0, 1).numpy(), theirs, atol=1e-5)


def test_a_second_output_or_a_nonlinear_end_is_not_the_whole_model(tmp_path):
    proto = stacked()
    proto.graph.output.append(helper.make_tensor_value_info("y0", TensorProto.FLOAT, None))
    found = read(tmp_path, proto)
    assert not found.whole
    assert found.stacks[0].readout is None
    proto = stacked()
    proto.graph.node.append(helper.make_node("Sigmoid", ["Z"], ["S"]))
    proto.graph.output[0].name = "S"
    found = read(tmp_path, proto)
    assert not found.whole
    assert found.stacks[0].readout is None


def test_the_last_state_alone_is_not_the_whole_model(tmp_path):
    constants = weights("GRU")
    node = helper.make_node("GRU", ["X", "W", "R", "B"], ["Y", "Y_h"], hidden_size=4)
    both = model([node], {"X": ["T", "N", 3]}, {"Y": None, "Y_h": None}, constants)
    assert read(tmp_path, both).whole
    last = model([node], {"X": ["T", "N", 3]}, {"Y_h": None}, constants)
    assert not read(tmp_path, last).whole


def test_nodes_without_names_or_with_the_same_name_are_told_apart(tmp_path):
    constants = weights("GRU")
    nodes = [
        helper.make_node("Relu", ["X"], ["x"], name="same"),
        helper.make_node("GRU", ["x", "W", "R"], ["a"], name="same", hidden_size=4),
        helper.make_node("GRU", ["X", "W", "R"], ["b"], name="same", hidden_size=4),
        helper.make_node("GRU", ["X", "W", "R"], ["c"], hidden_size=4),
    ]
    outputs = dict.fromkeys("abc")
    found = read(tmp_path, model(nodes, {"X": ["T", "N", 3]}, outputs, constants))
    labels = [r.label for r in found.recurrences()]
    assert len(set(labels)) == 3
    assert labels[2] == "c[0]"
    for stack, output in zip(found.stacks, outputs, strict=True):
        node = found.graph.graph.node(stack.layers[0].site.node)
        assert node.outputs[0].name == output


# --- what lies deeper -------------------------------------------------------------------------


def branch(name, constants, output):
    """Make a branch with an LSTM of its own whose X comes from outside."""
    node = helper.make_node("LSTM", ["X", *constants], [output], name=name, hidden_size=4)
    info = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    return helper.make_graph([node], name, [], [info])


def nested():
    """Make If inside If, with an LSTM in three branches."""
    constants = {
        f"{k}{i}": v for i in range(3) for k, v in weights("LSTM", seed=i).items() if k in "WRB"
    }
    names = [[f"{k}{i}" for k in "WRB"] for i in range(3)]
    inner = helper.make_graph(
        [
            helper.make_node(
                "If",
                ["which"],
                ["in_out"],
                name="inner",
                then_branch=branch("a", names[0], "ya"),
                else_branch=branch("b", names[1], "yb"),
            )
        ],
        "nest",
        [],
        [helper.make_tensor_value_info("in_out", TensorProto.FLOAT, None)],
    )
    outer = helper.make_node(
        "If",
        ["on"],
        ["Y"],
        name="outer",
        then_branch=inner,
        else_branch=branch("c", names[2], "yc"),
    )
    flags = {"which": ([], TensorProto.BOOL), "on": ([], TensorProto.BOOL)}
    return model([outer], {"X": ["T", "N", 3], **flags}, {"Y": None}, constants)


def test_recurrences_in_branches_are_found_with_weights_from_outside(tmp_path):
    proto = nested()
    found = read(tmp_path, proto)
    assert [stack.name for stack in found.stacks] == [
        "outer[then]/inner[then]/a",
        "outer[then]/inner[else]/b",
        "outer[else]/c",
    ]
    assert found.stacks[0].layers[0].site.scope == "outer[then]/inner[then]"
    assert not found.whole
    x = inputs(6, 2, 3)
    for stack, (on, which) in zip(found.stacks, [(1, 1), (1, 0), (0, 0)], strict=True):
        feeds = {"X": x, "on": np.array(bool(on)), "which": np.array(bool(which))}
        theirs = runtime_outputs(proto, feeds)[0][:, 0]
        ours = cells.run_stack(stack, torch.from_numpy(x).double().transpose(0, 1))
        np.testing.assert_allclose(ours.transpose(0, 1).numpy(), theirs, atol=1e-5)


def loop(op):
    """Make a Scan (or Loop) whose body holds a recurrent node."""
    body_inputs = [helper.make_tensor_value_info("s", TensorProto.FLOAT, ["N", 4])]
    node = helper.make_node("GRU", ["X", "W", "R"], ["y"], name="inside", hidden_size=4)
    keep = helper.make_node("Identity", ["s"], ["s_out"])
    outs = [helper.make_tensor_value_info("s_out", TensorProto.FLOAT, ["N", 4])]
    if op == "Loop":
        body_inputs = [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            *body_inputs,
        ]
        outs = [helper.make_tensor_value_info("c", TensorProto.BOOL, []), *outs]
        names = ["M", "", "s0"]
    else:
        names = ["s0", "X"]
        body_inputs.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3]))
    body = helper.make_graph([node, keep], "body", body_inputs, outs)
    more = {"num_scan_inputs": 1} if op == "Scan" else {}
    whole = helper.make_node(op, names, ["S"], name="turns", body=body, **more)
    shapes = {"X": ["T", "N", 3], "s0": ["N", 4], "M": ([], TensorProto.INT64)}
    return model([whole], shapes, {"S": None}, weights("GRU"))


@pytest.mark.parametrize("op", ["Loop", "Scan"])
def test_recurrences_inside_loops_are_named_as_not_read(tmp_path, op):
    found = read(tmp_path, loop(op))
    assert found.stacks == ()
    (skipped,) = found.skipped
    assert skipped.where == "turns"
    wanted = f"a recurrence inside the body of a {op} is not read; it holds 1 GRU"
    assert skipped.reason == wanted


def test_functions_are_read_and_foreign_operators_are_named_as_not_read(tmp_path):
    function = helper.make_function(
        "mine",
        "Coder",
        ["x", "w", "r"],
        ["y"],
        [helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=4)],
        [helper.make_opsetid("", 17)],
    )
    nodes = [
        helper.make_node("Coder", ["X", "W", "R"], ["a"], name="call", domain="mine"),
        helper.make_node("DynamicQuantizeLSTM", ["X"], ["b"], name="quant", domain="com.microsoft"),
    ]
    proto = model(
        nodes, {"X": ["T", "N", 3]}, dict.fromkeys("ab"), weights("GRU"), functions=[function]
    )
    found = read(tmp_path, proto)
    assert [r.cell.kind for r in found.recurrences()] == ["gru"]
    assert {s.where: s.reason for s in found.skipped} == {
        "quant": "DynamicQuantizeLSTM: LSTM must have the inputs W and R",
    }


def test_a_model_without_recurrence_says_what_was_looked_at(tmp_path):
    nodes = [helper.make_node("Relu", ["X"], ["a"]), helper.make_node("Tanh", ["a"], ["Y"])]
    with pytest.raises(
        UnsupportedModelError, match=r"no recurrence found in .*1 Relu, 1 Tanh"
    ) as e:
        read(tmp_path, model(nodes, {"X": ["N"]}, {"Y": ["N"]}))
    assert e.value.id == "RA105"


# --- hostile files ----------------------------------------------------------------------------


def external(tmp_path, location="m.data", **entries):
    """Save a model with W outside, under ``location``; entries override offset and length."""
    proto = one_node("GRU")
    tensor = next(t for t in proto.graph.initializer if t.name == "W")
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return saved(tmp_path, proto), data


def test_weights_beside_the_model_are_read_from_any_working_directory(tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    path, data = external(home)
    (home / "m.data").write_bytes(data)
    (elsewhere / "m.data").write_bytes(b"\0" * len(data))
    monkeypatch.chdir(elsewhere)
    cell = load(path).stacks[0].layers[0].recurrences[0].cell
    assert cell.W.abs().max() > 0
    # A cache keeps files under other names and links to them.
    cache = tmp_path / "blobs"
    cache.mkdir()
    path.rename(cache / "1234")
    (home / "m.data").rename(cache / "5678")
    path.symlink_to(cache / "1234")
    (home / "m.data").symlink_to(cache / "5678")
    again = load(path).stacks[0].layers[0].recurrences[0].cell
    assert torch.equal(again.W, cell.W)


@pytest.mark.parametrize(
    "location", ["../m.data", "/etc/passwd", "a/../../m.data", "C:\\m.data", "..\\m.data", ""]
)
def test_weights_elsewhere_are_refused(tmp_path, location):
    folder = tmp_path / "in"
    folder.mkdir()
    path, data = external(folder, location)
    (tmp_path / "m.data").write_bytes(data)
    with pytest.raises(LoadError, match=r"tensor 'W' of .* must keep its data beside the model"):
        load(path)


def test_a_link_that_leads_away_is_refused(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    path, data = external(folder)
    (tmp_path / "secret").write_bytes(data)
    (folder / "m.data").symlink_to(tmp_path / "secret")
    with pytest.raises(LoadError, match=r"m\.data is a link that leads away"):
        load(path)


def test_missing_or_short_data_files_are_one_line_that_names_them(tmp_path):
    path, data = external(tmp_path)
    with pytest.raises(LoadError, match=r"keeps its data in 'm\.data', and .*m\.data is missing"):
        load(path)
    (tmp_path / "m.data").write_bytes(data[:-1])
    with pytest.raises(LoadError, match=r"needs 144 bytes from 0 on, and .* has 143"):
        load(path)
    (tmp_path / "m.data").write_bytes(data)
    external(tmp_path, offset=8, length=len(data))
    with pytest.raises(LoadError, match="from 8 on"):
        load(path)


def test_a_tensor_that_declares_more_than_it_holds_is_refused(tmp_path):
    proto = one_node("GRU")
    proto.graph.initializer[0].dims[1] = 10**12
    with pytest.raises(LoadError, match="initializer 'W' has a declared shape or type"):
        read(tmp_path, proto)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_refused_in_one_line(tmp_path, keep):
    path = saved(tmp_path, one_node("LSTM"))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(LoadError, match=r"an ONNX model was expected, and .* is damaged"):
        load(path)


@settings(max_examples=60)
@given(data=st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "m.onnx"
    path.write_bytes(b"\x08\x08" + data)
    with pytest.raises((LoadError, UnsupportedModelError)):
        LOADER.load(path, "")


@settings(max_examples=150)
@given(position=st.floats(0, 1), bits=st.integers(1, 255), count=st.integers(1, 4))
def test_a_damaged_model_is_read_or_refused(tmp_path_factory, position, bits, count):
    data = bytearray(nested().SerializeToString())
    for i in range(count):
        data[int(position * (len(data) - 1)) - i] ^= bits
    path = tmp_path_factory.mktemp("damaged") / "m.onnx"
    path.write_bytes(bytes(data))
    try:
        LOADER.load(path, "")
    except (LoadError, UnsupportedModelError) as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_graphs_that_bite_their_tail_and_repeated_names_do_not_hang(tmp_path):
    nodes = [
        helper.make_node("Add", ["X", "b"], ["a"]),
        helper.make_node("Identity", ["a"], ["b"]),
        helper.make_node("GRU", ["b", "W", "R", "", "", "h"], ["Y", "l"], hidden_size=4),
        helper.make_node("Identity", ["l"], ["h"]),
    ]
    found = read(tmp_path, model(nodes, {"X": ["T", "N", 3]}, {"Y": None}, weights("GRU")))
    assert len(list(found.recurrences())) == 1
    twice = [helper.make_node("GRU", ["X", "W", "R"], ["Y"], hidden_size=4)] * 2
    with pytest.raises(LoadError, match="is not a valid ONNX model"):
        read(tmp_path, model(twice, {"X": ["T", "N", 3]}, {"Y": None}, weights("GRU")))


def test_a_file_that_is_not_onnx_is_not_recognised(tmp_path):
    assert LOADER.recognises(b"\x08\x09\x12\x07pytorch", tmp_path / "m.bin")
    assert not LOADER.recognises(b"PK\x03\x04", tmp_path / "m.onnx")
    assert not LOADER.recognises(b"\x80\x02}", tmp_path / "m.pt")


# --- quantised, and the same in several branches ----------------------------------------------


def quantised(directions, columns):
    """Make Microsoft's LSTM of 8-bit weights, one scale for each direction or column."""
    rng = np.random.default_rng(0)
    shapes = {"W": (directions, 3, 16), "R": (directions, 4, 16)}
    size = (directions, 16) if columns else (directions,)
    constants = {"B": weights("LSTM", directions)["B"]}
    for name, shape in shapes.items():
        constants[name] = rng.integers(-127, 127, size=shape, dtype=np.int8)
        constants[f"{name}_s"] = rng.uniform(2e-3, 4e-3, size=size).astype(np.float32)
        constants[f"{name}_z"] = np.zeros(size, np.int8)
    names = ["X", "W", "R", "B", "", "", "", "", "W_s", "W_z", "R_s", "R_z"]
    node = helper.make_node(
        "DynamicQuantizeLSTM",
        names,
        ["Y"],
        name="cell",
        domain="com.microsoft",
        hidden_size=4,
        direction="forward" if directions == 1 else "bidirectional",
    )
    proto = model([node], {"X": ["T", "N", 3]}, {"Y": ["T", directions, "N", 4]}, constants)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return proto, constants


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("columns", [False, True])
def test_a_quantised_lstm_is_read_with_its_dequantised_weights(tmp_path, directions, columns):
    proto, stored = quantised(directions, columns)
    found = read(tmp_path, proto)
    [layer] = found.stacks[0].layers
    scale = stored["R_s"].astype(np.float64).reshape(directions, 1, -1)
    exact = (stored["R"] * scale).transpose(0, 2, 1)
    for d, recurrence in enumerate(layer.recurrences):
        i, f, g, o = recurrence.cell.U.numpy().reshape(4, 4, 4)
        np.testing.assert_array_equal(np.concatenate([i, o, f, g]), exact[d])
        assert "each output depends on all of them, later ones too" in recurrence.rounded
    assert [f.id for f in found.findings] == ["RA127"]
    assert not found.whole
    # One part in 127 of each input and state is lost to rounding.
    check_layer(layer, proto, inputs(20, 2, 3), tolerance=0.03)


def test_a_quantised_lstm_without_its_scale_is_left_out(tmp_path):
    proto, _ = quantised(1, columns=False)
    proto.graph.node[0].input[8] = ""
    [skip] = read(tmp_path, proto).skipped
    assert "W_scale must be stored" in skip.reason


def test_the_same_cell_in_several_branches_is_audited_once_and_cut_everywhere(tmp_path):
    proto = nested()
    for graph in (proto.graph.node[0].attribute[0].g, proto.graph.node[0].attribute[1].g):
        for node in graph.node:
            for inner in [a.g.node[0] for a in node.attribute if a.g.node] or [node]:
                inner.input[1:] = ["W0", "R0", "B0"]
    found = read(tmp_path, proto)
    [stack] = found.stacks
    assert stack.name == "outer[then]/inner[then]/a"
    assert [(f.id, f.message.split(",")[0]) for f in found.findings] == [
        ("RA120", "outer[then]/inner[else]/b"),
        ("RA120", "outer[else]/c"),
    ]
    written = onnx_ir.to_proto(export.truncate_graph(found, {f"{stack.name}[0]": 3}))
    kinds = [node.op_type for node in written.graph.node]
    todo = list(written.graph.node)
    while todo:
        node = todo.pop()
        kinds.append(node.op_type)
        todo += [n for a in node.attribute for n in a.g.node]
    assert "LSTM" not in kinds
    x = inputs(9, 2, 3)
    states = [{"X": x, "on": np.array(on), "which": np.array(w)} for on, w in
              [(True, True), (True, False), (False, False)]]  # fmt: skip
    first, *others = [runtime_outputs(written, feed)[0] for feed in states]
    assert all(np.array_equal(first, other) for other in others)
