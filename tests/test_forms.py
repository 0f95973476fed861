"""Every form is the truncated model: each output is that of a run restarted where it says."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

import rnnaudit
from rnnaudit import loaders
from rnnaudit.cells import output, reads, run, run_stack, step, truncated
from rnnaudit.errors import UnsupportedModelError, UsageError
from rnnaudit.export import assemble, build, choose, truncate_graph
from rnnaudit.export.costs import LONGEST, Costs
from rnnaudit.export.files import serialize
from rnnaudit.export.filter import linear_map, taps
from rnnaudit.export.sequences import half
from rnnaudit.model import Activation, Cell, ElmanCell, LSTMCell, Recurrence, Stack
from rnnaudit.truncation import WINDOW, Form, Shape
from rnnaudit.verification import verify
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
)
from tests.test_export import (
    ONLY_FLOAT32,
    RECURRENT,
    _functions,
    every,
    expected_states,
    graph_file,
    gru_file,
    gru_node,
    operators,
    outputs,
    session,
    single,
)


def first_seen(t: int, k: int, C: int) -> int:
    """Return the first of the inputs 1 … T that the output of step t sees in the chunk form."""
    return 1 + max(0, t - k) // C * C


def restarted(r: Recurrence, x: Tensor, k: int, C: int) -> Tensor:
    """Run every output from the initial state before the first input that it sees."""
    x, ends = reads(r, x), []
    for t in range(1, x.shape[1] + 1):
        s = r.initial.value.expand(x.shape[0], -1)
        for u in range(first_seen(t, k, C), t + 1):
            s = step(r.cell, s, x[:, u - 1])
        ends.append(output(r.cell, s))
    return reads(r, torch.stack(ends, dim=1))


# ---------------------------------------------------------------------------- the chunk


@given(t=st.integers(1, 400), k=st.integers(1, 60), C=st.integers(1, 60))
def test_every_output_sees_its_last_k_inputs_and_fewer_than_k_plus_c(t, k, C):
    first = first_seen(t, k, C)
    assert min(t, k) <= t - first + 1 <= k - 1 + C
    assert (first - 1) % C == 0


@settings(max_examples=40, deadline=None)
@given(
    cell=cells(),
    seed=seeds,
    k=st.integers(1, 7),
    C=st.integers(1, 6),
    T=st.integers(1, 20),
    data=st.data(),
)
def test_a_chunk_of_any_cell_is_the_run_restarted_at_its_block(cell, seed, k, C, T, data):  # noqa: PLR0917
    start = random_states(seed, cell, scale=0.5) if data.draw(st.booleans()) else None
    stack = single(cell, start, reverse=data.draw(st.booleans()))
    (r,) = stack.recurrences()
    x = random_inputs(seed, stack, data.draw(st.integers(1, 3)), T)
    expected = restarted(r, x, k, C)
    assume(expected.abs().max() < 1e6)  # unbounded functions may explode
    assert (truncated(r, x, k, C) - expected).abs().max() <= 1e-9 * expected.abs().max()
    graph = assemble([stack], {r.label: k}, {r.label: Form("chunk", C)}, dtype="float64")
    feed = {"x": x.transpose(0, 1).contiguous().numpy()}
    # In float64 rounding cannot hide a wrong graph; ONNX Runtime has not all functions there.
    if any(name in ONLY_FLOAT32 for name in _functions(cell)):
        evaluator = ReferenceEvaluator(onnx.load_from_string(serialize(graph)))
        # It takes exp on both sides of ELU's kink, and unbounded cells explode in blocks of
        # padding, which nothing reads.
        with np.errstate(all="ignore"):
            (y,) = evaluator.run(None, feed)
    else:
        (y,) = session(graph).run(["y"], feed)
    error = (torch.from_numpy(y).transpose(0, 1) - expected).abs().max()
    assert error <= 1e-9 * max(1.0, float(expected.abs().max()))
    assert not operators(graph) & RECURRENT


@settings(max_examples=20, deadline=None)
@given(
    cell=cells(),
    seed=seeds,
    k=st.integers(1, 7),
    C=st.integers(1, 6),
    reverse=st.booleans(),
    start=st.booleans(),
)
def test_kept_operators_run_the_same_blocks(cell, seed, k, C, reverse, start):  # noqa: PLR0917
    stack = single(cell, random_states(seed, cell, scale=0.5) if start else None, reverse=reverse)
    (r,) = stack.recurrences()
    form = {r.label: Form("chunk", C, keep_ops=True)}
    if isinstance(cell, LSTMCell) and (
        cell.projection is not None or (cell.clip and cell.clip_output)
    ):
        with pytest.raises(UnsupportedModelError, match="a layer that stays recurrent must"):
            assemble([stack], {r.label: k}, form)
        return
    graph = assemble([stack], {r.label: k}, form)
    assert operators(graph) & RECURRENT == {{"elman": "RNN"}.get(cell.kind, cell.kind.upper())}
    # The operator itself is the reference: cells that explode are hard on float32.
    runner, whole = session(graph), session(build(stack))
    for N, T in ((1, 1), (2, k), (3, k + 2 * C + 1)):
        x = random_inputs(seed, stack, N, T)
        past, ends = reads(r, x), []
        for t in range(1, T + 1):
            seen = past[:, first_seen(t, k, C) - 1 : t]
            ends.append(reads(r, outputs(whole, reads(r, seen)))[:, -1])
        expected = reads(r, torch.stack(ends, dim=1))
        assume(expected.abs().max() < 1e6)
        error = (outputs(runner, x) - expected).abs().max()
        assert error <= 1e-5 * max(1.0, float(expected.abs().max()))


@settings(max_examples=20, deadline=None)
@given(
    seed=seeds,
    kind=st.sampled_from(KINDS),
    k=st.integers(1, 9),
    C=st.integers(1, 7),
    keep_ops=st.booleans(),
    shape=st.fixed_dictionaries(
        {
            "layers": st.integers(1, 2),
            "bidirectional": st.booleans(),
            "readout": st.sampled_from([None, 2]),
            "start": st.sampled_from(["zero", "constant"]),
        }
    ),
)
def test_one_file_runs_any_length_and_batch(seed, kind, k, C, keep_ops, shape):  # noqa: PLR0917
    stack = random_stack(seed, kind, **shape)
    depths = every(stack, k)
    form = dict.fromkeys(depths, Form("chunk", C, keep_ops))
    runner = session(assemble([stack], depths, form))
    for N, T in ((1, 1), (3, max(1, k - 1)), (2, k), (1, k + C), (2, k + 3 * C + 1)):
        x = random_inputs(seed, stack, N, T)
        expected = run_stack(stack, x, depths, dict.fromkeys(depths, C))
        assert (outputs(runner, x) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("keep_ops", [False, True])
def test_outputs_up_to_the_depth_are_exact(kind, reverse, keep_ops):
    cell = random_cell(3, kind, gain=2.0)
    stack = single(cell, random_states(4, cell, scale=0.5), reverse=reverse)
    (r,) = stack.recurrences()
    x = random_inputs(5, stack, 2, 30)
    y = outputs(assemble([stack], {r.label: 5}, {r.label: Form("chunk", 8, keep_ops)}), x)
    seen = slice(-12, None) if reverse else slice(None, 12)  # the first block: k − 1 + C
    torch.testing.assert_close(y[:, seen], run(r, x)[:, seen], atol=1e-5, rtol=0)
    assert (y - run(r, x)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_contraction_keeps_every_form_within_the_same_bound(kind):
    stack = random_stack(11, kind, gain=0.4)
    (r,) = stack.recurrences()
    x = random_inputs(11, stack, 4, 60)
    for k in (4, 16):
        # A later restart never sees fewer inputs, so its error is at most that of some k' ≥ k.
        worst = max((truncated(r, x, d) - run(r, x)).abs().max() for d in range(k, k + 16))
        for C in (1, 3, 16):
            assert (truncated(r, x, k, C) - run(r, x)).abs().max() <= worst


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_stored_once_whatever_the_depth_and_the_block(kind):
    stack = random_stack(1, kind, hidden=16)
    stored, nodes = [], []
    for k, C in ((2, 8), (3, 8), (40, 8), (40, 9), (40, 60)):
        graph = assemble([stack], every(stack, k), {"rnn[0]": Form("chunk", C)}).graph
        values = [v for v in graph.initializers.values() if v.dtype == ir.DataType.FLOAT]
        stored.append([(v.name, v.const_value.nbytes) for v in values])
        nodes.append(len(graph))
    assert all(names == stored[0] for names in stored)
    per_step = {"elman": 5, "gru": 15, "lstm": 18}[kind]
    assert nodes[1] - nodes[0] <= per_step + 3
    assert nodes[4] - nodes[3] <= 51 * per_step
    kept = assemble([stack], every(stack, 40), {"rnn[0]": Form("chunk", 60, keep_ops=True)})
    assert len(kept.graph) < 48


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_weights_keep_the_type_of_the_source(dtype):
    model = replace(random_model(2, "lstm", readout=2), dtype=dtype)
    graph = truncate_graph(model, every(model, 4), {"rnn[0]": Form("chunk", 3)})
    x = random_inputs(2, model.stacks[0], 2, 11).transpose(0, 1).numpy().astype(dtype)
    (y,) = session(graph).run(["y"], {"x": x})
    exact = torch.from_numpy(x.astype(np.float64)).transpose(0, 1)
    expected = run_stack(model.stacks[0], exact, every(model, 4), {"rnn[0]": 3}).transpose(0, 1)
    assert y.dtype == np.dtype(dtype)
    assert np.abs(y - expected.numpy()).max() <= (3e-3 if dtype == "float16" else 1e-14)


# ---------------------------------------------------------------------------- in a graph


@pytest.mark.parametrize("opset", [11, 14, 18])
@pytest.mark.parametrize("keep_ops", [False, True])
def test_every_output_of_a_node_is_replaced(tmp_path, opset, keep_ops):
    pair = [random_cell(1, "lstm", gain=2.0), random_cell(2, "lstm", gain=2.0)]
    node = helper.make_node(
        *("LSTM", ["x", "W", "R", "B"], ["Y", "Y_h", "Y_c"]),
        name="bi",
        hidden_size=5,
        direction="bidirectional",
    )
    path = graph_file(
        tmp_path / "bi.onnx",
        {"": pair},
        [node],
        {"x": ["T", "N", 3]},
        {"Y": 4, "Y_h": 3, "Y_c": 3},
        opset=opset,
    )
    model = loaders.load(path)
    depths = {"bi[0]": 4, "bi[0] reverse": 6}
    written = truncate_graph(model, depths, {"bi[0]": Form("chunk", 3, keep_ops)})
    assert written.graph.opset_imports[""] == opset
    assert ("LSTM" in operators(written)) == keep_ops
    for T in (1, 3, 9, 17):
        x = normal(generator(3), 2, T, 3)
        feed = {"x": x.transpose(0, 1).contiguous().float().numpy()}
        y, h, c = session(written).run(["Y", "Y_h", "Y_c"], feed)
        for d, (cell, k) in enumerate(zip(pair, (4, 6), strict=True)):
            r = recurrence(cell, reverse=bool(d))
            cut = restarted(r, x, k, 3)
            np.testing.assert_allclose(y[:, d], cut.transpose(0, 1).numpy(), atol=1e-5, rtol=0)
            end = 0 if d else -1
            np.testing.assert_allclose(h[d], cut[:, end].numpy(), atol=1e-5, rtol=0)
            # c is that of the block, or where operators are kept that of the last k steps.
            first = max(1, T - k + 1) if keep_ops else first_seen(T, k, 3)
            s = r.initial.value.expand(2, -1)
            for u in range(first, T + 1):
                s = step(cell, s, reads(r, x)[:, u - 1])
            np.testing.assert_allclose(c[d], s[:, 5:].numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", [Form("chunk", 3), Form("chunk", 3, keep_ops=True)])
def test_a_state_that_the_graph_computes_starts_every_block(tmp_path, form):
    cell = random_cell(4, "gru", inputs=5)
    nodes = [
        helper.make_node("Slice", ["x", "zero", "one"], ["first"], name="first"),
        helper.make_node("Tanh", ["first"], ["state"], name="state"),
        _gru("gru", "x", "y", state="state"),
    ]
    extra = {"zero": np.int64([0]), "one": np.int64([1])}
    ports = {"x": ["T", "N", 5]}
    path = graph_file(tmp_path / "computed.onnx", {"": [cell]}, nodes, ports, {"y": 4}, extra=extra)
    x = normal(generator(9), 2, 13, 5)
    fed = {"x": x.transpose(0, 1).contiguous().float().numpy()}
    (y,) = session(truncate_graph(loaders.load(path), {"gru[0]": 4}, {"gru[0]": form})).run(
        None, fed
    )
    for row in range(2):
        r = recurrence(cell, x[row, 0].tanh())
        expected = restarted(r, x[row : row + 1], 4, 3)[0].numpy()
        np.testing.assert_allclose(y[:, 0, row], expected, atol=1e-5, rtol=0)


def _gru(name: str, x: str, y: str, *, state: str = "") -> onnx.NodeProto:
    return helper.make_node(
        *("GRU", [x, "W", "R", "B", "", state], [y, f"{y}_h"]),
        name=name,
        hidden_size=5,
        linear_before_reset=1,
    )


# -------------------------------------------------------------------------- the last steps


def last_file(path: Path, pair: list[Cell], tail: list[Any], **extra: Any) -> Path:
    """Write two GRUs of which the graph reads what ``tail`` does of the second's ``b``."""
    nodes = [
        _gru("one", "x", "a"),
        helper.make_node("Squeeze", ["a", "one_"], ["flat"], name="flat"),
        helper.make_node("Tanh", ["flat"], ["bent"], name="bent"),
        helper.make_node(
            *("GRU", ["bent", "vW", "vR", "vB"], ["b", "b_h"]),
            name="two",
            hidden_size=5,
            linear_before_reset=1,
        ),
        *tail,
    ]
    stored = {"one_": np.int64([1]), **extra}
    cells_ = {"": [pair[0]], "v": [pair[1]]}
    return graph_file(path, cells_, nodes, {"x": ["T", "N", 5]}, {"y": 2}, extra=stored)


