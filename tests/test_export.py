"""The written graph is the truncated model: nothing recurrent is left, nothing else has changed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

import rnnaudit
from rnnaudit import loaders
from rnnaudit.cells import run, run_stack, truncated
from rnnaudit.errors import LoadError, UnsupportedModelError, UsageError
from rnnaudit.export import assemble, build, choose, truncate_graph, write
from rnnaudit.export.files import serialize
from rnnaudit.model import Cell, Layer, LSTMCell, Model, Stack
from rnnaudit.truncation import WINDOW, Form, Shape
from tests.references import brute_force
from tests.strategies import (
    KINDS,
    cells,
    generator,
    normal,
    random_cell,
    random_inputs,
    random_model,
    random_stack,
    random_states,
    recurrence,
    seeds,
    torch_module,
)

RECURRENT = {"LSTM", "GRU", "RNN", "Scan", "Loop", "If"}


def session(model: ir.Model | bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    data = model if isinstance(model, bytes) else serialize(model)
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def outputs(model: ir.Model | onnxruntime.InferenceSession, x: Tensor) -> Tensor:
    """Run a time-first graph in float32 on x [N, T, I]; return y [N, T, O]."""
    runner = session(model) if isinstance(model, ir.Model) else model
    (y,) = runner.run(["y"], {"x": x.transpose(0, 1).contiguous().float().numpy()})
    return torch.from_numpy(y).transpose(0, 1).double()


def single(cell: Cell, start: Tensor | None = None, *, reverse: bool = False) -> Stack:
    return Stack("rnn", (Layer((recurrence(cell, start, reverse=reverse),)),))


def every(model: Model | Stack, depth: int) -> dict[str, int]:
    return {r.label: depth for r in model.recurrences()}


def operators(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph.all_nodes()}


# -------------------------------------------------------------------------- the window


@settings(max_examples=60)
@given(cell=cells(), seed=seeds, k=st.integers(1, 7), T=st.integers(1, 5), data=st.data())
def test_a_window_of_any_cell_is_the_truncated_recurrence(cell, seed, k, T, data):
    start = random_states(seed, cell, scale=0.5) if data.draw(st.booleans()) else None
    stack = single(cell, start, reverse=data.draw(st.booleans()))
    (r,) = stack.recurrences()
    x = random_inputs(seed, stack, 2, T)
    expected = truncated(r, x, k)
    assume(expected.abs().max() < 1e6)  # unbounded functions may explode
    graph = assemble([stack], {r.label: k}, dtype="float64")
    feed = {"x": x.transpose(0, 1).contiguous().numpy()}
    # In float64 rounding cannot hide a wrong graph; ONNX Runtime has not all functions there.
    if any(name in ONLY_FLOAT32 for name in _functions(cell)):
        evaluator = ReferenceEvaluator(onnx.load_from_string(serialize(graph)))
        with np.errstate(all="ignore"):  # it evaluates both sides of ELU and of the sigmoid
            (y,) = evaluator.run(None, feed)
    else:
        (y,) = session(graph).run(["y"], feed)
    error = (torch.from_numpy(y).transpose(0, 1) - expected).abs().max()
    assert error <= 1e-9 * max(1.0, float(expected.abs().max()))
    assert not operators(graph) & RECURRENT


ONLY_FLOAT32 = {"leakyrelu", "thresholdedrelu", "hardsigmoid", "elu", "softsign", "softplus"}


def _functions(cell: Cell) -> list[str]:
    names = cell.options.get("activations", [cell.options.get("activation")])
    return [str(name) for name in names]  # type: ignore[union-attr]


@settings(max_examples=25)
@given(
    seed=seeds,
    kind=st.sampled_from(KINDS),
    k=st.integers(1, 9),
    shape=st.fixed_dictionaries(
        {
            "layers": st.integers(1, 2),
            "bidirectional": st.booleans(),
            "readout": st.sampled_from([None, 2]),
            "start": st.sampled_from(["zero", "constant"]),
        }
    ),
)
def test_a_truncated_stack_is_its_float64_reading_to_float32_rounding(seed, kind, k, shape):
    stack = random_stack(seed, kind, **shape)
    runner = session(assemble([stack], every(stack, k)))
    for N, T in ((1, 1), (3, k), (2, k + 4)):  # one file, any batch and time
        x = random_inputs(seed, stack, N, T)
        assert (outputs(runner, x) - run_stack(stack, x, every(stack, k))).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_outputs_up_to_the_depth_are_exact_and_later_ones_see_the_window(kind, reverse):
    cell = random_cell(3, kind, gain=2.0)
    stack = single(cell, random_states(4, cell, scale=0.5), reverse=reverse)
    (r,) = stack.recurrences()
    x = random_inputs(5, stack, 2, 12)
    y = outputs(assemble([stack], {r.label: 5}), x)
    full, cut = run(r, x), brute_force(r, x, 5)
    seen = slice(7, None) if reverse else slice(None, 5)
    torch.testing.assert_close(y[:, seen], full[:, seen], atol=1e-5, rtol=0)
    torch.testing.assert_close(y, cut, atol=1e-5, rtol=0)
    assert (y - full).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_stored_once_whatever_the_depth(kind):
    stack = random_stack(1, kind, hidden=16)
    sizes, nodes = [], []
    for k in (2, 3, 40):
        graph = assemble([stack], every(stack, k)).graph
        floats = [v for v in graph.initializers.values() if v.dtype == ir.DataType.FLOAT]
        sizes.append([(v.name, v.const_value.nbytes) for v in floats])
        nodes.append(len(graph))
    assert sizes[0] == sizes[1] == sizes[2]
    per_layer = nodes[1] - nodes[0]
    assert nodes[2] - nodes[1] == 37 * per_layer
    assert per_layer <= {"elman": 4, "gru": 12, "lstm": 14}[kind]
    assert operators(assemble([stack], every(stack, 3))) <= {
        *("Shape", "Slice", "Mul", "Reshape", "Concat", "Expand", "Neg", "Gemm"),
        *("Tanh", "Sigmoid", "Split", "Add", "Sub"),
    }


def test_names_are_readable():
    stack = random_stack(0, "elman", bidirectional=True)
    names = {node.name for node in assemble([stack], every(stack, 3)).graph}
    assert {"rnn/layer_0/forward/step_03/h", "rnn/layer_0/reverse/step_01/a"} <= names


@pytest.mark.parametrize(("dtype", "numpy_type"), [("float16", "f2"), ("float64", "f8")])
def test_weights_keep_the_type_of_the_source(dtype, numpy_type):
    model = replace(random_model(2, "lstm", readout=2), dtype=dtype)
    graph = truncate_graph(model, every(model, 4))
    x = random_inputs(2, model.stacks[0], 2, 6).transpose(0, 1).numpy().astype(numpy_type)
    (y,) = session(graph).run(["y"], {"x": x})
    exact = torch.from_numpy(x.astype(np.float64)).transpose(0, 1)
    expected = run_stack(model.stacks[0], exact, every(model, 4)).transpose(0, 1).numpy()
    assert y.dtype == np.dtype(numpy_type)
    assert np.abs(y - expected).max() <= (2e-3 if dtype == "float16" else 1e-14)


# ------------------------------------------------------------------------------- build


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_built_graph_runs_as_torch_does(kind, bidirectional):
    stack = random_stack(6, kind, layers=2, bidirectional=bidirectional)
    x = random_inputs(6, stack, 3, 8)
    graph = build(stack)
    assert operators(graph) & RECURRENT
    expected = torch_module(stack)(x)[0].detach()
    torch.testing.assert_close(outputs(graph, x), expected, atol=1e-6, rtol=0)


@settings(max_examples=30)
@given(cell=cells(), seed=seeds)
def test_a_built_node_runs_as_its_cell_is_read(cell, seed):
    stack = single(cell, random_states(seed, cell, scale=0.5))
    x = random_inputs(seed, stack, 2, 1)
    if isinstance(cell, LSTMCell) and (
        cell.projection is not None or (cell.clip and cell.clip_output)
    ):
        with pytest.raises(UnsupportedModelError, match="a layer that stays recurrent must"):
            build(stack)
        return
    expected = run_stack(stack, x)
    error = (outputs(build(stack), x) - expected).abs().max()
    assert error <= 1e-4 * max(1.0, float(expected.abs().max()))


def test_a_layer_without_a_depth_stays_recurrent_beside_a_truncated_one():
    stack = random_stack(8, "gru", layers=2, readout=3)
    depths = {"rnn[1]": 6}
    graph = assemble([stack], depths)
    assert sum(node.op_type == "GRU" for node in graph.graph) == 1
    x = random_inputs(8, stack, 2, 15)
    torch.testing.assert_close(outputs(graph, x), run_stack(stack, x, depths), atol=1e-5, rtol=0)


def test_several_stacks_make_one_graph():
    a, b = random_stack(1, "elman", name="a"), random_stack(2, "lstm", name="b")
    runner = session(assemble([a, b], every(a, 4)))
    x = random_inputs(1, a, 2, 7)
    fed = x.transpose(0, 1).contiguous().float().numpy()
    y_a, y_b = runner.run(["a/y", "b/y"], {"a/x": fed, "b/x": fed})
    for y, stack, depths in ((y_a, a, every(a, 4)), (y_b, b, {})):
        expected = run_stack(stack, x, depths).transpose(0, 1).numpy()
        np.testing.assert_allclose(y, expected, atol=1e-5, rtol=0)


def test_opset_and_type_must_be_known():
    with pytest.raises(UsageError, match="the opset must be from 11 to 24, got 9"):
        build(random_stack(0, "gru"), opset=9)
    with pytest.raises(UsageError, match=r"dtype must be one of float16, .*, got int8"):
        build(random_stack(0, "gru"), dtype="int8")


# ----------------------------------------------------------------------------- surgery


def graph_file(
    path: Path,
    cells_: Mapping[str, list[Cell]],
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, list[Any]],
    wanted: Mapping[str, int],
    *,
    opset: int = 17,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
    ir_version: int = 8,
) -> Path:
    """Write a graph; ``cells_`` holds the directions by prefix, ``wanted`` the outputs' ranks."""
    stored = dict(extra or {})
    for prefix, directions in cells_.items():
        built = build(Stack("s", (Layer(tuple(_both(directions))),))).graph
        for name in "WRB":
            tensor = built.initializers[f"s/layer_0/{name}"].const_value
            stored[f"{prefix}{name}"] = tensor.numpy()
    initializers = [numpy_helper.from_array(a, name) for name, a in stored.items()]
    ports = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in inputs.items()
    ]
    if ir_version < 4:
        ports += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in initializers]
    graph = helper.make_graph(
        nodes,
        "g",
        ports,
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank)
            for name, rank in wanted.items()
        ],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = ir_version
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def _both(directions: list[Cell]) -> list[Any]:
    return [recurrence(cell, reverse=bool(d)) for d, cell in enumerate(directions)]


