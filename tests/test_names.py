"""What is added to a graph is called like nothing in it, wherever the graph keeps that name."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import helper

from rnnaudit import loaders
from rnnaudit.export import choose, truncate_graph
from rnnaudit.export.files import serialize
from rnnaudit.truncation import Form, Shape
from tests.strategies import generator, normal
from tests.test_export import gru_file, gru_node, session


def fed(T=9, N=2):
    return normal(generator(1), N, T, 5).transpose(0, 1).contiguous().float().numpy()


@pytest.mark.parametrize("form", [Form("window"), Form("chunk", 3)])
@pytest.mark.parametrize("name", ["guard", "other"])
def test_a_weight_called_guard_keeps_its_name(tmp_path, name, form):
    nodes = [gru_node("gru", "x", "h"), helper.make_node("Mul", ["h", name], ["y"])]
    path = gru_file(tmp_path / "a.onnx", nodes, {}, extra={name: np.float32([2.0])})
    written = truncate_graph(loaders.load(path), {"gru[0]": 9}, {"gru[0]": form}, guarded=True)
    onnx.checker.check_model(onnx.load_from_string(serialize(written)))
    guard = written.metadata_props["rnnaudit.guard"]
    assert guard == ("guard_2" if name == "guard" else "guard")
    y, _ = session(written).run(["y", guard], {"x": fed()})
    (exact,) = session(path.read_bytes()).run(["y"], {"x": fed()})
    np.testing.assert_allclose(y, exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["past", "past_next"])
@pytest.mark.parametrize("where", ["weight", "value"])
def test_buffers_are_called_like_nothing_else(tmp_path, name, where):
    factor, between = (name, "scaled") if where == "weight" else ("factor", name)
    nodes = [
        helper.make_node("Mul", ["x", factor], [between]),
        gru_node("gru", between, "y"),
    ]
    path = gru_file(tmp_path / "a.onnx", nodes, {}, extra={factor: np.float32([0.5])})
    model, depths = loaders.load(path), {"gru[0]": 9}
    forms = choose(model, depths, Shape(streaming=True))
    written = truncate_graph(model, depths, forms)
    onnx.checker.check_model(onnx.load_from_string(serialize(written)))
    ((before, after),) = json.loads(written.metadata_props["rnnaudit.past"]).items()
    assert name not in (before, after)
    x, run = fed(), session(written)
    buffer, found = np.zeros((0, 2, 5), np.float32), []
    for block in (x[:4], x[4:]):
        y, buffer = run.run(["y", after], {"x": block, before: buffer})
        found.append(y)
    (exact,) = session(path.read_bytes()).run(["y"], {"x": x})
    np.testing.assert_allclose(np.concatenate(found), exact, atol=1e-5, rtol=0)
