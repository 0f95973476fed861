"""A model runs in a child process: same numbers, and its death is a result."""

import re

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from rnnaudit import cells, runtime
from rnnaudit.errors import LoadError
from rnnaudit.loaders import load


def model(nodes, inputs, outputs, constants=(), opset=17):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in inputs],
        [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in outputs],
        [numpy_helper.from_array(np.asarray(a, np.float32), n) for n, a in constants],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def squared_tanh():
    nodes = [
        helper.make_node("Add", ["x", "one"], ["a"]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("Mul", ["b", "b"], ["y"]),
    ]
    return model(nodes, [("x", ["N", 3])], [("y", ["N", 3])], [("one", np.ones(3))])


def gru():
    rng = np.random.default_rng(0)
    weights = [("W", rng.normal(size=(1, 12, 3))), ("R", rng.normal(size=(1, 12, 4)))]
    node = helper.make_node("GRU", ["X", "W", "R"], ["Y"], hidden_size=4)
    return model([node], [("X", ["T", "N", 3])], [("Y", ["T", 1, "N", 4])], weights, opset=14)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_outputs_of_several_feeds_come_in_order():
    feeds = [{"x": draw(n, 3, seed=n)} for n in (1, 2, 5)]
    outcome = runtime.run(squared_tanh().SerializeToString(), feeds)
    assert outcome.error is None
    for feed, found in zip(feeds, outcome.outputs, strict=True):
        np.testing.assert_allclose(found["y"], np.tanh(feed["x"] + 1) ** 2, atol=1e-6)


def test_inner_values_inputs_and_outputs_can_be_fetched():
    x = draw(2, 3)
    outcome = runtime.run(squared_tanh().SerializeToString(), [{"x": x}], fetch=["b", "x", "y"])
    assert outcome.error is None
    assert list(outcome.outputs[0]) == ["b", "x", "y"]
    np.testing.assert_allclose(outcome.outputs[0]["b"], np.tanh(x + 1), atol=1e-6)
    np.testing.assert_array_equal(outcome.outputs[0]["x"], x)


@pytest.mark.parametrize("fetch", [None, ["a"]])
def test_external_data_is_read_beside_the_model_and_nowhere_else(tmp_path, monkeypatch, fetch):
    beside, elsewhere = tmp_path / "beside", tmp_path / "elsewhere"
    for folder, one in ((beside, 1.0), (elsewhere, 5.0)):
        folder.mkdir()
        proto = squared_tanh()
        proto.graph.initializer[0].CopyFrom(
            numpy_helper.from_array(np.full(3, one, np.float32), "one")
        )
        onnx.save_model(
            proto, folder / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.bin"
        )
    monkeypatch.chdir(elsewhere)
    x = draw(2, 3)
    outcome = runtime.run(beside / "m.onnx", [{"x": x}], fetch=fetch)
    assert outcome.error is None
    wanted = x + 1 if fetch else np.tanh(x + 1) ** 2
    np.testing.assert_allclose(next(iter(outcome.outputs[0].values())), wanted, atol=1e-6)
    bare = runtime.run((beside / "m.onnx").read_bytes(), [{"x": x}])
    assert bare.outputs is None


def test_an_abort_of_the_runtime_is_an_error_that_names_the_signal():
    outcome = runtime.run(gru().SerializeToString(), [{"X": np.zeros((0, 2, 3), np.float32)}])
    assert outcome.outputs is None
    assert re.search("SIG[A-Z]+|exit code", outcome.error)


def test_a_refusal_of_the_runtime_is_its_own_words_in_one_line():
    outcome = runtime.run(squared_tanh().SerializeToString(), [{"x": draw(2, 4)}])
    assert "invalid dimensions" in outcome.error
    assert "\n" not in outcome.error
    assert "Protobuf" in runtime.run(b"not a model", [{"x": draw(2, 3)}]).error


def test_a_run_that_takes_too_long_is_stopped():
    outcome = runtime.run(squared_tanh().SerializeToString(), [{"x": draw(2, 3)}], timeout=0.01)
    assert outcome.error == "ONNX Runtime did not finish within 0.01 s"


def test_memory_past_the_limit_is_an_error():
    pytest.importorskip("resource")
    nodes = [
        helper.make_node("Cast", ["x"], ["shape"], to=onnx.TensorProto.INT64),
        helper.make_node("ConstantOfShape", ["shape"], ["y"]),
    ]
    proto = model(nodes, [("x", [1])], [("y", ["N"])]).SerializeToString()
    feed = {"x": np.full(1, 2**30, np.float32)}
    outcome = runtime.run(proto, [feed], memory_mb=3000, threads=1)
    assert re.search("alloc|memory", outcome.error)
    assert "\n" not in outcome.error


def test_deterministic_runs_repeat_exactly():
    feeds = [{"X": draw(50, 2, 3)}] * 2
    first, second = runtime.run(gru().SerializeToString(), feeds, deterministic=True).outputs
    np.testing.assert_array_equal(first["Y"], second["Y"])


def test_latency_is_a_time_for_what_runs_and_none_for_what_does_not():
    x = {"x": draw(2, 3)}
    good, bad = runtime.latency(
        [squared_tanh().SerializeToString(), b"not a model"], [x, x], repeats=5
    )
    assert 0 < good < 1000
    assert bad is None
    assert runtime.latency([b""], [x], timeout=0.01) == [None]
    with pytest.raises(ValueError, match="one feed for each of 1 models, not 0"):
        runtime.latency([b""], [])


def test_the_description_keeps_symbolic_axes_and_leaves_out_stored_inputs():
    proto = squared_tanh()
    proto.graph.input.append(helper.make_tensor_value_info("one", onnx.TensorProto.FLOAT, [3]))
    found = runtime.describe(proto.SerializeToString())
    assert found.inputs == (runtime.Port("x", "float", ("N", 3)),)
    assert found.outputs == (runtime.Port("y", "float", ("N", 3)),)


def test_a_description_of_something_else_is_refused(tmp_path):
    path = tmp_path / "text.onnx"
    path.write_text("hello, I am a text file")
    with pytest.raises(LoadError, match=r"an ONNX model was wanted, .*text\.onnx cannot be read"):
        runtime.describe(path)


def test_nothing_to_run_runs_nothing():
    assert runtime.run(b"never read", []).outputs == []


def test_what_each_layer_reads_can_be_fetched(tmp_path):
    rng = np.random.default_rng(1)
    weights = {
        "W": rng.normal(size=(1, 4, 3)),
        "R": rng.normal(size=(1, 4, 4)),
        "V": rng.normal(size=(1, 4, 4)),
    }
    nodes = [
        helper.make_node("Tanh", ["X"], ["x"]),
        helper.make_node("RNN", ["x", "W", "R"], ["Y0"], name="low", hidden_size=4),
        helper.make_node("Squeeze", ["Y0", "one"], ["y0"]),
        helper.make_node("RNN", ["y0", "V", "R"], ["Y1"], name="high", hidden_size=4),
    ]
    proto = model(nodes, [("X", ["T", "N", 3])], [("Y1", None)], list(weights.items()))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    loaded = load(path)
    x = draw(6, 2, 3)
    layers = loaded.stacks[0].layers
    outcome = runtime.run(path, [{"X": x}], fetch=[layer.site.x for layer in layers])
    low, high = (torch.from_numpy(v).double().transpose(0, 1) for v in outcome.outputs[0].values())
    torch.testing.assert_close(
        low, torch.from_numpy(x).double().transpose(0, 1).tanh(), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(high, cells.run_layer(layers[0], low), atol=1e-6, rtol=0)