def expected_states(cell: Cell, x: Tensor, k: int, *, reverse: bool = False) -> Tensor:
    """Return h after every step [N, T, H] at depth k."""
    return truncated(recurrence(cell, reverse=reverse), x, k)


@pytest.mark.parametrize("opset", [11, 14, 18])
def test_every_output_of_a_bidirectional_node_is_replaced(tmp_path, opset):
    pair = [random_cell(1, "lstm", gain=2.0), random_cell(2, "lstm", gain=2.0)]
    direction = {"hidden_size": 5, "direction": "bidirectional"}
    nodes = [
        helper.make_node("Relu", ["x"], ["rectified"], name="before"),
        helper.make_node(
            "LSTM", ["rectified", "W", "R", "B"], ["Y", "Y_h", "Y_c"], name="bi", **direction
        ),
        helper.make_node("Tanh", ["Y"], ["y"], name="after"),
        helper.make_node("Mul", ["Y_h", "two"], ["h"], name="doubled"),
    ]
    path = graph_file(
        tmp_path / "bi.onnx",
        {"": pair},
        nodes,
        {"x": ["T", "N", 3]},
        {"y": 4, "h": 3, "Y_c": 3},
        opset=opset,
        extra={"two": np.float32([2.0])},
    )
    model = loaders.load(path)
    before = ir.to_proto(model.graph).SerializeToString()
    written = truncate_graph(model, {"bi[0]": 4, "bi[0] reverse": 6})
    assert ir.to_proto(model.graph).SerializeToString() == before
    assert not operators(written) & RECURRENT
    assert written.graph.opset_imports[""] == opset
    source = onnx.load(path)
    result = onnx.load_from_string(serialize(written))
    kept = {node.name: node for node in result.graph.node}
    for node in source.graph.node:
        assert node.name == "bi" or kept[node.name] == node
    stored = {tensor.name: tensor for tensor in result.graph.initializer}
    assert not {"W", "R", "B"} & set(stored)
    assert stored["two"] == next(t for t in source.graph.initializer if t.name == "two")
    x = normal(generator(3), 2, 9, 3)
    y, h, c = session(written).run(None, {"x": x.transpose(0, 1).contiguous().float().numpy()})
    rectified = x.relu()
    cut = [
        expected_states(cell, rectified, k, reverse=bool(d))
        for d, (cell, k) in enumerate(zip(pair, (4, 6), strict=True))
    ]
    stacked = torch.stack(cut).permute(2, 0, 1, 3)  # [T, D, N, H]
    np.testing.assert_allclose(y, stacked.tanh().numpy(), atol=1e-5, rtol=0)
    last = torch.stack([cut[0][:, -1], cut[1][:, 0]])
    np.testing.assert_allclose(h, 2 * last.numpy(), atol=1e-5, rtol=0)
    assert c.shape == (2, 2, 5)
    for d, (cell, k) in enumerate(zip(pair, (4, 6), strict=True)):
        window = rectified.flip(1)[:, -k:] if d else rectified[:, -k:]
        node = build(single(cell))
        state = _last_cell_state(cell, window)
        np.testing.assert_allclose(c[d], state.numpy(), atol=1e-5, rtol=0)
        assert operators(node) & RECURRENT


