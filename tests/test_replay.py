"""A saved witness replays in the model's own runtime, or is refused in one line."""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import rnnaudit
from rnnaudit import refutation
from rnnaudit.cli import app
from rnnaudit.errors import LoadError
from rnnaudit.reports import JsonRenderer, TerminalRenderer, wording
from rnnaudit.reports.numbers import exact

pytestmark = pytest.mark.usefixtures("one_thread")

LATCH = Path(__file__).parents[1] / "sample_models" / "latch.onnx"
STEPS, PREFIX = 40, 6


def state(module):
    return {f"rnn.{name}": value for name, value in module.state_dict().items()}


def latch(weight=5.0):
    """Return h' = tanh(5h + 5x): set by one input, held for ever."""
    module = torch.nn.RNN(1, 1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.0 if parameter.ndim == 1 else weight)
    return module


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "latch.pt"
    torch.save(state(latch()), path)
    return path


def arrays(model, **changed):
    """Return what a witness of the latch holds: x = 1, then x = 0."""
    (r,) = rnnaudit.load(model).recurrences()
    h, gap = 0.0, []
    for t in range(PREFIX + STEPS + 1):
        gap += [h] if t >= PREFIX else []
        h = np.tanh(5 * h + (5.0 if t < PREFIX else 0.0))
    return {
        "prefix": np.ones((PREFIX, 1)),
        "inputs": np.zeros((STEPS, 1)),
        "distances": np.array(gap),
        "low": -np.ones(1),
        "high": np.ones(1),
        "eps": np.array(1e-3),
        "norm": np.array("max"),
        "schema": np.array(refutation.SCHEMA),
        "where": np.array(r.label),
        "fingerprint": np.array(refutation.weights_fingerprint(r)),
        "domain": np.array("|x| ≤ 1"),
    } | changed


