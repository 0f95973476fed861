"""The sample models are what their README says they are."""

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

FOLDER = Path(__file__).parent.parent / "sample_models"
RESULTS = json.loads((FOLDER / "results.json").read_text())


def load(name):
    return torch.load(FOLDER / name, weights_only=True)


def run(name, x):
    session = onnxruntime.InferenceSession(FOLDER / name, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def chorales():
    with np.load(FOLDER / "chorales_test.npz") as archive:
        return archive["x"]


@pytest.mark.parametrize("name", RESULTS)
def test_each_file_is_small_and_the_one_that_was_measured(name):
    content = (FOLDER / name).read_bytes()
    assert len(content) < 400_000
    assert hashlib.sha256(content).hexdigest() == RESULTS[name]["sha256"]
    assert RESULTS[name]["sha256"] in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize(("kind", "gates"), [("rnn", 1), ("gru", 3)])
def test_a_state_dict_holds_one_layer_and_a_readout(kind, gates):
    weights = load(f"bach_{kind}.pt")
    hidden = weights["readout.weight"].shape[1]
    assert hidden <= 112
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        f"{kind}.weight_ih_l0": (gates * hidden, 88),
        f"{kind}.weight_hh_l0": (gates * hidden, hidden),
        f"{kind}.bias_ih_l0": (gates * hidden,),
        f"{kind}.bias_hh_l0": (gates * hidden,),
        "readout.weight": (88, hidden),
        "readout.bias": (88,),
    }
    assert all(value.dtype == torch.float32 for value in weights.values())


def test_the_stored_recurrent_weight_contracts():
    W = load("bach_rnn.pt")["rnn.weight_hh_l0"].double()
    assert torch.linalg.matrix_norm(W, ord=2) <= 0.95


def test_the_test_chorales_are_sequences_of_binary_notes():
    x = chorales()
    assert x.shape == (20, 236, 88)
    assert x.dtype == np.uint8
    assert set(np.unique(x)) == {0, 1}
    assert x.sum(axis=-1).max() <= 4  # four voices


def test_the_rnn_forgets_as_measured():
    weights = load("bach_rnn.pt")
    W, U, b, V = (
        weights[name].double().numpy()
        for name in ("rnn.weight_hh_l0", "rnn.weight_ih_l0", "rnn.bias_ih_l0", "readout.weight")
    )
    b = b + weights["rnn.bias_hh_l0"].double().numpy()
    drive = chorales() @ U.T + b
    steps = drive.shape[1]

    def state(start, stop):
        h = np.zeros((len(drive), len(W)))
        for t in range(start, stop):
            h = np.tanh(h @ W.T + drive[:, t])
        return h

    ends = range(16, steps + 1)
    error = max(np.abs((state(0, t) - state(t - 16, t)) @ V.T).max() for t in ends)
    assert error == pytest.approx(RESULTS["bach_rnn.pt"]["error_by_depth"]["16"], rel=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("bach_lstm.onnx", "LSTM"), ("latch.onnx", "RNN")])
def test_an_onnx_file_is_valid_and_holds_one_recurrence(name, kind):
    model = onnx.load(FOLDER / name)
    onnx.checker.check_model(model, full_check=True)
    assert [opset.version for opset in model.opset_import] == [17]
    assert [
        node.op_type for node in model.graph.node if node.op_type in {"LSTM", "GRU", "RNN"}
    ] == [kind]


@pytest.mark.parametrize(("time", "batch"), [(1, 1), (5, 3)])
def test_the_lstm_takes_any_time_and_batch(time, batch):
    assert run("bach_lstm.onnx", np.zeros((time, batch, 88), np.float32)).shape == (time, batch, 88)


def test_the_latch_remembers_one_pulse_for_ever():
    x = np.zeros((2001, 2, 1), np.float32)
    x[0, :, 0] = 1, -1
    y = run("latch.onnx", x)[1:, :, 0]
    assert np.abs(y[:, 0] - y[:, 1]).min() > 1


def test_the_latch_can_be_set_again_and_is_silent_unless_it_is():
    x = np.zeros((400, 3, 1), np.float32)
    x[0, :2, 0] = 1
    x[200, 1, 0] = -1
    a = np.tanh(2 * 0.9575)  # the fixed point of tanh(2a)
    np.testing.assert_allclose(run("latch.onnx", x)[-1, :, 0], [a, -a, 0], atol=1e-4)