def _last_cell_state(cell: Cell, x: Tensor) -> Tensor:
    """Return c after the last step with PyTorch's LSTM."""
    _, (_, c) = torch_module(single(cell))(x)
    return c[0].detach()


def test_layout_1_is_batch_first_in_and_out(tmp_path):
    cell = random_cell(4, "gru")
    node = helper.make_node(
        *("GRU", ["x", "W", "R", "B"], ["Y", "Y_h"]),
        name="gru",
        hidden_size=5,
        linear_before_reset=1,
        layout=1,
    )
    path = graph_file(
        tmp_path / "layout.onnx", {"": [cell]}, [node], {"x": ["N", "T", 3]}, {"Y": 4, "Y_h": 3}
    )
    written = truncate_graph(loaders.load(path), {"gru[0]": 3})
    x = normal(generator(1), 2, 6, 3)
    Y, Y_h = session(written).run(None, {"x": x.float().numpy()})
    expected = expected_states(cell, x, 3)
    np.testing.assert_allclose(Y, expected.unsqueeze(2).numpy(), atol=1e-5, rtol=0)
    np.testing.assert_allclose(Y_h, expected[:, -1:].numpy(), atol=1e-5, rtol=0)


def gru_node(name: str, x: str, y: str, *, state: str = "", lens: str = "") -> onnx.NodeProto:
    return helper.make_node(
        *("GRU", [x, "W", "R", "B", lens, state], [y, f"{y}_h"]),
        name=name,
        hidden_size=5,
        linear_before_reset=1,
    )


