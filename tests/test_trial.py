"""A deeper plan is held to the inputs that a shallower one failed; what fails them all stays."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from rnnaudit import api, trial
from rnnaudit.data import Data
from rnnaudit.examine import Settings, examine
from rnnaudit.loaders import load
from rnnaudit.observe import observe
from rnnaudit.planning import Wanted, chosen
from rnnaudit.truncation import AUTO

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_plan_is_judged_on_the_same_inputs(tmp_path, monkeypatch):
    torch.manual_seed(0)
    torch.save(torch.nn.RNN(2, 3).state_dict(), tmp_path / "rnn.pt")
    model = load(tmp_path / "rnn.pt")
    found = examine(
        model,
        observe(model, None, seed=0, sequences=5, length=32),
        Settings(eps=1e-3, time_budget=8.0),
    )
    order = [chosen(found, depth, Wanted(1e-3, 512)) for depth in (1, 2, 40)]
    judged = []

    def spy(*models, **settings):
        result = verify(*models, **settings)
        judged.append((settings["seed"], result.passed))
        return result

    verify = trial.verify
    monkeypatch.setattr(trial, "verify", spy)
    tried = trial.first_to_pass(
        found, iter(order), tmp_path / "cut.onnx", shape=AUTO, data=None, progress=None
    )
    assert [passed for _, passed in judged] == [False, False, True]
    assert {seed for seed, _ in judged} == {found.settings.seed}
    assert tried.judged.passed


SMALL = Data(
    {"x": tuple(np.random.default_rng(0).uniform(-1, 1, (6, 60, 2)).astype(np.float32))},
    "drawn.npy",
)


def side_by_side(path, kinds):
    """Write a graph of LSTMs that all read x; a ``holding`` one forgets only where x is small."""
    nodes, stored = [], [numpy_helper.from_array(np.array([1]), "directions")]
    for seed, kind in enumerate(kinds):
        rng = np.random.default_rng(seed)
        W, R, b = (np.zeros(shape, np.float32) for shape in ((1, 8, 2), (1, 8, 2), (1, 16)))
        W[0, 6:] = 0.5 * rng.standard_normal((2, 2))  # gates i, o, f, g
        if kind.startswith("holding"):
            W[0, 4:6, 0], b[0, 4:6] = 2.0, -3.0
        for array, name in ((W, "W"), (R, "R"), (b, "b")):
            stored.append(numpy_helper.from_array(array, kind + name))
        reads = ["x", kind + "W", kind + "R", kind + "b"]
        nodes += [
            helper.make_node("LSTM", reads, [kind + "4"], name=kind, hidden_size=2),
            helper.make_node("Squeeze", [kind + "4", "directions"], [kind]),
        ]
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None, 2])
        for name in ("x", *kinds)
    ]
    graph = helper.make_graph(nodes, "side_by_side", ports[:1], ports[1:], stored)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def test_a_layer_that_fails_where_both_are_compared_stays_and_the_others_are_cut(tmp_path):
    side_by_side(tmp_path / "both.onnx", ["forgetting", "holding"])
    report = api.truncate(tmp_path / "both.onnx", tmp_path / "cut.onnx", eps=1e-2, data=SMALL)
    assert report.equivalence.passed
    assert [each.recurrence for each in report.export.truncations] == ["forgetting[0]"]
    ((label, reason),) = ((each.where, each.reason) for each in report.skipped)
    assert label == "holding[0]"
    assert reason.startswith("cut alone to ")
    assert reason.endswith("where both are compared")
    kinds = [node.op_type for node in onnx.load(tmp_path / "cut.onnx").graph.node]
    assert kinds.count("LSTM") == 1


def test_where_every_layer_fails_the_report_is_of_the_whole_plan(tmp_path):
    side_by_side(tmp_path / "both.onnx", ["holding", "holding too"])
    report = api.truncate(tmp_path / "both.onnx", tmp_path / "cut.onnx", eps=1e-2, data=SMALL)
    assert not report.equivalence.passed
    assert report.export is None
    assert not (tmp_path / "cut.onnx").exists()