def header(shape):
    """Return the beginning of a file of numbers that says it has this shape."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(16)


def saved(path, found):
    np.savez(path, **found)
    return path


def test_a_witness_replays_to_the_closed_form_at_every_depth(model, tmp_path):
    path = saved(tmp_path / "w.npz", arrays(model))
    replayed = rnnaudit.replay(model, path).replay
    assert replayed.passed
    assert replayed.same_weights
    assert replayed.runtime == "PyTorch's own modules in float64"
    assert replayed.depths == tuple(range(1, STEPS + 1))
    assert replayed.replayed == pytest.approx(replayed.found, abs=1e-12)
    assert replayed.refuted_below == STEPS + 1


def test_what_an_audit_saves_replays_in_the_graph_itself(tmp_path, capsys):
    path = tmp_path / "w.npz"
    report = rnnaudit.audit(LATCH, witness=path)
    assert report.settings["witness"] == str(path)
    replayed = rnnaudit.replay(LATCH, path).replay
    assert replayed.runtime == "the model in ONNX Runtime"
    assert replayed.refuted_below == report.depth.refuted_below == 257
    assert replayed.replayed == pytest.approx(replayed.found, abs=1e-5)
    assert app.main(["verify", str(LATCH), "--witness", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "witness: REPLAYS in the model in ONNX Runtime: after 256 shared inputs" in out
    assert err == ""


def test_a_model_that_forgets_does_not_replay_it_and_exits_with_1(model, tmp_path, capsys):
    path = saved(tmp_path / "w.npz", arrays(model))
    torch.save(state(latch(0.5)), model)
    report = rnnaudit.replay(model, path)
    # h' = tanh(h/2): the gap at least halves with each step.
    assert not report.replay.passed
    assert report.replay.refuted_below < 12
    assert [f.id for f in report.findings] == ["RA238"]
    text = TerminalRenderer().render(report)
    assert "FAILS in PyTorch's own modules in float64: after 40 shared inputs" in text
    assert f"it refutes k < {report.replay.refuted_below} only" in " ".join(text.split())
    assert app.main(["verify", str(model), "--witness", str(path), "--format", "json"]) == 1
    assert '"passed": false' in capsys.readouterr().out


def test_rounding_of_the_runtime_replays_no_witness_for_a_tiny_epsilon(tmp_path):
    # h' = tanh(0.9h + x): one run falls and the other rises, to less than float32's ulp apart.
    path = tmp_path / "m.onnx"
    node = onnx.helper.make_node("RNN", ["X", "W", "R"], ["Y"], hidden_size=1, activations=["Tanh"])
    real, size = onnx.TensorProto.FLOAT, [1, 1, 1]
    values = [onnx.helper.make_tensor(n, real, size, [w]) for n, w in (("W", 1.0), ("R", 0.9))]
    ports = (("X", ["T", 1, 1]), ("Y", ["T", 1, 1, 1]))
    x, y = (onnx.helper.make_tensor_value_info(name, real, shape) for name, shape in ports)
    graph = onnx.helper.make_graph([node], "g", [x], [y], values)
    onnx.save(onnx.helper.make_model(graph, ir_version=9), path)
    found = arrays_of(rnnaudit.load(path)) | {
        "prefix": np.ones((40, 1)),
        "inputs": np.full((300, 1), 0.03),
        "distances": np.full(301, 0.8),
        "eps": np.array(1e-12),
    }
    replayed = rnnaudit.replay(path, saved(tmp_path / "w.npz", found)).replay
    assert not replayed.passed
    assert replayed.refuted_below is None or replayed.refuted_below < 260
    assert "FAILS" in str(wording.replayed(replayed))


def test_a_replay_validates_against_the_schema(model, tmp_path):
    import json

    import jsonschema

    from rnnaudit.reports.json import schema

    report = rnnaudit.replay(model, saved(tmp_path / "w.npz", arrays(model)))
    jsonschema.validate(json.loads(JsonRenderer().render(report)), schema())


def test_a_cell_that_torch_lacks_replays_in_onnx_runtime(tmp_path):
    from rnnaudit.export import build, write
    from rnnaudit.model import Activation, ElmanCell, InitialState, Layer, Recurrence, Stack

    five = torch.full((1, 1), 5.0, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    cell = ElmanCell(five, five, zero, Activation("softsign"))
    stack = Stack("s", (Layer((Recurrence("s", 0, cell, InitialState(zero)),)),))
    path = tmp_path / "softsign.onnx"
    write(build(stack), path)
    found = arrays_of(rnnaudit.load(path))
    replayed = rnnaudit.replay(path, saved(tmp_path / "w.npz", found)).replay
    assert replayed.passed
    assert replayed.replayed[-1] == pytest.approx(0.8, abs=1e-5)  # h = 5h/(1 + 5h)


def arrays_of(model):
    (stack,) = model.stacks
    return {
        "prefix": np.ones((PREFIX, 1)),
        "inputs": np.zeros((STEPS, 1)),
        "distances": np.full(STEPS + 1, 0.8),
        "low": -np.ones(1),
        "high": np.ones(1),
        "eps": np.array(1e-3),
        "norm": np.array("max"),
        "schema": np.array(refutation.SCHEMA),
        "where": np.array(stack.name),
        "fingerprint": np.array(refutation.weights_fingerprint(stack)),
        "domain": np.array("|x| ≤ 1"),
    }


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"schema": np.array("other/1")}, "its schema must be rnnaudit.witness/1"),
        ({"prefix": np.ones((6, 1), np.float32)}, "prefix must be 2 axes of finite float64"),
        ({"prefix": np.ones(6)}, "prefix must be 2 axes of finite float64"),
        ({"prefix": np.full((6, 1), np.nan)}, "prefix must be 2 axes of finite float64"),
        ({"inputs": np.zeros((40, 2))}, "its inputs must be as wide as its prefix"),
        ({"distances": np.zeros(3)}, "it must hold a distance for each depth"),
        ({"inputs": np.zeros((0, 1)), "distances": np.zeros(1)}, "a prefix and inputs"),
        ({"inputs": np.full((40, 1), 2.0)}, "its inputs must lie in its box"),
        (
            {"inputs": np.full((40, 1), 2.0), "high": np.full(1, 2.0)},
            "its inputs must lie in the domain that it names",
        ),
        ({"domain": np.array("-1 ≤ x ≤ 1e-7")}, "its inputs must lie in the domain that it names"),
        ({"domain": np.array("the one-hot vectors")}, "its inputs must lie in the domain"),
        ({"eps": np.array(-1.0)}, "its ε must be positive"),
        ({"rounding": np.array(-1.0)}, "its rounding must not be negative"),
        ({"rounding": np.array(np.nan)}, "rounding must be 0 axes of finite float64"),
        ({"norm": np.array("1")}, "its norm must be max or 2"),
        ({"where": np.array(3.0)}, "where must be a short text"),
        ({"where": np.array("x" * 5000)}, "where must be a short text"),
        ({"where": np.array(["a"])}, "where must be a short text"),
    ],
)
def test_what_is_no_witness_is_refused_by_its_fault(model, tmp_path, changed, words):
    path = saved(tmp_path / "w.npz", arrays(model, **changed))
    with pytest.raises(LoadError, match=words) as refused:
        rnnaudit.replay(model, path)
    assert refused.value.id == "RA237"


@pytest.mark.parametrize(("low", "high"), [(-1e-9, 1 / 3), (-2.5e20, 1e20), (-3.0, -1.5)])
def test_inputs_at_the_ends_of_the_range_that_they_name_are_read(model, tmp_path, low, high):
    ends = {
        "prefix": np.full((PREFIX, 1), low),
        "inputs": np.full((STEPS, 1), high),
        "low": np.full(1, low),
        "high": np.full(1, high),
        "domain": np.array(f"{exact(low)} ≤ x ≤ {exact(high)}"),
    }
    assert refutation.load_witness(saved(tmp_path / "w.npz", arrays(model, **ends)))
    ends["prefix"][0] = np.nextafter(low, -np.inf)
    ends["low"] = ends["low"] - abs(low)
    with pytest.raises(LoadError, match="the domain that it names"):
        refutation.load_witness(saved(tmp_path / "w.npz", arrays(model, **ends)))


def test_a_witness_of_an_input_range_replays(model, tmp_path):
    path = tmp_path / "w.npz"
    found = rnnaudit.audit(model, eps=1e-3, input_range=(-0.1, 0.3), witness=path)
    assert found.depth.refuted_below
    assert rnnaudit.replay(model, path).replay.passed


def test_hostile_files_are_refused(model, tmp_path):
    pickled = tmp_path / "p.npz"
    np.savez(pickled, **arrays(model, where=np.array([print], dtype=object)))
    bomb = tmp_path / "b.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("prefix.npy", b"\0" * (refutation._LARGEST + 1))
    missing, text = tmp_path / "none.npz", tmp_path / "t.npz"
    text.write_text("no zip")
    wanted = {pickled: "Object arrays", bomb: "too large", missing: "No such file", text: "zip"}
    for path, words in wanted.items():
        with pytest.raises(LoadError, match=words):
            rnnaudit.replay(model, path)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (b"", "inputs must be an array"),
        (b"cposix\nsystem\n(S'true'\ntR.", "inputs must be an array"),
        (b"\x93NUMPY\x01\x00\x04\x00{}\n\n", "."),
        (header("(True, 1)"), "."),
        (header("(10**12, 1)"), "."),
        (header("(1000000000000, 1)"), "allocate"),
        (header("(-1, 1)"), "negative"),
        (header("(" * 500), "."),
    ],
)
def test_an_entry_that_is_no_array_of_numbers_is_refused_in_one_line(
    model, tmp_path, capsys, entry, words
):
    path = saved(tmp_path / "w.npz", {k: v for k, v in arrays(model).items() if k != "inputs"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("inputs.npy", entry)
    with pytest.raises(LoadError, match=words):
        rnnaudit.replay(model, path)
    assert app.main(["verify", str(model), "--witness", str(path)]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error[RA237]")


def test_no_byte_that_is_changed_in_a_witness_ends_in_a_traceback(model, tmp_path):
    path = tmp_path / "w.npz"
    np.savez_compressed(path, **arrays(model))
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        raw = bytearray(whole)
        for at in rng.integers(len(raw), size=rng.integers(1, 4)):
            raw[at] = rng.integers(256)
        path.write_bytes(raw)
        with contextlib.suppress(LoadError):
            refutation.load_witness(path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"where": np.array("other")}, r"must be one of .*got one of 'other'"),
        ({"distances": np.zeros(41)}, "refutes a depth of at least 1"),
        (
            {
                "prefix": np.ones((6, 2)),
                "inputs": np.zeros((40, 2)),
                "low": -np.ones(2),
                "high": np.ones(2),
            },
            "1 features per step for rnn\\[0\\], got 2",
        ),
    ],
)
def test_a_witness_of_something_else_is_refused(model, tmp_path, changed, words):
    with pytest.raises(LoadError, match=words):
        rnnaudit.replay(model, saved(tmp_path / "w.npz", arrays(model, **changed)))


def test_a_witness_and_a_candidate_are_one_too_many(capsys):
    assert app.main(["verify", "a.pt", "b.onnx", "--witness", "w.npz"]) == 2
    assert "--witness is replayed in one model, got a.pt and b.onnx" in capsys.readouterr().err