def gru_file(
    path: Path, nodes: list[onnx.NodeProto], inputs: dict[str, list[Any]], **kw: Any
) -> Path:
    cell = random_cell(4, "gru", inputs=5)
    return graph_file(path, {"": [cell]}, nodes, {"x": ["T", "N", 5], **inputs}, {"y": 4}, **kw)


def test_an_initial_state_that_was_an_input_is_dropped(tmp_path):
    moved = helper.make_node("Identity", ["h0"], ["state"], name="moved")
    nodes = [moved, gru_node("gru", "x", "y", state="state")]
    path = gru_file(tmp_path / "state.onnx", nodes, {"h0": [1, "N", 5]})
    written = truncate_graph(loaders.load(path), {"gru[0]": 3})
    assert [v.name for v in written.graph.inputs] == ["x"]
    assert "Identity" not in operators(written)


def test_an_initial_state_stays_while_a_layer_that_stays_reads_it(tmp_path):
    squeeze = helper.make_node("Squeeze", ["a", "axis"], ["b"], name="squeeze")
    nodes = [
        gru_node("one", "x", "a", state="h0"),
        squeeze,
        gru_node("two", "b", "y", state="h0"),
    ]
    extra = {"axis": np.int64([1])}
    path = gru_file(tmp_path / "shared.onnx", nodes, {"h0": [1, "N", 5]}, extra=extra)
    model = loaders.load(path)
    labels = [r.label for r in model.recurrences()]
    assert len(truncate_graph(model, dict.fromkeys(labels, 3)).graph.inputs) == 1
    kept = truncate_graph(model, {labels[0]: 3})
    assert [v.name for v in kept.graph.inputs] == ["x", "h0"]


def test_sequence_lengths_are_refused_unless_every_sequence_is_full(tmp_path):
    nodes = [gru_node("gru", "x", "y", lens="lens")]
    cell = random_cell(4, "gru", inputs=5)

    def written(lengths: list[int]) -> ir.Model:
        path = graph_file(
            tmp_path / "lens.onnx",
            {"": [cell]},
            nodes,
            {"x": [6, 2, 5]},
            {"y": 4},
            extra={"lens": np.int32(lengths)},
        )
        return truncate_graph(loaders.load(path), {"gru[0]": 3})

    assert not operators(written([6, 6])) & RECURRENT
    with pytest.raises(UnsupportedModelError, match=r"got sequence_lens \(lens\) at node gru"):
        written([6, 4])