TAILS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "final state": ([helper.make_node("Squeeze", ["b_h", "zero_"], ["y"])], {"zero_": [0]}),
    "gather": (
        [
            helper.make_node("Squeeze", ["b", "one_"], ["s"]),
            helper.make_node("Transpose", ["s"], ["t"], perm=[1, 0, 2]),
            helper.make_node("Gather", ["t", "minus_one"], ["y"], axis=1),
        ],
        {"minus_one": -1},
    ),
    "slice": (
        [
            helper.make_node("Slice", ["b", "from", "to", "zero_"], ["late"]),
            helper.make_node("ReduceMean", ["late"], ["y"], axes=[0, 1], keepdims=0),
        ],
        {"from": [-3], "to": [2**62], "zero_": [0]},
    ),
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("keep_ops", [False, True])
def test_a_graph_that_reads_final_outputs_reads_final_inputs_only(tmp_path, tail, keep_ops):
    pair = [random_cell(i, "gru", inputs=5, gain=2.0) for i in (1, 2)]
    nodes, constants = TAILS[tail]
    path = last_file(
        tmp_path / "last.onnx", pair, nodes, **{n: np.int64(v) for n, v in constants.items()}
    )
    model = loaders.load(path)
    depths = {"one[0]": 6, "two[0]": 4}
    forms = choose(model, depths, Shape(keep_ops=keep_ops))
    final = 3 if tail == "slice" else 1
    assert [f.name for f in forms.values()] == ["last", "last"]
    assert [f.final for f in forms.values()] == [4 - 1 + final, final]
    runner = session(truncate_graph(model, depths, forms))
    full = session(path.read_bytes())
    reach = 6 - 1 + 4 - 1 + final
    for T in (3, 4, 6, reach, 40):
        x = normal(generator(T), 2, T, 5).transpose(0, 1).contiguous().float().numpy()
        (y,) = runner.run(["y"], {"x": x})
        if T <= 4:  # every depth covers the whole sequence
            np.testing.assert_allclose(y, full.run(["y"], {"x": x})[0], atol=1e-5, rtol=0)
        x_other = np.concatenate([x[:1] * 50, x])  # nothing before the reach is read
        changed = runner.run(["y"], {"x": x_other})[0]
        assert (np.abs(changed - y).max() == 0) == (reach <= T)


