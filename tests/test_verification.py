"""A candidate passes when every element of every output agrees, and only then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from rnnaudit import loaders
from rnnaudit.cells import run_stack
from rnnaudit.data import Data
from rnnaudit.errors import LoadError, UnsupportedModelError, UsageError
from rnnaudit.export import build, truncate_graph, write
from rnnaudit.model import Activation, Layer, Model, Stack
from rnnaudit.results import Location
from rnnaudit.runtime import Interface, Port, describe
from rnnaudit.verification import Tried, inputs, judge, originals, verify
from rnnaudit.verification.inputs import arrange, beyond, feeds, lengths, ordered, sequences_of
from rnnaudit.verification.judge import round_up
from rnnaudit.verification.originals import torch_outputs
from rnnaudit.verification.slots import Slot, of_graph
from tests.strategies import (
    KINDS,
    random_cell,
    random_inputs,
    random_model,
    random_stack,
    recurrence,
    seeds,
)

# ------------------------------------------------------------------------------- judge


def one(value: Any) -> list[dict[str, Any]]:
    return [{"y": np.asarray(value)}]


def test_the_largest_error_decides_and_is_located():
    expected = np.zeros((4, 2, 3))  # [T, N, H]
    got = expected.copy()
    got[2, 1, 0], got[3, 0, 2] = -0.25, 0.125
    judged = judge(one(expected), one(got), 0.25, [Tried("normal 2×4", 2, 4)])
    assert judged.passed
    assert (judged.max_abs_error, judged.required_eps) == (0.25, 0.25)
    assert judged.where == Location("normal 2×4", "y", batch=1, t=2, unit=0)
    assert judged.percentiles == pytest.approx({"p90": 0.0, "p95": 0.10625, "p99": 0.22125})
    assert not judge(one(expected), one(got), 0.2499).passed


def test_all_outputs_of_all_inputs_count():
    good = {"y": np.ones(3), "h": np.ones(2)}
    bad = {"y": np.ones(3), "h": np.float32([1.0, 1.5])}
    judged = judge([good, good], [good, bad], 0.1)
    assert not judged.passed
    assert judged.inputs_tried == 2
    assert judged.where == Location("1", "h", 0, 0, 1)


@pytest.mark.parametrize("eps", [1e-3, 1e300])
def test_nan_fails_whatever_the_tolerance_even_where_both_have_it(eps):
    fine, nan = one([1.0, 2.0]), one([1.0, np.nan])
    for reference, candidate, whose in (
        (fine, nan, "the candidate"),
        (nan, fine, "the original"),
        (nan, nan, "the candidate"),
    ):
        judged = judge(reference, candidate, eps)
        assert not judged.passed
        assert judged.reason == f"NaN from {whose} in output y of input 0"
        assert (judged.max_abs_error, judged.required_eps, judged.where) == (None, None, None)


def test_infinities_fail_even_where_they_are_equal():
    judged = judge(one([np.inf]), one([np.inf]), 1e300)
    assert (judged.passed, judged.reason) == (False, "infinity in output y of input 0")


def test_shapes_are_never_broadcast():
    judged = judge(one(np.zeros((3, 1))), one(np.zeros((3, 2))), 1.0)
    assert not judged.passed
    assert judged.reason == "shape (3, 2) instead of (3, 1) in output y of input 0"
    missing = judge(one([0.0]), [{"z": np.zeros(1)}], 1.0)
    assert (missing.passed, missing.reason) == (False, "nothing in output y of input 0")


def test_faults_are_counted():
    judged = judge(one([0.0]) * 3, one([np.nan]) * 3, 1.0)
    assert judged.reason == "NaN from the candidate in output y of input 0 (and 2 more)"


@pytest.mark.parametrize("nothing", [[], [{}], [{"y": np.zeros((0, 3))}]])
def test_nothing_compared_is_an_error(nothing):
    with pytest.raises(UnsupportedModelError, match="outputs to compare, got none") as caught:
        judge(nothing, nothing, 1.0)
    assert caught.value.id == "RA304"


def test_integers_and_truth_values_are_compared_as_numbers():
    assert judge(one([True, False]), one([True, True]), 0.5).max_abs_error == 1.0
    assert judge(one(np.uint8([3])), one(np.uint8([5])), 1.0).max_abs_error == 2.0


@pytest.mark.parametrize("kind", [np.int64, np.uint64])
@pytest.mark.parametrize("more", [1, 2, 3])
def test_whole_numbers_that_float64_lacks_are_compared_exactly(kind, more):
    large = np.array([0, 2**53, 2**62 + 1, 2**63 - 4], kind)
    for other in (large + kind(more), large - kind(large > 0) * kind(more)):
        judged = judge(one(large), one(other), more - 0.5)
        assert not judged.passed
        assert judged.max_abs_error == more
        assert judge(one(other), one(large), more).passed
    assert judge(one(large), one(large), 1e-9).max_abs_error == 0


def test_whole_numbers_of_several_types_are_compared_as_what_they_are():
    ends = np.array([-(2**63), 2**63 - 1]), np.array([0, 2**64 - 1], np.uint64)
    judged = judge(one(ends[0]), one(ends[1]), 1.0)
    assert judged.max_abs_error == 2.0**63
    beside = judge(one(np.array(2**53 + 1)), one(np.array(2.0**53)), 0.5)
    assert (beside.passed, beside.max_abs_error) == (False, 1.0)
    assert judge(one(np.array([1 + 0j])), one(np.array([2**60])), 0.5).max_abs_error == 2.0**60


def test_texts_are_compared_by_being_equal():
    assert judge(one(["a", "bc"]), one(["a", "bc"]), 1e-9).max_abs_error == 0
    judged = judge(one(["a", "bc"]), one(["a", "b"]), 1.0)
    assert (judged.passed, judged.reason) == (False, "1 of 2 texts differ in output y of input 0")
    assert (
        judge(one(["a"]), one([1.0]), 1.0).reason
        == "<U1 values from the original in output y of input 0"
    )


@given(st.floats(0, 1e300, allow_subnormal=False), st.integers(1, 5))
def test_rounding_up_never_falls_below_and_stays_near(value, digits):
    rounded = round_up(value, digits)
    assert value <= rounded <= value * (1 + 1.0000001 * 10 ** (1 - digits))


def test_rounding_up_keeps_numbers_that_are_round():
    assert [round_up(v) for v in (0.0, 0.25, 1e-3, 0.0010001)] == [0.0, 0.25, 1e-3, 0.00101]


@given(
    seed=seeds,
    scale=st.floats(1e-8, 1e3),
    shape=st.tuples(*(st.integers(1, 4),) * 3),
    dtype=st.sampled_from(["f4", "f8"]),
)
def test_the_required_tolerance_passes_and_anything_smaller_fails(seed, scale, shape, dtype):
    rng = np.random.default_rng(seed)
    a = [{"y": (scale * rng.standard_normal(shape)).astype(dtype)} for _ in range(2)]
    b = [{"y": (scale * rng.standard_normal(shape)).astype(dtype)} for _ in range(2)]
    judged = judge(a, b, scale)
    assert judged.required_eps is not None
    assert judged.max_abs_error is not None
    assert judge(a, b, judged.required_eps).passed
    assert judge(a, b, judged.max_abs_error).passed
    assert not judge(a, b, np.nextafter(judged.max_abs_error, 0)).passed
    differences = [
        np.abs(x["y"].astype(float) - y["y"].astype(float)) for x, y in zip(a, b, strict=True)
    ]
    assert judged.max_abs_error == max(d.max() for d in differences)
    assert judged.passed == (judged.max_abs_error <= scale)


# ------------------------------------------------------------------------------ inputs


def test_lengths_surround_every_depth():
    assert lengths([6]) == (1, 5, 6, 7, 24, 1000)
    assert lengths([1]) == (1, 2, 4, 1000)
    assert lengths([3, 10, 6]) == (1, 2, 3, 4, 9, 10, 11, 40, 1000)
    assert lengths([]) == (1, 2, 7, 64, 256)
    assert lengths([6], traced=False) == (1, 5, 6, 7, 24, 1000, 1024, 4096, 16384)


X = Slot("x", "float", ("time", "batch", None), (None, None, 2), main=True)


def test_inputs_are_every_length_batch_and_source_cheapest_first():
    made = feeds([X], (1, 4), None, seed=0)
    assert {f.tried.name for f in made} == {
        f"{source} {n}×{t}" for source in ("normal", "saturating") for n in (1, 3) for t in (1, 4)
    }
    assert [f.cost for f in made] == sorted(f.cost for f in made)
    for feed in made:
        x = feed.values["x"]
        assert x.shape == (feed.tried.length, feed.tried.batch, 2)
        assert x.dtype == np.float32
        assert ("saturating" in feed.tried.name) == bool((np.abs(x) == 4).all())


def test_inputs_repeat_with_their_seed_only():
    first, again, other = (feeds([X], (5,), None, seed) for seed in (1, 1, 2))
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a.values["x"], b.values["x"])
        assert (a.values["x"] != c.values["x"]).any()


def test_fixed_axes_keep_their_size_and_are_tried_with_several_values():
    slot = Slot("x", "double", ("batch", "time", None), (2, 7, 3))
    made = feeds([slot], (1, 4), None, seed=0)
    assert len({f.values["x"].tobytes() for f in made}) == 8
    assert {f.values["x"].shape for f in made} == {(2, 7, 3)}
    assert {(f.tried.batch, f.tried.length) for f in made} == {(2, 7)}


def test_tokens_lengths_states_and_truth_values_are_what_they_must_be():
    slots = [
        Slot("ids", "int64", ("batch", "time"), (None, None), "tokens", tokens=5, main=True),
        Slot("lens", "int32", ("batch",), (None,), "lengths"),
        Slot("h0", "float", (None, "batch", None), (1, None, 4), "zeros"),
        Slot("mask", "bool", ("batch", "time"), (None, None), "tokens"),
    ]
    seen = set()
    for feed in feeds(slots, (3, 40), None, seed=0):
        seen |= set(feed.values["ids"].ravel().tolist())
        assert (feed.values["lens"] == feed.tried.length).all()
        assert not feed.values["h0"].any()
        assert feed.values["mask"].dtype == bool
        assert feed.values["ids"].dtype == np.int64
    assert seen == set(range(5))


def sequences(*lengths_: int, width: int = 2) -> Data:
    rng = np.random.default_rng(0)
    return Data({"": tuple(rng.standard_normal((t, width)) for t in lengths_)}, "mine.npz")


def test_data_are_cut_to_the_lengths_and_also_run_whole():
    data = sequences(9, 3)
    made = [f for f in feeds([X], (1, 4), data, seed=0) if f.tried.name.startswith("data")]
    whole = {f.tried.length: f for f in made if f.tried.length in (3, 9)}
    assert set(whole) == {3, 9}
    for length, feed in whole.items():
        source = data.inputs[""][0 if length == 9 else 1].astype(np.float32)
        np.testing.assert_array_equal(feed.values["x"][:, 0], source)
    (long,) = [f for f in made if (f.tried.batch, f.tried.length) == (3, 4)]
    for row in range(3):
        np.testing.assert_array_equal(
            long.values["x"][:, row], data.inputs[""][0][:4].astype(np.float32)
        )


@pytest.mark.parametrize(
    ("roles", "sizes"),
    [
        (("time", "batch", None), (None, None, 2)),
        (("batch", "time", None), (None, 5, 2)),  # every sequence by its first five steps
        (("batch", "time", None), (2, 5, 2)),
    ],
)
def test_all_of_the_data_run_in_full_length(roles, sizes):
    data = sequences(*range(5, 25))
    made = [f for f in feeds([replace(X, roles=roles, sizes=sizes)], (1, 4), data, 0) if f.whole]
    rows = [sequences_of(f.values["x"], roles) for f in made]
    seen = {row.tobytes() for batch in rows for row in batch}
    fixed = sizes[roles.index("time")]
    wanted = [x[:fixed].astype(np.float32) for x in data.inputs[""]]
    assert seen == {x.tobytes() for x in wanted}
    assert beyond(made, data) == ()


def test_sequences_beyond_the_budget_of_steps_are_counted_and_one_always_runs():
    half = inputs.MOST_STEPS // 2
    made = feeds([X], (1,), long_ones(half, half, 1), seed=0)
    assert sum(f.cost for f in made if f.whole) <= inputs.MOST_STEPS
    (said,) = beyond(made, long_ones(half, half, 1))
    assert said == "1 of 3 sequences of the data beyond 50,000 steps"
    endless = long_ones(2 * half + 1)
    (only,) = [f for f in feeds([X], (1,), endless, seed=0) if f.whole]
    assert only.cost == 2 * half + 1
    assert beyond([only], endless) == ()


def long_ones(*lengths_: int) -> Data:
    return Data({"": tuple(np.zeros((t, 2), np.float32) for t in lengths_)}, "long.npz")


def test_data_of_another_width_or_input_are_refused():
    with pytest.raises(LoadError, match=r"2 features per step for input x, got 5 from mine.npz"):
        feeds([X], (1,), sequences(4, width=5), seed=0)
    with pytest.raises(LoadError, match=r"got 5 .*; each has 2 steps: name .* --time-axis"):
        feeds([X], (1,), sequences(2, width=5), seed=0)
    two = [X, Slot("z", "float", ("time", "batch", None), (None, None, 2))]
    named = Data({"w": (np.zeros((4, 2)),)}, "mine.npz")
    with pytest.raises(LoadError, match=r"one of the model's inputs x, z, got w from mine.npz"):
        feeds(two, (1,), named, seed=0)


@given(st.permutations(["time", "batch", None]), st.integers(1, 3), st.integers(1, 4))
def test_arranging_and_reading_back_are_inverse(roles, n, t):
    slot = Slot("x", "double", tuple(roles), tuple(None if r else 5 for r in roles))
    x = np.random.default_rng(0).standard_normal((n, t, 5))
    placed = arrange(x, slot, "test")
    assert placed.shape == slot.shape(n, t)
    np.testing.assert_array_equal(sequences_of(placed, slot.roles), x)
    np.testing.assert_array_equal(ordered(x[:1], ("time", None)), x[0])
    np.testing.assert_array_equal(sequences_of(x[0], ("time", None)), x[:1])


def embedded(path: Path) -> Path:
    """Write ids [N, T] → Gather (7 rows) → Transpose → GRU, with a graph-input state."""
    cell = random_cell(0, "gru")
    stored = build(Stack("s", (Layer((recurrence(cell),)),))).graph.initializers
    weights = {n: stored[f"s/layer_0/{n}"].const_value.numpy() for n in "WRB"}
    rows = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["rows", "ids"], ["e"]),
        helper.make_node("Transpose", ["e"], ["x"], perm=[1, 0, 2]),
        helper.make_node(
            *("GRU", ["x", "W", "R", "B", "", "h0"], ["Y"]),
            name="gru",
            hidden_size=5,
            linear_before_reset=1,
        ),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["first", "second"]),
            helper.make_tensor_value_info("h0", TensorProto.FLOAT, [1, "first", 5]),
        ],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [None] * 4)],
        [numpy_helper.from_array(a, n) for n, a in {**weights, "rows": rows}.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


def test_axes_are_followed_from_the_recurrence_to_the_input(tmp_path):
    path = embedded(tmp_path / "ids.onnx")
    ids, h0 = of_graph(loaders.load(path), describe(path))
    assert ids.roles == ("batch", "time")
    assert (ids.fill, ids.tokens, ids.main, ids.traced) == ("tokens", 7, True, True)
    assert h0.roles == (None, "batch", None)
    assert (h0.fill, h0.main) == ("zeros", False)


@pytest.mark.parametrize(
    ("kind", "given", "read", "roles"),
    [
        ("Reshape", [1, 5, 3], [5, 1, 3], ("batch", "time", None)),
        ("Reshape", [5, 3], [5, 1, 3], ("time", None)),
        ("Reshape", [1, 1, 5, 3], [5, 1, 3], ("batch", None, "time", None)),
        ("Reshape", [15], [5, 1, 3], ("batch",)),  # split: the axes are not followed
        ("Unsqueeze", [5, 3], [5, 1, 3], ("time", None)),
        ("Squeeze", [1, 5, 1, 3], [5, 1, 3], ("batch", "time", None, None)),
    ],
)
def test_axes_are_followed_through_changes_of_shape_that_only_move_ones(
    kind, given, read, roles, tmp_path
):
    path = reshaped(tmp_path / "m.onnx", kind, given, read)
    (slot,) = of_graph(loaders.load(path), describe(path))
    assert slot.roles == roles or (kind == "Reshape" and len(given) == 1 and not slot.traced)


def reshaped(path: Path, kind: str, given: list[int], read: list[int]) -> Path:
    """Write a graph that reads x of one shape and gives an RNN the same in another."""
    rng = np.random.default_rng(0)
    moved = {"Reshape": read, "Unsqueeze": [1], "Squeeze": [0]}[kind]
    stored = {
        "to": np.int64(moved),
        "W": rng.standard_normal((1, 2, 3)).astype(np.float32),
        "R": rng.standard_normal((1, 2, 2)).astype(np.float32),
    }
    nodes = [
        helper.make_node(kind, ["x", "to"], ["moved"]),
        helper.make_node("RNN", ["moved", "W", "R"], ["y"], hidden_size=2, name="rnn"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, given)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


def test_axes_that_lead_nowhere_go_by_their_names():
    model = Model(Path("m.onnx"), "ONNX", "0" * 64, (), whole=False, graph=empty_graph())
    ports = (
        Port("a", "float", ("batch_size", 4, "frames")),
        Port("b", "float", ("p", "q", 4)),
        Port("c", "float", (1, 100)),
    )
    a, b, c = of_graph(model, Interface(ports, ()))
    assert a.roles == ("batch", None, "time")
    assert b.roles == ("batch", "time", None)
    assert c.roles == (None, None)
    assert (a.main, b.main) == (True, False)


def test_no_role_is_given_to_two_axes_and_a_width_that_is_not_said_is_the_reader_s(tmp_path):
    every = (
        Port("a", "float", ("time", "steps", "frames")),
        Port("b", "float", ("?", "?", "?")),
    )
    model = Model(Path("m.onnx"), "ONNX", "0" * 64, (), whole=False, graph=empty_graph())
    a, b = of_graph(model, Interface(every, ()))
    assert a.roles == ("time", "batch", None)
    assert b.roles == ("batch", "time", None)
    write(build(random_model(0, "elman", 3, 2).stacks[0]), tmp_path / "m.onnx")
    wide = onnx.load(tmp_path / "m.onnx")
    wide.graph.input[0].type.tensor_type.shape.dim[2].Clear()
    onnx.save(wide, tmp_path / "m.onnx")
    (x,) = of_graph(loaders.load(tmp_path / "m.onnx"), describe(tmp_path / "m.onnx"))
    assert (x.roles, x.features) == (("time", "batch", None), 2)


def empty_graph() -> Any:
    import onnx_ir as ir

    return ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 17}), ir_version=8)


# ------------------------------------------------------------------------------ verify


def every(model: Model, depth: int) -> dict[str, int]:
    return {r.label: depth for r in model.recurrences()}


def cut(model: Model, depth: int, path: Path) -> Path:
    write(truncate_graph(model, every(model, depth)), path)
    return path


@pytest.fixture(scope="module")
def gru() -> Model:
    """Return a GRU with a readout that errs by 5e-2 at depth 3 and by 1e-5 at depth 40."""
    return random_model(1, "gru", readout=2)


def test_a_deep_enough_model_passes_and_errors_are_told_apart(gru, tmp_path):
    result = verify(gru, cut(gru, 40, tmp_path / "m.onnx"), eps=1e-3)
    assert result.passed
    assert (
        result.inputs_tried == 24
    )  # lengths 1, 39, 40, 41, 160, 1000 × batches 1, 3 × two sources
    assert result.conversion_error <= 1e-5
    assert result.max_abs_error <= result.truncation_error + result.conversion_error
    assert result.reference.startswith("the weights read in float64, and by PyTorch's own modules")
    assert result.reason == ""


def test_a_shallow_model_fails_and_says_what_would_have_passed(gru, tmp_path):
    path = cut(gru, 3, tmp_path / "m.onnx")
    result = verify(gru, path, eps=1e-3)
    assert not result.passed
    assert result.truncation_error == pytest.approx(result.max_abs_error, abs=1e-5)
    assert result.where.output == "y"
    assert result.where.t >= 3  # outputs that see the whole past are exact
    assert verify(gru, path, eps=result.required_eps).passed


@settings(max_examples=20)
@given(
    seed=seeds,
    kind=st.sampled_from(KINDS),
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
)
def test_torch_reads_the_weights_as_we_do(seed, kind, layers, bidirectional):
    projection = {"projection": 2} if kind == "lstm" and seed % 2 else {}
    stack = random_stack(
        seed,
        kind,
        layers=layers,
        bidirectional=bidirectional,
        readout=2,
        start="constant",
        **projection,
    )
    x = random_inputs(seed, stack, 2, 6)
    theirs = torch_outputs(stack, x)
    assert theirs is not None
    torch.testing.assert_close(theirs, run_stack(stack, x), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gru", {"reset_after": False}),
        ("elman", {"clip": 1.0}),
        ("lstm", {"peephole": True}),
        ("lstm", {"input_forget": True}),
    ],
)
def test_torch_is_not_asked_for_what_it_lacks(kind, options):
    stack = random_stack(0, kind, **options)
    assert torch_outputs(stack, random_inputs(0, stack, 1, 2)) is None


def test_two_readings_that_disagree_are_our_fault(gru, tmp_path, monkeypatch):
    path = cut(gru, 20, tmp_path / "m.onnx")
    monkeypatch.setattr(originals, "torch_outputs", lambda stack, x: run_stack(stack, x) + 1e-6)
    result = verify(gru, path, eps=1e-3)
    assert not result.passed
    assert result.reason.startswith("rnnaudit's reading of the weights differs from PyTorch's by 1")


def test_depths_of_a_stranger_are_not_believed(gru, tmp_path):
    path = tmp_path / "plain.onnx"
    write(build(gru.stacks[0]), path)
    result = verify(gru, path, eps=1e-4)
    assert result.passed
    assert (result.truncation_error, result.conversion_error) == (None, None)
    other = random_model(2, "gru", readout=2, name="other")
    assert verify(other, cut(gru, 5, path), eps=1e-4).truncation_error is None


def test_a_candidate_that_does_not_run_fails_with_the_reason(gru, tmp_path):
    path = cut(gru, 5, tmp_path / "m.onnx")
    model = onnx.load(path)
    model.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(model, path)
    result = verify(gru, path, eps=1e-3)
    assert not result.passed
    assert result.reason.startswith("the candidate does not run: ")
    assert "NoSuchOperator" in result.reason
    assert result.max_abs_error is None


def test_files_that_are_no_models_are_refused(gru, tmp_path):
    text = tmp_path / "text.onnx"
    text.write_text("not a model")
    with pytest.raises(LoadError):
        verify(gru, text, eps=1e-3)
    with pytest.raises(LoadError):
        verify(gru, tmp_path / "missing.onnx", eps=1e-3)


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan"), float("inf")])
def test_tolerances_must_be_positive(gru, tmp_path, eps):
    with pytest.raises(UsageError, match="eps must be a positive number, got"):
        verify(gru, tmp_path / "m.onnx", eps=eps)


def test_a_candidate_for_another_model_is_refused(gru, tmp_path):
    other = random_model(2, "gru", inputs=4)
    path = cut(other, 3, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError, match="of 3 features, got input x of shape"):
        verify(gru, path, eps=1e-3)


def test_a_graph_is_held_against_itself_in_onnx_runtime(tmp_path):
    source = tmp_path / "source.onnx"
    write(build(random_stack(1, "gru", readout=2)), source)
    model = loaders.load(source)
    assert model.whole
    data = sequences(30, 25, 28, width=3)
    result = verify(model, cut(model, 40, tmp_path / "m.onnx"), eps=1e-3, data=data)
    assert result.passed
    assert result.inputs_tried == 29  # the sequences fill length 1, and are run whole
    assert result.conversion_error <= 1e-5
    assert result.truncation_error <= 1e-3
    assert "the original in ONNX Runtime (its float64 reading differs by" in result.reference


def test_tokens_and_dropped_states_are_fed(tmp_path):
    source = embedded(tmp_path / "ids.onnx")
    model = loaders.load(source)
    path = cut(model, 4, tmp_path / "m.onnx")
    assert [p.name for p in describe(path).inputs] == ["ids"]
    shallow = verify(model, path, eps=1e-4)
    assert not shallow.passed
    assert verify(model, path, eps=shallow.required_eps).passed


def doubled(path: Path, *, factor: float = 2.0, name: str = "y", x: str = "x") -> Path:
    graph = helper.make_graph(
        [helper.make_node("Mul", [x, "factor"], [name])],
        "g",
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["N", "T"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", "T"])],
        [numpy_helper.from_array(np.float32(factor), "factor")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    model = onnx.load(path)
    model.ir_version = 8
    onnx.save(model, path)
    return path


def without_recurrences(path: Path) -> Model:
    import onnx_ir as ir

    return Model(path, "ONNX", "0" * 64, (), whole=False, graph=ir.load(path))


def test_any_two_graphs_can_be_compared(tmp_path):
    model = without_recurrences(doubled(tmp_path / "a.onnx"))
    assert verify(model, doubled(tmp_path / "b.onnx"), eps=1e-9).max_abs_error == 0.0
    off = verify(model, doubled(tmp_path / "c.onnx", factor=2.5), eps=1e-3)
    assert not off.passed
    assert off.where.output == "y"
    renamed = doubled(tmp_path / "d.onnx", name="out", x="in")
    assert verify(model, renamed, eps=1e-9).passed


def test_an_output_that_the_original_lacks_cannot_be_compared(tmp_path):
    source = tmp_path / "source.onnx"
    write(build(random_stack(1, "gru")), source)
    graph = onnx.load(source)
    graph.graph.output[0].name = "rnn/layer_0/directions"
    graph.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 3))
    onnx.save(graph, source)
    model = without_recurrences(source)
    with pytest.raises(UnsupportedModelError, match=r"an output of the original's, .* got z"):
        verify(model, doubled(tmp_path / "z.onnx", name="z"), eps=1e-3)
    with pytest.raises(UnsupportedModelError, match="got the input w, which the original does not"):
        verify(model, two_inputs(tmp_path / "w.onnx"), eps=1e-3)


def two_inputs(path: Path) -> Path:
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", "T"]) for n in ("x", "w")]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        ports,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "T"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


def test_a_budget_leaves_long_inputs_out_and_says_so(gru, tmp_path):
    path = cut(gru, 30, tmp_path / "m.onnx")
    result = verify(gru, path, eps=1.0, time_budget=1e-3)
    assert result.passed
    assert result.inputs_tried == 12
    assert result.left_out == ("12 inputs by the time budget of 0.001 s",)


def test_sequences_that_are_not_run_whole_are_told(gru, tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "MOST_STEPS", 30)
    data = sequences(20, 20, 20, width=3)
    result = verify(gru, cut(gru, 60, tmp_path / "m.onnx"), eps=1.0, data=data)
    assert result.left_out == ("2 of 3 sequences of the data beyond 30 steps",)


def test_an_original_that_never_runs_is_an_error(tmp_path):
    path = doubled(tmp_path / "a.onnx")
    model = onnx.load(path)
    model.graph.node[0].op_type = "NoSuchOperator"
    onnx.save(model, path)
    with pytest.raises(UnsupportedModelError, match="the original must run on some input, got: "):
        verify(without_recurrences(path), doubled(tmp_path / "b.onnx"), eps=1e-3)


def test_constant_starts_are_part_of_the_original(tmp_path):
    model = random_model(3, "lstm", start="constant", bidirectional=True)
    assert any(bool(r.initial.value.any()) for r in model.recurrences())
    shallow = verify(model, cut(model, 2, tmp_path / "m.onnx"), eps=1e-6)
    assert shallow.conversion_error <= 1e-6


def test_a_candidate_may_hold_some_stacks_of_several(tmp_path):
    a, b = random_stack(1, "elman", name="a"), random_stack(2, "gru", name="b")
    both = Model(Path("m.pt"), "PyTorch state_dict", "0" * 64, (a, b), whole=False)
    result = verify(both, cut(both, 3, tmp_path / "both.onnx"), eps=1e-9)
    assert result.conversion_error <= 1e-5
    one_of_them = Model(Path("m.pt"), "PyTorch state_dict", "0" * 64, (b,), whole=True)
    path = cut(one_of_them, 3, tmp_path / "one.onnx")
    assert verify(both, path, eps=1e-9).conversion_error <= 1e-5
    write(build(b), path)
    with pytest.raises(UnsupportedModelError, match="must have a/x and a/y, got the inputs x"):
        verify(both, path, eps=1e-9)


def test_inputs_that_the_original_refuses_are_left_out_and_counted(tmp_path):
    def squeezing(path: Path) -> Path:
        port = ["N", "T"]
        graph = helper.make_graph(
            [helper.make_node("Squeeze", ["x", "axis"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, port)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T"])],
            [numpy_helper.from_array(np.int64([0]), "axis")],
        )
        opset = [helper.make_opsetid("", 17)]
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
        return path

    model = without_recurrences(squeezing(tmp_path / "a.onnx"))
    result = verify(model, squeezing(tmp_path / "b.onnx"), eps=1e-9)
    assert result.passed
    assert result.inputs_tried == 16  # batch 1; batch 3 cannot be squeezed
    assert result.left_out == ("16 inputs on which the original does not run",)


def test_weights_that_explode_do_not_pass(tmp_path):
    model = random_model(0, "elman", gain=1e4, activation=Activation("relu"))
    result = verify(model, cut(model, 20, tmp_path / "m.onnx"), eps=1e-3)
    assert not result.passed
    assert "infinity" in result.reason or "NaN" in result.reason
    assert result.required_eps is None


def test_sequence_lengths_are_full(tmp_path):
    graph = helper.make_graph(
        [helper.make_node("GRU", ["x", "W", "R", "", "n"], ["Y"], hidden_size=2)],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "N", 1]),
            helper.make_tensor_value_info("n", TensorProto.INT32, ["N"]),
        ],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [None] * 4)],
        [
            numpy_helper.from_array(np.ones((1, 6, width), np.float32), name)
            for name, width in (("W", 1), ("R", 2))
        ],
    )
    path = tmp_path / "n.onnx"
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    x, n = of_graph(loaders.load(path), describe(path))
    assert (x.roles, n.roles, n.fill) == (("time", "batch", None), ("batch",), "lengths")