def test_a_state_that_the_graph_computes_starts_every_window(tmp_path):
    cell = random_cell(4, "gru", inputs=5)
    nodes = [
        helper.make_node("Slice", ["x", "zero", "one"], ["first"], name="first"),
        helper.make_node("Tanh", ["first"], ["state"], name="state"),
        gru_node("gru", "x", "y", state="state"),
    ]
    extra = {"zero": np.int64([0]), "one": np.int64([1])}
    path = graph_file(
        tmp_path / "computed.onnx", {"": [cell]}, nodes, {"x": ["T", "N", 5]}, {"y": 4}, extra=extra
    )
    x = normal(generator(9), 2, 7, 5)
    fed = {"x": x.transpose(0, 1).contiguous().float().numpy()}
    (y,) = session(truncate_graph(loaders.load(path), {"gru[0]": 4})).run(None, fed)
    (full,) = session(path.read_bytes()).run(None, fed)
    np.testing.assert_allclose(y[:4], full[:4], atol=1e-5, rtol=0)
    for row in range(2):
        r = recurrence(cell, x[row, 0].tanh())
        expected = truncated(r, x[row : row + 1], 4)[0].numpy()
        np.testing.assert_allclose(y[:, 0, row], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", [0, 1])
def test_a_computed_state_is_taken_apart_by_direction_and_part(tmp_path, layout):
    pair = [random_cell(1, "lstm"), random_cell(2, "lstm")]
    nodes = [
        helper.make_node("ReduceSum", ["x", "axes"], ["sum"], keepdims=1, name="sum"),
        helper.make_node("Mul", ["sum", "weights"], ["state"], name="state"),
        helper.make_node(
            *("LSTM", ["x", "W", "R", "B", "", "state"], ["y"]),
            name="bi",
            hidden_size=5,
            direction="bidirectional",
            layout=layout,
        ),
    ]
    weights = normal(generator(2), 2, 1, 5) if layout == 0 else normal(generator(2), 1, 2, 5)
    extra = {"axes": np.int64([layout, 2]), "weights": weights.float().numpy()}
    ports = {"x": ["T", "N", 3] if layout == 0 else ["N", "T", 3]}
    path = graph_file(tmp_path / "two.onnx", {"": pair}, nodes, ports, {"y": 4}, extra=extra)
    x = normal(generator(3), 2, 6, 3)
    fed = x.transpose(0, 1).contiguous() if layout == 0 else x
    model = loaders.load(path)
    (y,) = session(truncate_graph(model, every(model, 3))).run(None, {"x": fed.float().numpy()})
    y = y.transpose(2, 1, 0, 3) if layout == 0 else y.transpose(0, 2, 1, 3)  # [N, D, T, H]
    for row, total in enumerate(x.sum((1, 2))):
        for d, cell in enumerate(pair):
            h = total * weights.reshape(2, 5)[d]
            start = torch.cat([h, torch.zeros_like(h)])
            r = recurrence(cell, start, reverse=bool(d))
            expected = truncated(r, x[row : row + 1], 3)[0].numpy()
            np.testing.assert_allclose(y[row, d], expected, atol=1e-5, rtol=0)


def test_a_node_stays_while_one_of_its_directions_has_no_depth(tmp_path):
    pair = [random_cell(1, "elman"), random_cell(2, "elman")]
    node = helper.make_node(
        *("RNN", ["x", "W", "R", "B"], ["y"]),
        name="bi",
        hidden_size=5,
        direction="bidirectional",
    )
    path = graph_file(tmp_path / "bi.onnx", {"": pair}, [node], {"x": ["T", "N", 3]}, {"y": 4})
    written = truncate_graph(loaders.load(path), {"bi[0]": 4})
    assert "RNN" in operators(written)
    assert json.loads(written.metadata_props["rnnaudit.depths"]) == {}


def test_an_old_opset_is_raised_and_old_inputs_are_dropped(tmp_path):
    nodes = [gru_node("gru", "x", "y")]
    path = gru_file(tmp_path / "old.onnx", nodes, {}, opset=9, ir_version=3)
    written = truncate_graph(loaders.load(path), {"gru[0]": 3})
    assert written.graph.opset_imports[""] == 17
    assert [v.name for v in written.graph.inputs] == ["x"]
    x = normal(generator(1), 2, 6, 5)
    fed = {"x": x.transpose(0, 1).contiguous().float().numpy()}
    (y,) = session(written).run(None, fed)
    (full,) = session(path.read_bytes()).run(None, fed)
    np.testing.assert_allclose(y[:3], full[:3], atol=1e-5, rtol=0)


def test_a_node_in_a_branch_of_if_is_replaced_there(tmp_path):
    cell = random_cell(4, "gru", inputs=5)
    branch = helper.make_graph(
        [gru_node("inner", "x", "taken")],
        "branch",
        [],
        [helper.make_tensor_value_info("taken", TensorProto.FLOAT, [None] * 4)],
    )
    other = helper.make_graph(
        [helper.make_node("Unsqueeze", ["x", "one"], ["left"])],
        "other",
        [],
        [helper.make_tensor_value_info("left", TensorProto.FLOAT, [None] * 4)],
    )
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=branch, else_branch=other),
    ]
    extra = {"zero": np.float32(0.0), "one": np.int64([1])}
    path = graph_file(
        tmp_path / "if.onnx", {"": [cell]}, nodes, {"x": ["T", "N", 5]}, {"y": 4}, extra=extra
    )
    model = loaders.load(path)
    written = truncate_graph(model, every(model, 3))
    assert operators(written) & RECURRENT == {"If"}
    x = normal(generator(1), 2, 6, 5).abs()
    (y,) = session(written).run(None, {"x": x.transpose(0, 1).contiguous().float().numpy()})
    expected = expected_states(cell, x, 3).transpose(0, 1).numpy()
    np.testing.assert_allclose(y[:, 0], expected, atol=1e-5, rtol=0)


def branches(name, node, taken, condition):
    """Choose between a node that gives y [T, 1, N, H] and x in its place, by a graph input."""
    shape = [None] * 4
    chosen = helper.make_graph(
        [node], f"{name}_then", [], [helper.make_tensor_value_info(taken, TensorProto.FLOAT, shape)]
    )
    left = f"{name}_left"
    other = helper.make_graph(
        [helper.make_node("Unsqueeze", ["x", "one"], [left])],
        f"{name}_else",
        [],
        [helper.make_tensor_value_info(left, TensorProto.FLOAT, shape)],
    )
    test = helper.make_node("Greater", [condition, "zero"], [f"{name}_test"])
    choice = helper.make_node(
        "If", [f"{name}_test"], [name], name=name, then_branch=chosen, else_branch=other
    )
    return [test, choice]


def nested(folder):
    """Write a graph with a GRU in a branch of an If in a branch of an If, and its cell."""
    cell = random_cell(4, "gru", inputs=5)
    inner = branches("inner", gru_node("gru", "x", "taken"), "taken", "b")
    outer = branches("y", inner[1], "inner", "a")
    path = graph_file(
        *(folder / "if.onnx", {"": [cell]}, [inner[0], *outer]),
        {"x": ["T", "N", 5], "a": [], "b": []},
        {"y": 4},
        extra={"zero": np.float32(0.0), "one": np.int64([1])},
    )
    return path, cell