def test_the_last_form_gives_what_the_window_gives(tmp_path):
    pair = [random_cell(i, "gru", inputs=5, gain=2.0) for i in (1, 2)]
    nodes, constants = TAILS["final state"]
    path = last_file(tmp_path / "last.onnx", pair, nodes, zero_=np.int64(constants["zero_"]))
    model = loaders.load(path)
    depths = {"two[0]": 4}  # the first layer stays: the second's own inputs are the same
    last = session(truncate_graph(model, depths, choose(model, depths, Shape("last"))))
    window = session(truncate_graph(model, depths))
    for T in (1, 3, 4, 5, 20):
        x = normal(generator(T), 3, T, 5).transpose(0, 1).contiguous().float().numpy()
        np.testing.assert_allclose(
            *(s.run(["y"], {"x": x})[0] for s in (last, window)), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("kind", ["Dropout", "LayerNormalization"])
def test_last_is_not_taken_where_a_second_output_has_every_step(tmp_path, kind):
    scale = ["scale"] if kind == "LayerNormalization" else []
    nodes = [
        gru_node("gru", "x", "h"),
        helper.make_node(kind, ["h", *scale], ["kept", "second"]),
        helper.make_node("Gather", ["kept", "last"], ["final"]),
        helper.make_node("Cast", ["second"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    extra = {"last": np.int64(-1), **({"scale": np.ones(5, np.float32)} if scale else {})}
    path = gru_file(tmp_path / "two.onnx", nodes, {}, extra=extra)
    model = loaders.load(path)
    forms = choose(model, {"gru[0]": 4}, Shape("auto"))
    assert forms["gru[0]"].name != "last"
    x = normal(generator(2), 2, 20, 5).transpose(0, 1).contiguous().float().numpy()
    (y,) = session(truncate_graph(model, {"gru[0]": 4}, forms)).run(["y"], {"x": x})
    assert len(y) == 20


@pytest.mark.parametrize("keep_ops", [False, True])
def test_a_bidirectional_final_state_reads_both_ends(tmp_path, keep_ops):
    pair = [random_cell(i, "lstm", gain=2.0) for i in (1, 2)]
    node = helper.make_node(
        *("LSTM", ["x", "W", "R", "B"], ["", "h", "c"]),
        name="bi",
        hidden_size=5,
        direction="bidirectional",
    )
    ports = {"x": ["T", "N", 3]}
    path = graph_file(tmp_path / "bi.onnx", {"": pair}, [node], ports, {"h": 3, "c": 3})
    model = loaders.load(path)
    depths = {"bi[0]": 4, "bi[0] reverse": 6}
    forms = choose(model, depths, Shape("last", keep_ops))
    runner = session(truncate_graph(model, depths, forms))
    for T in (1, 5, 20):
        x = normal(generator(T), 2, T, 3)
        h, _ = runner.run(["h", "c"], {"x": x.transpose(0, 1).contiguous().float().numpy()})
        for d, (cell, k) in enumerate(zip(pair, (4, 6), strict=True)):
            cut = expected_states(cell, x, k, reverse=bool(d))
            np.testing.assert_allclose(h[d], cut[:, 0 if d else -1].numpy(), atol=1e-5, rtol=0)


# ------------------------------------------------------------------- the filter, the guard


def linear(seed: int, *, start: bool, reverse: bool = False) -> Stack:
    cell = random_cell(seed, "elman", 5, 3, 0.9, activation=Activation("affine", 0.75, 0.125))
    return single(cell, random_states(seed, cell) if start else None, reverse=reverse)


@settings(max_examples=25, deadline=None)
@given(
    seed=seeds,
    k=st.integers(1, 9),
    T=st.integers(1, 20),
    reverse=st.booleans(),
    start=st.booleans(),
    guarded=st.booleans(),
)
def test_a_linear_cell_is_one_convolution(seed, k, T, reverse, start, guarded):  # noqa: PLR0917
    stack = linear(seed, start=start, reverse=reverse)
    (r,) = stack.recurrences()
    x = random_inputs(seed, stack, 2, T)
    graph = assemble([stack], {r.label: k}, {r.label: Form("filter")}, guarded=guarded)
    found = session(graph).run(None, {"x": x.transpose(0, 1).contiguous().float().numpy()})
    expected = truncated(r, x, k)
    error = (torch.from_numpy(found[0]).transpose(0, 1) - expected).abs().max()
    assert error <= 2e-6 * max(1.0, float(expected.abs().max()))
    assert operators(graph) <= {
        *("Shape", "Slice", "Concat", "Expand", "Transpose", "Conv", "Reshape"),
        *(("Add", "Abs", "ReduceMax") if guarded else ()),
    }
    if guarded:
        gap = (expected - truncated(r, x, half(k))).abs().max()
        assert abs(found[1] - float(gap)) <= 2e-6 * max(1.0, float(expected.abs().max()))


def test_the_taps_are_the_impulse_response():
    stack = linear(1, start=False)
    (r,) = stack.recurrences()
    A, B, c = linear_map(r.cell)
    kernel = taps(r, 6)
    for j in range(6):
        power = torch.linalg.matrix_power(A, j)
        torch.testing.assert_close(kernel[..., j], torch.cat([power @ B, (power @ c)[:, None]], 1))


def test_auto_takes_the_filter_for_a_linear_cell_and_refuses_it_for_others():
    stack = linear(2, start=True)
    model = replace(random_model(0, "elman"), stacks=(stack,))
    (form,) = choose(model, every(model, 12)).values()
    assert (form.name, "less work than a" in form.why) == ("filter", True)
    with pytest.raises(
        UnsupportedModelError, match=r"needs a linear cell, got rnn\[0\], which is not"
    ):
        choose(random_model(0, "elman"), {"rnn[0]": 3}, Shape("filter"))
    with pytest.raises(UnsupportedModelError, match="in float64, which ONNX Runtime"):
        choose(replace(model, dtype="float64"), every(model, 3), Shape("filter"))


def guarded_steps(form: Form, k: int, T: int, *, reverse: bool) -> list[int]:
    """Return the steps at which a form's guard compares: all, or the first of every block."""
    if form.name == "window":
        return list(range(T))
    first = list(range(k - 1, T, form.block)) if k <= T else []
    return [T - 1 - t for t in first] if reverse else first


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=seeds,
    k=st.integers(1, 8),
    T=st.integers(1, 24),
    reverse=st.booleans(),
    form=st.sampled_from(
        [WINDOW, Form("chunk", 1), Form("chunk", 5), Form("chunk", 5, keep_ops=True)]
    ),
)
def test_the_guard_is_the_distance_to_half_the_depth(kind, seed, k, T, reverse, form):  # noqa: PLR0917
    stack = single(random_cell(seed, kind), reverse=reverse)
    (r,) = stack.recurrences()
    graph = assemble([stack], {r.label: k}, {r.label: form}, guarded=True)
    x = random_inputs(seed, stack, 2, T)
    _, gap = session(graph).run(None, {"x": x.transpose(0, 1).contiguous().float().numpy()})
    assert gap.shape == ()
    at = guarded_steps(form, k, T, reverse=reverse)
    both = (truncated(r, x, k) - truncated(r, x, half(k)))[:, at]
    assert abs(gap - float(both.abs().max() if at else 0.0)) <= 1e-5
    assert graph.metadata_props["rnnaudit.guard"] == "guard"


@pytest.mark.parametrize(
    "form", [WINDOW, Form("chunk", 4), Form("chunk", 4, keep_ops=True), Form("last")]
)
def test_a_sequence_without_steps_gives_no_outputs(form):
    stack = random_stack(3, "gru")
    graph = assemble([stack], every(stack, 5), {"rnn[0]": form}, guarded=form.name != "last")
    y, *gap = session(graph).run(None, {"x": np.zeros((0, 2, 3), np.float32)})
    assert y.shape == (0, 2, 5)
    assert gap in ([], [0.0])


def test_the_guard_of_a_decaying_sum_is_its_tail():
    one = torch.ones(1, 1, dtype=torch.float64)
    cell = ElmanCell(0.9 * one, one, torch.zeros(1).double(), Activation("affine", 1.0, 0.0))
    stack = single(cell)
    x = {"x": np.ones((40, 1, 1), np.float32)}
    for form in (WINDOW, Form("chunk", 4), Form("filter")):
        graph = assemble([stack], every(stack, 11), {"rnn[0]": form}, guarded=True)
        _, gap = session(graph).run(None, x)
        assert gap == pytest.approx(sum(0.9**j for j in range(6, 11)), rel=1e-5)


def test_a_guarded_model_verifies_as_one_without(tmp_path):
    model = random_model(5, "gru", gain=0.3)
    path = tmp_path / "cut.onnx"
    path.write_bytes(serialize(truncate_graph(model, every(model, 16), guarded=True)))
    assert verify(model, path, eps=5e-2, time_budget=10).passed


# ------------------------------------------------------------------------------ choosing


def test_last_is_refused_where_other_outputs_are_read():
    model = random_model(0, "gru")
    with pytest.raises(UnsupportedModelError, match=r"got rnn\[0\], whose other outputs are read"):
        choose(model, every(model, 3), Shape("last"))
    with pytest.raises(UsageError, match="kept in the forms chunk and last, got --form window"):
        choose(model, every(model, 3), Shape("window", keep_ops=True))


def test_auto_takes_the_cheaper_form_and_says_why():
    model = random_model(0, "lstm", hidden=64)
    depths = every(model, 32)
    (long,) = choose(model, depths, Shape(steps=8000)).values()
    assert long.name == "chunk"
    assert "less work than a window, as counted for 8000 steps" in long.why
    (short,) = choose(model, every(model, 3), lengths={"rnn[0]": 8}).values()
    assert short.name == "window"
    for steps in (64, 1000, 30000):
        costs = Costs(model.stacks[0].layers[0].recurrences[0].cell, 32)
        least = min(costs.chunk(steps, C) for C in range(1, LONGEST + 1))
        assert costs.chunk(steps, costs.best_block(steps)) <= 1.05 * least
    assert choose(model, {}) == {}


@pytest.mark.parametrize("form", [WINDOW, Form("chunk", 7), Form("chunk", 7, keep_ops=True)])
def test_a_written_form_verifies_against_its_own_reading(tmp_path, form):
    model = random_model(5, "gru", gain=0.3)
    path = tmp_path / "cut.onnx"
    graph = truncate_graph(model, every(model, 16), {"rnn[0]": form})
    path.write_bytes(serialize(graph))
    judged = verify(model, path, eps=5e-2, time_budget=10)
    assert judged.passed
    assert judged.conversion_error <= 1e-5
    assert judged.truncation_error > 1e-7
    assert json.loads(graph.metadata_props["rnnaudit.form"]) == {"rnn[0]": form.describe()}
    assert json.loads(graph.metadata_props["rnnaudit.blocks"]) == {"rnn[0]": form.block}


COSTS = st.builds(
    lambda seed, kind, hidden: random_model(seed, kind, hidden=hidden),
    seeds,
    st.sampled_from(["elman", "gru", "lstm"]),
    st.sampled_from([2, 8, 64, 256]),
)


@given(
    model=COSTS,
    depth=st.integers(1, 200),
    steps=st.integers(1, 4000),
    form=st.sampled_from(["auto", "window", "chunk"]),
    keep_ops=st.booleans(),
)
@settings(max_examples=60)
def test_a_reason_tells_a_difference_or_that_there_is_none(model, depth, steps, form, keep_ops):
    assume(not (keep_ops and form == "window"))
    shape = Shape(form, keep_ops=keep_ops, steps=steps)
    (chosen,) = choose(model, every(model, depth), shape).values()
    assert not re.search(r"(?<![\d.])1(\.0)?×", chosen.why)
    assert ("the faster choice here" in chosen.why) == (chosen.cost > 1.1 * chosen.operator)
    assert ("faster than the recurrence" in chosen.why) == (1.1 * chosen.cost < chosen.operator)


@pytest.mark.parametrize("kind", ["elman", "gru", "lstm"])
def test_more_steps_at_a_smaller_depth_favour_a_cut(kind):
    model = random_model(0, kind, hidden=64)

    def ratio(depth, steps):
        (form,) = choose(model, every(model, depth), Shape(steps=steps)).values()
        return form.cost / form.operator

    assert ratio(64, 65) > ratio(64, 1000) > ratio(64, 20000)
    assert ratio(2, 1000) < ratio(16, 1000) < ratio(128, 1000)


def test_what_is_estimated_far_apart_is_measured_so():
    model = random_model(0, "lstm", hidden=32)
    x = np.zeros((64, 1, model.stacks[0].input_size), np.float32)
    whole = session(build(model.stacks[0]))
    for depth, names in ((2, ("whole", "cut")), (60, ("cut", "whole"))):
        shape = Shape(steps=len(x) if depth > 2 else 20_000)
        fed = {"x": x if depth > 2 else np.zeros((20_000, *x.shape[1:]), np.float32)}
        depths = every(model, depth)
        forms = choose(model, depths, shape)
        (form,) = forms.values()
        assert max(form.cost / form.operator, form.operator / form.cost) > 2
        assert (form.cost > form.operator) == (names[0] == "cut")
        cut = session(truncate_graph(model, depths, forms))
        times = dict.fromkeys(("whole", "cut"), math.inf)
        for _ in range(9):
            for name, one in (("whole", whole), ("cut", cut)):
                begun = time.perf_counter()
                one.run(None, fed)
                times[name] = min(times[name], time.perf_counter() - begun)
        assert times[names[0]] > times[names[1]]


def test_a_report_says_where_the_recurrence_is_the_faster_choice(tmp_path):
    module = torch.nn.RNN(3, 8)
    path = tmp_path / "rnn.pt"
    torch.save(module.state_dict(), path)
    slow = rnnaudit.truncate(path, tmp_path / "slow.onnx", depth=30, steps=40)
    (told,) = [f for f in slow.findings if f.id == "RA307"]
    assert told.severity == "note"
    assert re.search(r"takes an estimated \d+(\.\d)?× its time", told.message)
    assert "the recurrence is the faster choice here" in slow.export.form_reason
    fast = rnnaudit.truncate(path, tmp_path / "fast.onnx", depth=2, steps=20_000)
    assert not [f for f in fast.findings if f.id == "RA307"]
    assert "faster than the recurrence" in fast.export.form_reason
