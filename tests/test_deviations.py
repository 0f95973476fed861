"""Where ONNX Runtime deviates from an operator's text, a finding shows what either one gives."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from rnnaudit import api, deviations
from rnnaudit.loaders import load
from rnnaudit.runtime import RunOutcome
from tests.test_load_onnx import model, one_node, runtime_outputs, saved, weights

MEASURED = re.compile(
    r": over (\d+) steps of what it reads here outputs differ by up to (\S+): at t = (\d+), "
    r"unit (\d+), the text gives (\S+) and ONNX Runtime [\d.]+ ([^;\s]+)$"
)
TEXT = {  # the operators' own defaults
    "Affine": lambda v: v,
    "ScaledTanh": np.tanh,
    "ThresholdedRelu": lambda v: np.where(v > 1, v, 0),
}


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def forgetful(clip=0.4, **attributes):
    """Make an LSTM whose cell state grows past the clip, and its weights."""
    constants = weights("LSTM")
    constants["B"][0, 8:12] += 3.0
    return one_node("LSTM", constants=constants, clip=clip, **attributes), constants


def lstm_by_text(constants, x, clip):
    """Run the operator's text, every activation's input clipped, on x [T, N, I]: [T, N, H]."""
    W, R, B = (constants[name][0].astype(np.float64) for name in ("W", "R", "B"))
    h, c, out = np.zeros((x.shape[1], 4)), np.zeros((x.shape[1], 4)), []
    for x_t in x.astype(np.float64):
        a = np.clip(x_t @ W.T + h @ R.T + B[:16] + B[16:], -clip, clip)
        i, o, f, g = np.split(a, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(np.clip(c, -clip, clip))
        out.append(h)
    return np.stack(out)


def drawn(*shape, scale=3.0):
    rng = np.random.default_rng(1)
    return (scale * rng.normal(size=shape)).astype(np.float32)


def measured(found, x):
    """Return the messages of the findings on x [T, N, I]."""
    rows = [[torch.from_numpy(x).double().transpose(0, 1)] for _ in found.stacks]
    told = deviations.measured(found, rows).findings
    return [f.message for f in told if f.id in deviations.DEVIATIONS]


def number(text):
    return float(text.replace("−", "-"))


def shows_both(message, text, theirs):
    """Whether a message shows the largest difference of two outputs [T, N, O], and both there."""
    steps, gap, t, unit, by_text, runs = MEASURED.search(message).groups()
    t, unit = int(t), int(unit)
    assert int(steps) == len(text)
    assert number(gap) == pytest.approx(np.abs(text - theirs).max(), rel=0.01)
    n = np.abs(text - theirs)[t, :, unit].argmax()
    assert number(by_text) == pytest.approx(text[t, n, unit], rel=0.01, abs=1e-6)
    assert number(runs) == pytest.approx(theirs[t, n, unit], rel=0.01, abs=1e-6)
    return True


def test_a_clip_is_shown_by_the_text_and_by_onnx_runtime(tmp_path):
    proto, constants = forgetful()
    x = drawn(50, 2, 3)
    (message,) = measured(load(saved(tmp_path, proto)), x)
    (y,) = runtime_outputs(proto, {"X": x})
    text = lstm_by_text(constants, x, 0.4)
    assert np.abs(text - y[:, 0]).max() > 0.01
    assert message.startswith("clip = 0.4: the operator's text also clips")
    assert shows_both(message, text, y[:, 0])


@pytest.mark.parametrize("function", sorted(TEXT))
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_missing_parameters_are_shown_by_the_text_and_by_onnx_runtime(
    tmp_path, function, direction
):
    D = 1 + (direction == "bidirectional")
    constants = weights("RNN", D, scale=0.4)
    activations = ["Tanh", function][-D:]
    proto = one_node("RNN", constants=constants, activations=activations, direction=direction)
    x = drawn(30, 2, 3, scale=1.0)
    (message,) = measured(load(saved(tmp_path, proto)), x)
    (y,) = runtime_outputs(proto, {"X": x})
    text = np.zeros((30, 2, 4 * D))
    functions = {"Tanh": np.tanh, **TEXT}
    for d, name in enumerate(activations):
        W, R, B = (constants[key][d].astype(np.float64) for key in ("W", "R", "B"))
        h, backwards = np.zeros((2, 4)), direction == "reverse" or d == 1
        for t in reversed(range(30)) if backwards else range(30):
            h = functions[name](x[t] @ W.T + h @ R.T + B[:4] + B[4:])
            text[t, :, 4 * d : 4 * d + 4] = h
    assert shows_both(message, text, y.transpose(0, 2, 1, 3).reshape(30, 2, -1))


def test_a_parameter_that_is_zero_by_the_text_too_is_no_deviation(tmp_path):
    proto = one_node("RNN", activations=["Affine"], activation_alpha=[0.5])  # beta is 0 in both
    assert load(saved(tmp_path, proto)).findings == ()


def test_a_clip_that_never_takes_hold_changes_nothing(tmp_path):
    proto, _ = forgetful(clip=40.0)
    (message,) = measured(load(saved(tmp_path, proto)), drawn(9, 1, 3))
    found = re.search(r"over 9 steps .* the text and ONNX Runtime [\d.]+ stay within (\S+) of each "
                      r"other$", message)  # fmt: skip
    assert number(found[1]) < 1e-5


def test_nodes_that_onnx_runtime_does_not_run_as_they_stand_are_run_alone(tmp_path):
    """In branches nothing can be fetched, and batch-first nodes are refused."""
    plain, constants = forgetful()
    turned = one_node("LSTM", constants=constants, clip=0.4, layout=1)
    stored = {name: constants[name] for name in "WRB"}
    node = helper.make_node("LSTM", ["X", "W", "R", "B"], ["Y"], "inner", hidden_size=4, clip=0.4)
    other = helper.make_node("Identity", ["X"], ["Z"])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("Y", "Z")]
    then, else_ = (
        helper.make_graph([n], "branch", [], [out])
        for n, out in zip((node, other), outputs, strict=True)
    )
    choice = helper.make_node("If", ["c"], ["out"], "if", then_branch=then, else_branch=else_)
    shapes = {"X": ["T", "N", 3], "c": ([], TensorProto.BOOL)}
    nested = model([choice], shapes, {"out": None}, stored)
    x = drawn(20, 2, 3)
    messages = [
        measured(load(saved(tmp_path, proto)), x)[0].partition(": over")[2]
        for proto in (plain, turned, nested)
    ]
    assert MEASURED.search(": over" + messages[0])
    assert messages == [messages[0]] * 3


def test_the_second_layer_of_a_stack_is_run_on_what_the_first_one_gives(tmp_path):
    first, second = weights("GRU"), weights("LSTM", inputs=4, seed=3)
    second["B"][0, 8:12] += 3.0
    constants = {f"{n}{i}": w[n] for i, w in enumerate((first, second)) for n in "WRB"}
    constants["axis"] = np.array([1])
    nodes = [
        helper.make_node("GRU", ["X", "W0", "R0", "B0"], ["A"], "a", hidden_size=4),
        helper.make_node("Squeeze", ["A", "axis"], ["S"]),
        helper.make_node("LSTM", ["S", "W1", "R1", "B1"], ["Y"], "b", hidden_size=4, clip=0.25),
    ]
    proto = model(nodes, {"X": ["T", "N", 3]}, {"Y": None}, constants)
    x = drawn(30, 2, 3)
    found = load(saved(tmp_path, proto))
    assert len(found.stacks[0].layers) == 2
    (message,) = measured(found, x)
    inner = one_node("GRU", constants=first)
    (a,) = runtime_outputs(inner, {"X": x})
    (y,) = runtime_outputs(proto, {"X": x})
    assert shows_both(message, lstm_by_text(second, a[:, 0], 0.25), y[:, 0])


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_what_the_text_lets_overflow_is_compared_up_to_there(tmp_path, direction):
    constants = weights("RNN")
    constants["R"] *= 1e30
    proto = one_node("RNN", constants=constants, activations=["Affine"], direction=direction)
    (message,) = measured(load(saved(tmp_path, proto)), drawn(50, 1, 3))
    _, gap, t, *_ = MEASURED.search(message).groups()
    taken = int(t) if direction == "forward" else 49 - int(t)
    assert 8 <= taken < 15  # 1e30 a step, and float64 ends at 1e308
    assert float(gap) > 1e250
    found = load(saved(tmp_path, proto))
    (message,) = measured(found, np.full((3, 1, 3), np.nan, np.float32))
    assert message.endswith(": on what it reads here the outputs are not finite")


def test_another_onnx_runtime_is_told_apart_from_the_one_that_is_followed(tmp_path, monkeypatch):
    proto, constants = forgetful()
    found, x = load(saved(tmp_path, proto)), drawn(20, 2, 3)
    text = lstm_by_text(constants, x, 0.4) + 1e-2

    def run(*_, **__):
        return RunOutcome([{"y": text}], None, 0.0)

    monkeypatch.setattr(deviations.runtime, "run", run)
    (message,) = measured(found, x)
    assert re.search(r"; this audit follows another version of it, which gives −?0\.\d+$", message)
    monkeypatch.setattr(deviations.runtime, "run", lambda *_, **__: RunOutcome(None, "no", 0.0))
    (message,) = measured(found, x)
    assert re.search(
        r"is followed here: ONNX Runtime [\d.]+ does not run it alone \(no\)$", message
    )


def test_a_node_in_float64_is_shown_as_its_float32_copy_runs(tmp_path):
    constants = {name: value.astype(np.float64) for name, value in forgetful()[1].items()}
    node = helper.make_node("LSTM", ["X", "W", "R", "B"], ["Y"], "cell", hidden_size=4, clip=0.4)
    double = TensorProto.DOUBLE
    ports = {"X": (["T", "N", 3], double)}, {"Y": (None, double)}
    proto = model([node], *ports, {name: constants[name] for name in "WRB"})
    x = drawn(30, 2, 3)
    (message,) = measured(load(saved(tmp_path, proto)), x)
    (y,) = runtime_outputs(forgetful()[0], {"X": x})
    text = lstm_by_text(constants, x, 0.4)
    said = " (in float32: it runs no such node in float64)"
    assert said in message
    assert shows_both(message.replace(said, ""), text, y[:, 0])


def test_an_audit_shows_both(tmp_path):
    proto, _ = forgetful()
    report = api.audit(saved(tmp_path, proto), time_budget=1.0)
    (message,) = [f.message for f in report.findings if f.id == "RA110"]
    assert MEASURED.search(message)