@pytest.mark.parametrize("form", [WINDOW, Form("chunk", 3)])
def test_a_guard_comes_up_from_a_branch_in_a_branch_and_is_zero_elsewhere(tmp_path, form):
    path, cell = nested(tmp_path)
    model = loaders.load(path)
    written = truncate_graph(model, every(model, 6), {"gru[0]": form}, guarded=True)
    assert [v.name for v in written.graph.outputs] == ["y", "guard"]
    x = normal(generator(1), 2, 9, 5)
    fed = {"x": x.transpose(0, 1).contiguous().float().numpy()}
    run = session(written)
    deep, shallow = (expected_states(cell, x, k) for k in (6, 3))
    gap = (deep - shallow).abs()[:, slice(None) if form.name == "window" else slice(5, None, 3)]
    for a, b in ((1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0)):
        y, guard = run.run(
            None, {**fed, "a": np.array(a, np.float32), "b": np.array(b, np.float32)}
        )
        assert guard.shape == ()
        if a > 0 and b > 0:
            np.testing.assert_allclose(y[:, 0], deep.transpose(0, 1).numpy(), atol=1e-5, rtol=0)
            assert guard == pytest.approx(float(gap.max()), abs=1e-5)
        else:
            np.testing.assert_array_equal(y[:, 0], fed["x"])
            assert guard == 0.0


def test_a_guarded_branch_verifies(tmp_path):
    path, _ = nested(tmp_path)
    report = rnnaudit.truncate(
        path, tmp_path / "cut.onnx", eps=0.1, depth=24, guard=True, time_budget=20
    )
    assert report.equivalence.passed
    assert report.export.outputs == ("y", "guard")


@pytest.mark.parametrize(
    ("held", "shape", "names"),
    [
        ("guard", Shape(guard=True), ("y", "guard_2")),
        ("past", Shape(streaming=True), ("y", "past_next")),
        ("past_next", Shape(streaming=True), ("y", "past_next_2")),
    ],
)
def test_what_is_added_is_not_called_as_a_weight_of_the_graph_is(tmp_path, held, shape, names):
    nodes = [
        gru_node("gru", "x", "h"),
        helper.make_node("Squeeze", ["h", "one"], ["flat"]),
        helper.make_node("Mul", ["flat", held], ["y"]),
    ]
    path = graph_file(
        *(tmp_path / "m.onnx", {"": [random_cell(4, "gru", inputs=5)]}, nodes),
        *({"x": ["T", "N", 5]}, {"y": 3}),
        extra={"one": np.int64([1]), held: np.float32([2.0])},
    )
    model = loaders.load(path)
    forms = choose(model, every(model, 4), shape)
    run = session(truncate_graph(model, every(model, 4), forms, guarded=shape.guard))
    assert tuple(v.name for v in run.get_outputs()) == names
    x = np.ones((3, 2, 5), np.float32)
    buffers = {v.name: x[:0] for v in run.get_inputs() if v.name != "x"}
    (wanted,) = onnxruntime.InferenceSession(path).run(["y"], {"x": x})
    (y,) = run.run(["y"], {"x": x, **buffers})
    np.testing.assert_allclose(y, wanted, atol=1e-5, rtol=0)


def test_a_guard_takes_the_largest_of_a_branch_and_the_top(tmp_path):
    cell = random_cell(4, "gru", inputs=5)
    nodes = [
        *branches("chosen", gru_node("inner", "x", "taken"), "taken", "a"),
        helper.make_node("Squeeze", ["chosen", "one"], ["h"]),
        gru_node("top", "h", "y"),
    ]
    path = graph_file(
        *(tmp_path / "both.onnx", {"": [cell]}, nodes, {"x": ["T", "N", 5], "a": []}, {"y": 4}),
        extra={"zero": np.float32(0.0), "one": np.int64([1])},
    )
    model = loaders.load(path)
    cut = session(truncate_graph(model, every(model, 4), guarded=True))
    x = normal(generator(2), 1, 12, 5)
    fed = {"x": x.transpose(0, 1).contiguous().float().numpy()}

    def gap(of):
        return float((expected_states(cell, of, 4) - expected_states(cell, of, 2)).abs().max())

    _, without = cut.run(None, {**fed, "a": np.array(-1, np.float32)})
    assert without == pytest.approx(gap(x), abs=1e-5)
    _, both = cut.run(None, {**fed, "a": np.array(1, np.float32)})
    assert both == pytest.approx(max(gap(x), gap(expected_states(cell, x, 4))), abs=1e-5)


def test_depths_must_be_positive_and_name_recurrences():
    model = random_model(0, "gru")
    with pytest.raises(UsageError, match=r"a depth must name one of rnn\[0\], got rnn\[1\]"):
        truncate_graph(model, {"rnn[1]": 3})
    with pytest.raises(UsageError, match=r"the depth of rnn\[0\] must be at least 1, got 0"):
        truncate_graph(model, {"rnn[0]": 0})


def test_the_model_says_how_it_was_made():
    model = random_model(0, "gru", layers=2)
    written = truncate_graph(model, {"rnn[0]": 3}, metadata={"eps": "0.001", "evidence": "proved"})
    stored = {entry.key: entry.value for entry in ir.to_proto(written).metadata_props}
    assert json.loads(stored["rnnaudit.depths"]) == {"rnn[0]": 3}
    assert stored["rnnaudit.source_sha256"] == "0" * 64
    assert (stored["rnnaudit.eps"], stored["rnnaudit.evidence"]) == ("0.001", "proved")
    assert json.loads(stored["rnnaudit.form"]) == {"rnn[0]": "window"}
    assert stored["rnnaudit.version"]


