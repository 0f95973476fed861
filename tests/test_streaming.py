"""Models that are called step by step: the past comes back as a sequence, or as a buffer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from rnnaudit import api, loaders
from rnnaudit.cells import run, run_stack, truncated
from rnnaudit.errors import UsageError
from rnnaudit.export import choose, obstacles, stepwise, truncate_graph
from rnnaudit.model import Model
from rnnaudit.observe import observe
from rnnaudit.reports.commands import snippet
from rnnaudit.truncation import Shape
from rnnaudit.verification import verify
from rnnaudit.verification.states import carried
from tests.strategies import (
    KINDS,
    random_cell,
    random_inputs,
    random_model,
    seeds,
    torch_module,
)
from tests.test_export import every, graph_file, gru_node, serialize, session

K = (6, 4)


def two_steps(path: Path) -> Model:
    """Write two GRUs that take one step per call, with an operator between and a skip."""
    first, second = (random_cell(seed, "gru", inputs=5, gain=1.5) for seed in (4, 5))
    nodes = [
        helper.make_node("Mul", ["x", "half"], ["scaled"], name="scale"),
        gru_node("one", "scaled", "a", state="h0"),
        helper.make_node("Squeeze", ["a", "one_"], ["flat"], name="flat"),
        helper.make_node("Tanh", ["flat"], ["bent"], name="bent"),
        helper.make_node(
            *("GRU", ["bent", "vW", "vR", "vB", "", "h1"], ["b", "b_h"]),
            name="two",
            hidden_size=5,
            linear_before_reset=1,
        ),
        helper.make_node("Squeeze", ["b", "one_"], ["c"], name="last"),
        helper.make_node("Add", ["c", "x"], ["y"], name="skip"),
        helper.make_node("Identity", ["a_h"], ["next_h0"]),
        helper.make_node("Identity", ["b_h"], ["next_h1"]),
    ]
    ports = {"x": [1, "N", 5], "h0": [1, "N", 5], "h1": [1, "N", 5]}
    extra = {"half": np.float32([0.5]), "one_": np.int64([1])}
    graph_file(path, {"": [first], "v": [second]}, nodes, ports, {"y": 3}, extra=extra)
    made = onnx.load(path)
    for name in ("next_h0", "next_h1"):
        port = helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "N", 5])
        made.graph.output.append(port)
    onnx.save(made, path)
    return loaders.load(path)


def expected(model: Model, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return what the two GRUs give at every step [T, N, 5], each cut to its depth."""
    one, two = model.recurrences()
    inputs = torch.from_numpy(x.astype(np.float64)).transpose(0, 1)
    a = truncated(one, inputs / 2, K[0]).tanh()
    return (truncated(two, a, K[1]) + inputs).transpose(0, 1).numpy()


def depths(model: Model) -> dict[str, int]:
    return {r.label: k for r, k in zip(model.recurrences(), K, strict=True)}


def test_states_are_paired_with_their_sequels(tmp_path):
    model = two_steps(tmp_path / "step.onnx")
    assert carried(model) == {"h0": "next_h0", "h1": "next_h1"}
    assert carried(random_model(0, "gru")) == {}


@pytest.mark.parametrize("streaming", [False, True])
def test_one_step_per_call_becomes_a_sequence_or_gets_a_buffer(tmp_path, streaming):
    model = two_steps(tmp_path / "step.onnx")
    forms = choose(model, depths(model), Shape(streaming=streaming))
    written = truncate_graph(model, depths(model), forms)
    dropped = json.loads(written.metadata_props["rnnaudit.dropped"])
    assert dropped == ["next_h0", "next_h1"]
    runner = session(written)
    x = np.random.default_rng(0).standard_normal((14, 2, 5)).astype(np.float32)
    wanted = expected(model, x)
    if not streaming:
        assert [v.name for v in runner.get_inputs()] == ["x"]
        assert [v.name for v in runner.get_outputs()] == ["y"]
        for T in (1, 3, 4, 6, 9, 10, 14):
            (y,) = runner.run(None, {"x": x[:T]})
            np.testing.assert_allclose(y, wanted[T - 1 : T], atol=1e-5, rtol=0)
        return
    paired = json.loads(written.metadata_props["rnnaudit.past"])
    state = {name: np.zeros((0, 2, 5), np.float32) for name in paired}
    for t in range(len(x)):
        y, *after = runner.run(["y", *paired.values()], {"x": x[t : t + 1], **state})
        state = dict(zip(paired, after, strict=True))
        np.testing.assert_allclose(y, wanted[t : t + 1], atol=1e-5, rtol=0)
    assert [len(buffer) for buffer in state.values()] == [k - 1 for k in K]


