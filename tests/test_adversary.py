"""Witnesses replay, refute only what is false, and are found where memory is known."""

from __future__ import annotations

import json
import math

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import rnnaudit
from rnnaudit import cells
from rnnaudit.cells.chain import Chain
from rnnaudit.certificates import Domain, certify
from rnnaudit.errors import UsageError
from rnnaudit.estimators.adversary import Witness, distances, refute
from rnnaudit.estimators.adversary import witness as witness_of
from rnnaudit.model import (
    RELU,
    ElmanCell,
    GRUCell,
    InitialState,
    Layer,
    LSTMCell,
    Readout,
    Recurrence,
    Stack,
)
from rnnaudit.results import EPSILONS
from tests.strategies import draw

pytestmark = pytest.mark.usefixtures("one_thread")


def elman(W, U, b=None):
    W, U = torch.tensor(W, dtype=torch.float64), torch.tensor(U, dtype=torch.float64)
    b = torch.zeros(len(W)) if b is None else torch.tensor(b)
    return recurrence(ElmanCell(W, U, b.double()))


def recurrence(cell, layer=0):
    return Recurrence("r", layer, cell, InitialState(torch.zeros(cell.state_size).double()))


def random_cell(kind, width, H, rng, gain):
    g = gain / math.sqrt(H)
    if kind == "elman":
        return ElmanCell(g * draw(rng, H, H), draw(rng, H, width), draw(rng, H))
    if kind == "gru":
        parts = draw(rng, 3 * H, width), g * draw(rng, 3 * H, H)
        return GRUCell(*parts, draw(rng, 3 * H), draw(rng, 3 * H))
    return LSTMCell(draw(rng, 4 * H, width), g * draw(rng, 4 * H, H), draw(rng, 4 * H))


def unit_box(width, reach=1.0):
    return torch.full((width,), -reach).double(), torch.full((width,), reach).double()


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kinds=st.lists(st.sampled_from(["elman", "gru", "lstm"]), min_size=1, max_size=2),
    norm=st.sampled_from(["max", "2"]),
)
def test_a_witness_is_in_the_domain_and_replays_as_the_truncated_model(seed, kinds, norm):
    rng = torch.Generator().manual_seed(seed)
    widths = [2] + [4] * (len(kinds) - 1)
    layers = tuple(
        Layer((recurrence(random_cell(kind, width, 4, rng, 1.5), i),))
        for i, (kind, width) in enumerate(zip(kinds, widths, strict=True))
    )
    stack = Stack("s", layers, Readout("y", draw(rng, 3, 4), draw(rng, 3)))
    low, high = torch.tensor([-1.0, 0.0]).double(), torch.tensor([0.5, 2.0]).double()
    chain = Chain.of(list(stack.recurrences()), stack.readout)
    found = refute(
        chain, low, high, horizon=12, restarts=8, steps=4, prefix=10, seed=seed, norm=norm
    )
    for witness in found.witnesses:
        x = torch.cat([witness.prefix, witness.inputs])[None]
        assert ((x >= low) & (x <= high)).all()
        full = cells.run_stack(stack, x)
        P = len(witness.prefix)
        for j in range(1, len(witness.inputs) + 1):
            window = cells.run_stack(stack, x[:, P : P + j])
            gap = full[0, P + j - 1] - window[0, -1]
            size = gap.abs().max() if norm == "max" else gap.norm()
            assert size == pytest.approx(float(witness.distances[j]), rel=1e-6, abs=1e-11)


def test_a_latch_is_refuted_at_every_depth_of_the_horizon():
    found = refute(Chain.of([elman([[5.0]], [[5.0]])]), *unit_box(1), horizon=512, prefix=8)
    assert found.never_forgets(0.1)
    assert found.refuted_below(1e-6) == 513
    (witness,) = found.witnesses
    assert witness.distances[-1] > 0.9