def test_a_projected_lstm_is_truncated_though_onnx_has_no_node_for_it():
    model = random_model(3, "lstm", layers=2, projection=2)
    written = truncate_graph(model, every(model, 5))
    x = random_inputs(3, model.stacks[0], 2, 9)
    expected = run_stack(model.stacks[0], x, every(model, 5))
    torch.testing.assert_close(outputs(written, x), expected, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------- files


def test_a_file_is_replaced_in_one_step(tmp_path):
    stack = random_stack(0, "gru")
    path = tmp_path / "out.onnx"
    path.write_bytes(b"old")
    write(assemble([stack], every(stack, 3)), path)
    onnx.checker.check_model(str(path), full_check=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]


def test_a_failed_write_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    stack = random_stack(0, "gru")
    path = tmp_path / "out.onnx"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"must be writable, got .*out.onnx: No space left"):
        write(assemble([stack], every(stack, 3)), path)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("out.onnx", b"old")]


def test_the_folder_must_exist(tmp_path):
    stack = random_stack(0, "gru")
    with pytest.raises(UsageError, match=r"a folder that exists, got .*nowhere/out.onnx"):
        write(build(stack), tmp_path / "nowhere" / "out.onnx")
    with pytest.raises(UsageError, match="the output must be a file, got the folder"):
        write(build(stack), tmp_path)


def test_a_graph_that_is_not_valid_is_not_written(tmp_path):
    graph = build(random_stack(0, "gru"))
    graph.graph[0].op_type = "NoSuchOperator"
    with pytest.raises(UnsupportedModelError, match=r"must pass onnx.checker, got: .*NoSuchOp"):
        write(graph, tmp_path / "out.onnx")
    assert not list(tmp_path.iterdir())


def test_weights_stored_beside_the_source_come_into_the_file(tmp_path):
    nodes = [gru_node("gru", "x", "y")]
    path = gru_file(tmp_path / "small.onnx", nodes, {}, extra={"unused": np.ones(300, np.float32)})
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("Add", ["y", "unused_sum"], ["z"], name="sum"))
    model.graph.node.insert(
        0, helper.make_node("ReduceSum", ["unused"], ["unused_sum"], keepdims=0, name="reduce")
    )
    model.graph.output[0].name = "z"
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "model.onnx"
    onnx.save(model, source, save_as_external_data=True, location="data", size_threshold=0)
    written = truncate_graph(loaders.load(source), {"gru[0]": 3})
    write(written, tmp_path / "elsewhere.onnx")
    onnx.checker.check_model(str(tmp_path / "elsewhere.onnx"))
    fed = {"x": np.zeros((3, 1, 5), np.float32)}
    (z,) = session((tmp_path / "elsewhere.onnx").read_bytes()).run(None, fed)
    (expected,) = onnxruntime.InferenceSession(source).run(None, fed)
    np.testing.assert_allclose(z, expected, atol=1e-4, rtol=0)
    (source.parent / "data").unlink()
    with pytest.raises(LoadError):
        loaders.load(source)


@pytest.mark.parametrize("existing", [False, True])
def test_weights_too_large_for_one_file_go_beside_it(tmp_path, existing):
    model = random_model(4, "lstm", hidden=16)
    path = tmp_path / "out.onnx"
    if existing:
        path.write_bytes(b"old")
    write(truncate_graph(model, every(model, 5)), path, largest=1000)
    assert {p.name for p in tmp_path.iterdir()} == {"out.onnx", "out.onnx.data"}
    assert path.with_name("out.onnx.data").stat().st_size >= 3 * 16 * 16 * 4
    x = random_inputs(4, model.stacks[0], 2, 9)
    found = outputs(onnxruntime.InferenceSession(path), x)
    expected = run_stack(model.stacks[0], x, every(model, 5))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("opset", [11, 13, 18, 21])
@pytest.mark.parametrize("kind", KINDS)
def test_the_opset_that_is_wanted_is_written(tmp_path, opset, kind):
    model = random_model(7, kind)
    graphs = [truncate_graph(model, every(model, 4), opset=opset)]
    path = tmp_path / "source.onnx"
    path.write_bytes(serialize(build(model.stacks[0], opset=min(opset, 17))))
    source = loaders.load(path)
    graphs.append(truncate_graph(source, every(source, 4), opset=opset))
    x = random_inputs(7, model.stacks[0], 2, 9)
    for graph in graphs:
        assert graph.graph.opset_imports[""] == opset
        expected = run_stack(model.stacks[0], x, every(model, 4))
        torch.testing.assert_close(outputs(graph, x), expected, atol=1e-5, rtol=0)