@pytest.mark.parametrize("streaming", [False, True])
def test_both_are_verified_against_the_original_run_step_by_step(tmp_path, streaming):
    model = two_steps(tmp_path / "step.onnx")
    path = tmp_path / "cut.onnx"
    for k, passes in ((2, False), (40, True)):
        cut = every(model, k)
        forms = choose(model, cut, Shape(streaming=streaming))
        path.write_bytes(serialize(truncate_graph(model, cut, forms, guarded=True)))
        judged = verify(model, path, eps=2e-2, time_budget=10)
        assert (judged.passed, judged.reason) == (passes, "")


@settings(max_examples=15, deadline=None)
@given(
    seed=seeds,
    kind=st.sampled_from(KINDS),
    k=st.integers(1, 6),
    layers=st.integers(1, 2),
    keep_ops=st.booleans(),
    blocks=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_blocks_of_any_length_join_to_the_truncated_run(seed, kind, k, layers, keep_ops, blocks):  # noqa: PLR0917
    model = random_model(seed, kind, layers=layers, readout=2)
    forms = choose(model, every(model, k), Shape(streaming=True, keep_ops=keep_ops))
    written = truncate_graph(model, every(model, k), forms)
    paired = json.loads(written.metadata_props["rnnaudit.past"])
    runner = session(written)
    x = random_inputs(seed, model.stacks[0], 2, sum(blocks))
    widths = {v.name: v.shape[2] for v in runner.get_inputs()}
    state = {name: np.zeros((0, 2, widths[name]), np.float32) for name in paired}
    found, first = [], 0
    for size in blocks:
        part = x[:, first : first + size].transpose(0, 1).contiguous().float().numpy()
        y, *after = runner.run(["y", *paired.values()], {"x": part, **state})
        state = dict(zip(paired, after, strict=True))
        found.append(y)
        first += size
    wanted = run_stack(model.stacks[0], x, every(model, k)).transpose(0, 1).numpy()
    np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", ["window", "chunk", "last", "filter"])
def test_a_form_beside_streaming_is_refused(form):
    model = random_model(5, "gru", gain=0.3)
    with pytest.raises(UsageError, match=f"a form of its own, got --form {form} too; leave out"):
        choose(model, every(model, 4), Shape(form=form, streaming=True))


def test_a_streaming_model_of_weights_is_verified_in_blocks(tmp_path):
    model = random_model(5, "gru", gain=0.3)
    cut = every(model, 24)
    path = tmp_path / "cut.onnx"
    forms = choose(model, cut, Shape(streaming=True))
    path.write_bytes(serialize(truncate_graph(model, cut, forms)))
    judged = verify(model, path, eps=1e-2, time_budget=10)
    assert judged.passed
    assert judged.conversion_error <= 1e-5


def test_layers_of_one_step_per_call_are_measured_on_what_they_read_over_the_calls(tmp_path):
    model = two_steps(tmp_path / "step.onnx")
    seen = observe(model, None, seed=0, sequences=5, length=24)
    assert seen.findings == ()
    one, two = model.recurrences()
    (first,), (second,) = seen.recurrences[one.label], seen.recurrences[two.label]
    assert first.shape == second.shape == (5, 24, 5)
    # The second reads what the first one's whole run gives.
    torch.testing.assert_close(second, run(one, first).tanh(), atol=1e-5, rtol=0)


def test_what_cannot_be_cut_in_a_graph_is_said(tmp_path):
    both = random_model(0, "gru", bidirectional=True)
    assert obstacles(both, streaming=False) == {}
    reasons = obstacles(both, streaming=True)
    assert set(reasons.values()) == {"it reads the future, which a stream does not have"}
    nodes = [
        helper.make_node("CumSum", ["x", "axis"], ["sums"], name="sums"),
        gru_node("gru", "sums", "y", state="h0"),
    ]
    ports = {"x": [1, "N", 5], "h0": [1, "N", 5]}
    path = graph_file(
        *(tmp_path / "mixed.onnx", {"": [random_cell(4, "gru", inputs=5)]}, nodes, ports),
        {"y": 4, "y_h": 3},
        extra={"axis": np.int64(0)},
    )
    (reason,) = obstacles(loaders.load(path), streaming=False).values()
    assert reason.startswith("it takes one step per call, and CumSum (sums) lies between")
    assert obstacles(loaders.load(path), streaming=True) == {}


def test_a_state_that_is_the_only_result_stays(tmp_path):
    cell = random_cell(4, "gru", inputs=5)
    node = helper.make_node(
        *("GRU", ["x", "W", "R", "B", "", "h0"], ["", "h_n"]),
        name="gru",
        hidden_size=5,
        linear_before_reset=1,
    )
    ports = {"x": ["T", "N", 5], "h0": [1, "N", 5]}
    path = graph_file(tmp_path / "encoder.onnx", {"": [cell]}, [node], ports, {"h_n": 3})
    written = truncate_graph(loaders.load(path), {"gru[0]": 3})
    assert [v.name for v in written.graph.inputs] == ["x"]
    assert [v.name for v in written.graph.outputs] == ["h_n"]
    assert isinstance(session(written), onnxruntime.InferenceSession)


def test_the_report_of_a_streaming_model_runs_as_it_says(tmp_path, monkeypatch):
    model = random_model(5, "gru", gain=0.3)
    torch.save(torch_module(model.stacks[0]).float().state_dict(), tmp_path / "gru.pt")
    monkeypatch.chdir(tmp_path)
    report = api.truncate(
        *("gru.pt", "cut.onnx"), eps=1e-2, depth=20, streaming=True, guard=True, opset=15
    )
    assert report.equivalence is not None
    assert report.equivalence.passed
    assert report.export is not None
    assert (report.export.opset, report.export.form) == (15, "streaming")
    assert report.export.outputs == ("y", "past_next", "guard")
    lines = snippet(report.export, 72)
    assert '"past": np.zeros((0, 1, 3), np.float32)' in "\n".join(lines)
    found: dict[str, Any] = {}
    exec("\n".join(lines), found)
    assert found["past_next"].shape == (19, 1, 3)


@pytest.mark.parametrize(
    ("table", "axis", "index", "steps"),
    [
        ((7, 3), 0, (1, 2), (0, 2)),  # an embedding of [T, N] to [T, N, 3]
        ((3, 7), 1, (1, 2), None),  # the table's first axis stands first: no step is there
        ((3, 7), -1, (2, 1), None),
    ],
)
def test_steps_are_followed_through_a_table_to_its_indices(table, axis, index, steps):
    words = ir.Value(name="words", shape=ir.Shape(index), type=ir.TensorType(ir.DataType.INT64))
    stored = ir.Value(name="table", const_value=ir.tensor(np.zeros(table, np.float32)))
    node = ir.Node("", "Gather", [stored, words], [ir.AttrInt64("axis", axis)])
    found = stepwise._before(node, 0, 3)
    assert found == (None if steps is None else (1, *steps))
    if steps is None:  # what stands further back is an axis of the indices
        assert stepwise._before(node, 1, 3) == (1, 0, 2)