def test_a_cell_that_no_prefix_can_set_is_not_refuted_although_states_stay_apart():
    # h' = tanh(5h) from 0: ±0.9999 never meet, yet nothing reaches them, and every k is exact.
    found = refute(Chain.of([elman([[5.0]], [[0.0]])]), *unit_box(1), horizon=64, prefix=8)
    assert found.refuted_below(1e-6) is None
    assert found.witnesses == ()


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_a_leaky_integrator_is_refuted_up_to_its_geometric_series(decay):
    # From x ≡ 1 in the prefix the error at depth j is decay^j (1 − decay^P)/(1 − decay).
    r = recurrence(
        ElmanCell(*torch.tensor([[[decay]], [[1.0]]]).double(), torch.zeros(1).double(), RELU)
    )
    found = refute(Chain.of([r]), torch.zeros(1).double(), torch.ones(1).double(), horizon=256)
    for eps in (1e-1, 1e-3):
        series = (1 - decay**64) / (1 - decay)
        exact = math.floor(math.log(series / eps) / math.log(1 / decay)) + 1
        assert found.refuted_below(eps) == exact


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["elman", "gru", "lstm"]),
    gain=st.floats(0.1, 0.7),
)
def test_no_witness_refutes_a_proved_depth(seed, kind, gain):
    rng = torch.Generator().manual_seed(seed)
    r = recurrence(random_cell(kind, 2, 4, rng, gain))
    proofs = certify(r, Domain(-1.0, 1.0, "|x| ≤ 1"))
    found = refute(
        Chain.of([r]), *unit_box(2), horizon=64, restarts=8, steps=6, prefix=16, seed=seed
    )
    for eps in EPSILONS:
        proved = proofs.depth(eps)
        if proved is not None:
            assert (found.refuted_below(eps) or 0) <= proved


def test_the_same_seed_finds_the_same_witness_and_examples_are_starts():
    rng = torch.Generator().manual_seed(3)
    chain = Chain.of([recurrence(random_cell("gru", 2, 6, rng, 1.0))])
    examples = 5 * draw(rng, 4, 30, 2)
    arguments = {"horizon": 16, "restarts": 8, "steps": 3, "prefix": 8}
    first = refute(chain, *unit_box(2), **arguments, examples=examples, seed=1)
    again = refute(chain, *unit_box(2), **arguments, examples=examples, seed=1)
    assert len(first.witnesses) == len(again.witnesses)
    for a, b in zip(first.witnesses, again.witnesses, strict=True):
        assert torch.equal(a.prefix, b.prefix)
        assert torch.equal(a.inputs, b.inputs)
        assert a.prefix.abs().max() <= 1


def test_a_search_without_time_ends_with_what_it_has():
    rng = torch.Generator().manual_seed(4)
    chain = Chain.of([recurrence(random_cell("lstm", 2, 6, rng, 1.0))])
    assert refute(chain, *unit_box(2), budget_s=0.0).refuted_below(1e-3) is None


def test_depths_below_a_refuted_one_need_not_be_wrong_themselves():
    gap = torch.tensor([0.0, 0.2, 0.0, 0.3, 0.05], dtype=torch.float64)
    witness = Witness(torch.zeros(3, 1).double(), torch.zeros(4, 1).double(), gap, "max")
    assert witness.refuted_below(0.1) == 4
    assert witness.refuted_below(0.01) == 5
    assert witness.refuted_below(0.5) == 0


@pytest.mark.parametrize("decay", [0.6, 0.8, 0.9])
@pytest.mark.parametrize("exponent", [-9, -12, -13, -14, -15, -16, -18])
def test_two_runs_that_stick_a_rounding_apart_refute_no_more_than_the_closed_form(decay, exponent):
    # h' = 0.6h + x after 40 inputs of 2, under inputs of 1: one run falls and the other rises to
    # 1/(1 − 0.6), the gap falls like 0.6^j, and in float64 it stays at a few ulp.
    eps, ones = 10.0**exponent, torch.ones(300, 1).double()
    W, U = (torch.tensor([[value]]).double() for value in (decay, 1.0))
    r = recurrence(ElmanCell(W, U, torch.zeros(1).double(), RELU))
    made = witness_of(Chain.of([r]), 2 * ones[:40], ones, "max")
    exact = math.log(2 * (1 - decay**40) / (1 - decay) / eps) / math.log(1 / decay)
    assert made.refuted_below(eps) <= math.floor(exact) + 1
    if eps >= 1e-9:
        assert made.refuted_below(eps) == min(301, math.floor(exact) + 1)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20), H=st.integers(2, 24), gain=st.floats(0.1, 1.0))