def test_an_opset_that_onnx_cannot_convert_to_is_refused(tmp_path):
    path = gru_file(tmp_path / "new.onnx", [gru_node("gru", "x", "y")], {}, opset=17)
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("LayerNormalization", ["y", "W"], ["z"]))
    model.graph.output[0].name = "z"
    onnx.save(model, path)
    wanted = (
        "opset 11 was wanted, got a graph with LayerNormalization, which came with opset 17; "
        "leave out --opset, or give --opset 17 or more"
    )
    with pytest.raises(UnsupportedModelError, match=wanted):
        truncate_graph(loaders.load(path), {"gru[0]": 3}, opset=11)
    model.graph.node[-1].CopyFrom(helper.make_node("ReduceSum", ["y", "axes"], ["z"]))
    axes = helper.make_tensor_value_info("axes", TensorProto.INT64, [1])
    model.graph.input.append(axes)
    onnx.save(model, path)
    wanted = (
        r"opset 11 was wanted, and onnx cannot convert the graph from 17: .*; leave out --opset"
    )
    with pytest.raises(UnsupportedModelError, match=wanted) as refused:
        truncate_graph(loaders.load(path), {"gru[0]": 3}, opset=11)
    assert "project" not in str(refused.value)
    with pytest.raises(UsageError, match="opset must be from 11 to 24, got 99"):
        truncate_graph(random_model(0, "gru"), {"rnn[0]": 3}, opset=99)


def softmax_in_a_branch(path, opset):
    """Write a GRU whose outputs pass a Softmax, of the axis that the opset takes, in a branch."""
    shape = [None] * 3
    branch, other = (
        helper.make_graph(
            [helper.make_node(kind, ["h"], [out])],
            out,
            [],
            [helper.make_tensor_value_info(out, TensorProto.FLOAT, shape)],
        )
        for kind, out in (("Softmax", "soft"), ("Identity", "same"))
    )
    nodes = [
        gru_node("gru", "x", "y0"),
        helper.make_node("Squeeze", ["y0"], ["h"], axes=[1]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "sum"], ["square"]),
        helper.make_node("Greater", ["square", "zero"], ["always"]),
        helper.make_node("If", ["always"], ["y"], then_branch=branch, else_branch=other),
    ]
    inputs, extra = {"x": ["T", "N", 5]}, {"zero": np.float32(-1)}
    cell = random_cell(4, "gru", inputs=5)
    return graph_file(path, {"": [cell]}, nodes, inputs, {"y": 3}, opset=opset, extra=extra)


def test_an_operator_in_a_branch_keeps_its_meaning_in_another_opset(tmp_path):
    # Up to opset 12 Softmax flattens all axes from the second on; from 13 on it takes the last.
    path = softmax_in_a_branch(tmp_path / "soft.onnx", 11)
    report = rnnaudit.truncate(
        path, tmp_path / "cut.onnx", depth=30, eps=1e-2, opset=17, time_budget=10
    )
    assert (report.export.opset, report.equivalence.passed) == (17, True)


@pytest.mark.parametrize(
    ("opset", "advice"),
    [
        (17, "leave out --opset, or export the model again in opset 17"),
        (None, "export the model again in opset 17"),
    ],
)
def test_a_graph_that_errs_in_another_opset_is_refused_before_it_is_cut(
    tmp_path, monkeypatch, opset, advice
):
    path = softmax_in_a_branch(tmp_path / "soft.onnx", 11 if opset else 10)
    convert = onnx.version_converter.convert_version

    def wrong(model, opset):
        made = convert(model, opset)
        bodies = [a.g for node in made.graph.node for a in node.attribute if a.HasField("g")]
        (softmax,) = (n for body in bodies for n in body.node if n.op_type == "Softmax")
        softmax.attribute[0].i = 0
        return made

    monkeypatch.setattr(onnx.version_converter, "convert_version", wrong)
    wanted = (
        r"a graph of opset 17 was wanted, and that of opset 1[01] does not convert: not truncated, "
        rf"it errs by [\d.]+, more than ε = 1e-2; {advice}$"
    )
    with pytest.raises(UnsupportedModelError, match=wanted):
        rnnaudit.truncate(path, tmp_path / "cut.onnx", depth=20, eps=1e-2, opset=opset)
    assert not (tmp_path / "cut.onnx").exists()


@pytest.mark.parametrize(("was", "wanted"), [(18, 11), (11, 21)])
def test_a_given_graph_goes_up_and_down_in_opset(tmp_path, was, wanted):
    axes = (np.int64([1]),) if was >= 13 else ()
    nodes = [
        gru_node("gru", "x", "y0"),
        helper.make_node("Squeeze", ["y0", "one"], ["h"])
        if axes
        else helper.make_node("Squeeze", ["y0"], ["h"], axes=[1]),
        helper.make_node("Softmax", ["h"], ["y"], axis=2),
    ]
    path = graph_file(
        tmp_path / "given.onnx",
        *({"": [random_cell(4, "gru", inputs=5)]}, nodes, {"x": ["T", "N", 5]}, {"y": 3}),
        opset=was,
        extra={"one": axes[0]} if axes else None,
    )
    report = rnnaudit.truncate(
        path, tmp_path / "cut.onnx", depth=40, eps=1e-2, opset=wanted, time_budget=10
    )
    assert report.export.opset == wanted
    assert report.equivalence.passed


def test_bfloat16_weights_are_written_as_float32():
    model = replace(random_model(2, "gru"), dtype="bfloat16")
    graph = truncate_graph(model, every(model, 3))
    assert graph.graph.inputs[0].dtype == ir.DataType.FLOAT