def test_what_rounding_adds_is_less_than_is_taken_off(seed, H, gain):
    # The same runs in numpy's longest floats, 64 bits of mantissa on most machines.
    rng = torch.Generator().manual_seed(seed)
    parts = [random_cell("elman", width, H, rng, gain) for width in (2, H)]
    readout = Readout("out", 9 * draw(rng, 3, H), draw(rng, 3))
    chain = Chain.of([recurrence(cell, layer) for layer, cell in enumerate(parts)], readout)
    x, P = draw(rng, 90, 2), 20
    made = witness_of(chain, x[:P], x[P:], "max")
    W, U, b = ([getattr(c, name).numpy().astype(np.longdouble) for c in parts] for name in "WUb")

    def run(inputs):
        h = [np.zeros(H, np.longdouble) for _ in parts]
        for u in inputs.numpy().astype(np.longdouble):
            for i in range(2):
                h[i] = np.tanh(W[i] @ h[i] + U[i] @ (h[i - 1] if i else u) + b[i])
            yield h[1]

    full, restarted = list(run(x))[P:], run(x[P:])
    A = readout.A.numpy().astype(np.longdouble)
    exact = [np.abs(A @ (f - r)).max() for f, r in zip(full, restarted, strict=True)]
    assert np.abs(made.distances[1:].numpy() - exact).max() <= made.rounding
    assert made.rounding < 1e-7


def test_two_runs_that_both_overflow_are_no_evidence():
    weight = torch.full((1, 1), 1e200, dtype=torch.float64)
    r = recurrence(ElmanCell(weight, torch.ones(1, 1).double(), torch.zeros(1).double(), RELU))
    ones = torch.ones(1, 8, 1, dtype=torch.float64)
    apart = distances(Chain.of([r]), ones, ones)
    assert apart[0, 1] == math.inf
    assert apart[0, -1] == 0.0


def test_only_tokens_are_tried_where_inputs_are_an_embedding():
    rng = torch.Generator().manual_seed(5)
    rows = draw(rng, 12, 3)
    r = recurrence(random_cell("gru", 3, 6, rng, 1.5))
    box = rows.amin(0), rows.amax(0)
    arguments = {"horizon": 16, "restarts": 8, "steps": 10, "prefix": 12}
    found = refute(
        Chain.of([r]), *box, **arguments, rows=rows, seed=2, examples=draw(rng, 4, 30, 3)
    )
    for witness in found.witnesses:
        x = torch.cat([witness.prefix, witness.inputs])
        assert (x[:, None] == rows).all(-1).any(-1).all()
    # Exchanging tokens finds more than as many random sequences of tokens.
    chance = rows[torch.randint(12, (200, 28), generator=rng)]
    apart = distances(Chain.of([r]), chance[:, :12], chance[:, 12:])[:, -1].max()
    assert max(w.distances[-1] for w in found.witnesses) >= apart


def test_the_only_token_that_sets_a_latch_is_found_and_without_it_none_is():
    # h' = tanh(5h + 5x): x = 0 leaves it unset, x = 1 sets it for ever.
    chain = Chain.of([elman([[5.0]], [[5.0]])])
    rows = torch.tensor([[0.0], [1.0]]).double()
    found = refute(chain, *unit_box(1), horizon=64, prefix=8, rows=rows)
    assert found.refuted_below(0.1) == 65
    found = refute(chain, *unit_box(1), horizon=64, prefix=8, rows=rows[:1])
    assert found.witnesses == ()


def test_an_audit_tries_only_the_rows_of_a_graph_s_embedding(tmp_path):
    """The row that would set the latch is never read, and what lies between rows cannot be."""
    initializers = {
        "E": np.array([[-0.2], [0.0], [0.2]], np.float32),
        "W": np.full((1, 1, 1), 1.0, np.float32),
        "R": np.full((1, 1, 1), 0.5, np.float32),
    }
    nodes = [
        helper.make_node("Gather", ["E", "tokens"], ["embedded"]),
        helper.make_node("RNN", ["embedded", "W", "R"], ["Y"], hidden_size=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["T", "N"])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["T", 1, "N", 1])],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    path = tmp_path / "tokens.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path
    )
    report = rnnaudit.audit(path, witness=tmp_path / "w.npz")
    assert report.depth.refuted_below > 0
    with np.load(tmp_path / "w.npz") as found:
        used = np.concatenate([found["prefix"], found["inputs"]]).astype(np.float32)
    assert set(used.ravel()) <= set(initializers["E"].ravel())


def switch(weights, bias=0.0):
    """Return h' = tanh(5h + w·x + bias), which tokens set, hold or unset."""
    module = torch.nn.RNN(3, 1)
    with torch.no_grad():
        module.weight_ih_l0.copy_(torch.tensor([weights]))
        module.weight_hh_l0.fill_(5.0)
        module.bias_ih_l0.fill_(bias)
        module.bias_hh_l0.fill_(0.0)
    return module


def tokens(count=25, length=30, vocabulary=3, seed=0):
    rng = np.random.default_rng(seed)
    return np.eye(vocabulary)[rng.integers(vocabulary, size=(count, length))]


def one_hot(path):
    with np.load(path) as found:
        x = np.concatenate([found["prefix"], found["inputs"]])
    return set(np.unique(x)) <= {0.0, 1.0} and bool((x.sum(1) == 1).all())


def test_of_one_hot_data_counterexamples_are_one_hot_and_nothing_between_is_tried(tmp_path):
    model, saved = tmp_path / "switch.pt", tmp_path / "w.npz"
    # From h = −1 both x₀ and x₁ would be needed to set it, which no token gives.
    torch.save(switch([5.0, 5.0, -5.0], -7.0).state_dict(), model)
    between = rnnaudit.audit(model, data=tokens(), input_range=(0, 1), witness=saved)
    assert (between.verdict, between.depth.refuted_below) == ("unstable", 257)
    assert not one_hot(saved)
    report = rnnaudit.audit(model, data=tokens(), witness=saved)
    assert report.domain == "the one-hot vectors of the data"
    assert 0 < report.depth.refuted_below < 10
    assert one_hot(saved)
    assert rnnaudit.replay(model, saved).replay.passed
    torch.save(switch([5.0, -5.0, 0.0]).state_dict(), model)  # the third token holds it
    report = rnnaudit.audit(model, data=tokens(), witness=saved)
    assert (report.verdict, report.depth.refuted_below) == ("unstable", 257)
    assert one_hot(saved)


def test_one_hot_inputs_can_be_asked_for_and_are_then_all_that_is_drawn(tmp_path, capsys):
    from rnnaudit.cli import app

    torch.save(switch([5.0, -5.0, 0.0]).state_dict(), tmp_path / "switch.pt")
    model, saved = str(tmp_path / "switch.pt"), str(tmp_path / "w.npz")
    asked = ["inspect", model, "--input-range", "one-hot", "--witness", saved, "--format", "json"]
    assert app.main(asked) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["depth"]["domain"] == "the one-hot vectors"
    assert report["settings"]["input_range"] == "one-hot"
    assert report["data"] == "35 synthetic sequences of 256 steps, |x| up to 1"
    assert one_hot(saved)
    with pytest.raises(UsageError, match="or 'one-hot', got 'words'; for example"):
        rnnaudit.audit(model, input_range="words")


def test_the_one_hot_vectors_that_a_graph_makes_of_tokens_are_its_rows(tmp_path):
    weights = {
        "depth": np.array(3, np.int64),
        "values": np.array([0.0, 1.0], np.float32),
        "W": np.array([[[5.0, 5.0, -5.0]]], np.float32),
        "R": np.full((1, 1, 1), 5.0, np.float32),
    }
    nodes = [
        helper.make_node("OneHot", ["tokens", "depth", "values"], ["hot"]),
        helper.make_node("RNN", ["hot", "W", "R"], ["Y"], hidden_size=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["T", "N"])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["T", 1, "N", 1])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    path, saved = tmp_path / "hot.onnx", tmp_path / "w.npz"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path
    )
    report = rnnaudit.audit(path, witness=saved)
    assert report.depth.refuted_below > 0
    assert one_hot(saved)
