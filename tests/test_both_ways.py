"""What refutes a stack of both directions is one sequence, and every cut of it is as it says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rnnaudit
from rnnaudit import cells
from rnnaudit.certificates import Domain, certify_stack
from rnnaudit.cli import app
from rnnaudit.estimators import refute_both_ways, within_reach
from rnnaudit.model import RELU, ElmanCell, InitialState, Layer, Readout, Recurrence, Stack
from rnnaudit.refutation import load_witness
from rnnaudit.reports import JsonRenderer, TerminalRenderer
from rnnaudit.results import EPSILONS
from tests import strategies

pytestmark = pytest.mark.usefixtures("one_thread")


def both(layer, first, second):
    """Return a layer of two cells, the second of which reads backwards."""
    return Layer(
        tuple(
            Recurrence("s", layer, cell, InitialState(torch.zeros(cell.state_size).double()), back)
            for cell, back in ((first, False), (second, True))
        )
    )


def random_stack(seed, kinds, *, gain, readout):
    layers = []
    for i, kind in enumerate(kinds):
        pair = (
            strategies.random_cell(
                seed + 7 * i + j, kind, hidden=2, inputs=4 if i else 2, gain=gain
            )
            for j in (0, 1)
        )
        layers.append(both(i, *pair))
    rng = torch.Generator().manual_seed(seed)
    A, b = torch.randn(3, 4, generator=rng).double(), torch.randn(3, generator=rng).double()
    return Stack("s", tuple(layers), Readout("y", A, b) if readout else None)


def cut_by_hand(stack, x, k):
    """Step every recurrence over its last k inputs, one position at a time; x [T, I]."""
    for layer in stack.layers:
        sides = []
        for r in layer.recurrences:
            order = x.flip(0) if r.reverse else x
            rows = []
            for t in range(len(order)):
                s = r.initial.value
                for u in order[max(0, t + 1 - k) : t + 1]:
                    s = cells.step(r.cell, s, u)
                rows.append(cells.output(r.cell, s))
            h = torch.stack(rows)
            sides.append(h.flip(0) if r.reverse else h)
        x = torch.cat(sides, dim=-1)
    return cells.readout(stack, x)


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    kinds=st.lists(st.sampled_from(["elman", "gru", "lstm"]), min_size=1, max_size=2),
    norm=st.sampled_from(["max", "2"]),
    readout=st.booleans(),
)
def test_a_recording_lies_in_the_domain_and_errs_as_the_cut_by_hand_does(
    seed, kinds, norm, readout
):
    stack = random_stack(seed, kinds, gain=2.0, readout=readout)
    low, high = torch.tensor([-1.0, 0.0]).double(), torch.tensor([0.5, 2.0]).double()
    found = refute_both_ways(
        stack, low, high, horizon=10, restarts=4, steps=3, seed=seed, norm=norm
    )
    for recording in found.witnesses:
        x = recording.inputs
        assert ((x >= low) & (x <= high)).all()
        full = cut_by_hand(stack, x, len(x))
        deepest = recording.refuted_below(1e-6) - 1
        for k, distance in zip(recording.depths, recording.distances.tolist(), strict=True):
            if k in (recording.depths[0], deepest):
                gap = cut_by_hand(stack, x, k) - full
                size = gap.abs().amax(-1) if norm == "max" else gap.norm(dim=-1)
                assert float(size.max()) == pytest.approx(distance, rel=1e-6, abs=1e-11)


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    kinds=st.lists(st.sampled_from(["elman", "gru"]), min_size=1, max_size=2),
    readout=st.booleans(),
)
def test_no_recording_refutes_a_proved_depth(seed, kinds, readout):
    stack = random_stack(seed, kinds, gain=0.3, readout=readout)
    proof = certify_stack(stack, Domain(-1.0, 1.0, "|x| ≤ 1"), time_budget=1.0)
    one = torch.ones(2).double()
    found = refute_both_ways(stack, -one, one, horizon=32, restarts=2, steps=3, seed=seed)
    for eps in EPSILONS:
        proved = proof.depth(eps)
        if proved is not None:
            assert (found.refuted_below(eps) or 0) <= proved


def leaky(decay):
    W, U = torch.tensor([[decay]]).double(), torch.ones(1, 1).double()
    cell = ElmanCell(W, U, torch.zeros(1).double(), RELU)
    return Stack("s", (both(0, cell, cell),))


def test_a_leaky_integrator_is_refuted_up_to_its_geometric_series():
    # After P ones depth k errs by decay^k (1 − decay^P)/(1 − decay), in the middle and both ways.
    decay, none, one = 0.8, torch.zeros(1).double(), torch.ones(1).double()
    found = refute_both_ways(leaky(decay), none, one, horizon=128)
    for eps in (1e-1, 1e-3):
        exact = math.floor(math.log(1 / (1 - decay) / eps) / math.log(1 / decay)) + 1
        assert found.refuted_below(eps) == exact


def latch(layers=1):
    """Return h' = tanh(5h + 5x) in both directions: set by one input, held for ever."""
    module = torch.nn.RNN(1, 1, num_layers=layers, bidirectional=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.0 if parameter.ndim == 1 else 5.0)
    return module


def test_a_latch_is_refuted_at_every_depth_of_the_horizon():
    five = torch.full((1, 1), 5.0).double()
    cell = ElmanCell(five, five, torch.zeros(1).double())
    one = torch.ones(1).double()
    found = refute_both_ways(Stack("s", (both(0, cell, cell),)), -one, one, horizon=128)
    assert found.refuted_below(1e-6) == 129
    assert not found.never_forgets(0.1)  # no search that ends before the others' end says so
    assert not found.cut


def test_what_no_input_reaches_is_not_refuted():
    five, none = torch.full((1, 1), 5.0).double(), torch.zeros(1, 1).double()
    cell = ElmanCell(five, none, torch.zeros(1).double())
    one = torch.ones(1).double()
    found = refute_both_ways(Stack("s", (both(0, cell, cell),)), -one, one, horizon=64)
    assert found.refuted_below(1e-6) is None


def test_the_horizon_falls_with_the_cost_of_a_step_and_a_search_without_time_says_so():
    assert within_reach(leaky(0.5), 256) == 256
    wide = ElmanCell(*(torch.zeros(1500, 1500).double() for _ in "WU"), torch.zeros(1500).double())
    assert within_reach(Stack("s", (both(0, wide, wide),)), 256) < 64
    # Depth h takes a window of 2h − 1 inputs, and 2h more on both sides.
    assert [within_reach(leaky(0.5), 256, steps) for steps in (10, 60, 100)] == [0, 9, 13]
    one = torch.ones(1).double()
    assert refute_both_ways(leaky(0.5), -one, one, horizon=64, budget_s=0.0).cut


def test_a_search_ends_where_it_has_cost_what_it_is_worth_and_not_for_lack_of_time(monkeypatch):
    low, high = -torch.ones(2).double(), torch.ones(2).double()
    stack = random_stack(3, ["gru", "elman"], gain=0.5, readout=False)
    whole = refute_both_ways(stack, low, high, horizon=32)
    costs = []
    for worth in (0.0, 2e10, 6e10):
        monkeypatch.setattr("rnnaudit.estimators.both_ways.WORTH", worth)
        part = refute_both_ways(stack, low, high, horizon=32)
        assert not part.cut
        costs.append(sum(len(each.depths) for each in part.witnesses))
        assert all(
            (part.refuted_below(eps) or 0) <= (whole.refuted_below(eps) or 0) for eps in EPSILONS
        )
    assert costs[0] == 0
    assert costs == sorted(costs)
    assert sum(len(each.depths) for each in whole.witnesses) > costs[1] > 0


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["pt", "onnx"])
def test_what_an_audit_saves_of_both_directions_replays_in_the_model_s_runtime(
    tmp_path, capsys, layers, kind
):
    from rnnaudit.export import build, write

    path = tmp_path / "latch.pt"
    torch.save({f"rnn.{n}": v for n, v in latch(layers).state_dict().items()}, path)
    if kind == "onnx":
        (stack,) = rnnaudit.load(path).stacks
        path = tmp_path / "latch.onnx"
        write(build(stack), path)
    data = torch.linspace(-1, 1, 36).reshape(3, 12, 1)
    report = rnnaudit.audit(path, data=data, witness=tmp_path / "w.npz", input_range=(-1, 1))
    assert report.verdict == "unstable"
    assert report.depth.refuted_below == 257
    stored = load_witness(tmp_path / "w.npz")
    assert stored.where == rnnaudit.load(path).stacks[0].name
    found = rnnaudit.replay(path, tmp_path / "w.npz")
    replayed = found.replay
    own = "PyTorch's own modules in float64" if kind == "pt" else "the model in ONNX Runtime"
    assert (replayed.passed, replayed.runtime, replayed.both_ways) == (True, own, True)
    assert replayed.refuted_below == 257
    assert replayed.replayed == pytest.approx(replayed.found, abs=1e-4)
    text = " ".join(TerminalRenderer().render(found).split())
    assert f"REPLAYS in {own}: with every recurrence cut to 256 inputs" in text
    assert '"both_ways": true' in JsonRenderer().render(found)
    assert app.main(["verify", str(path), "--witness", str(tmp_path / "w.npz")]) == 0
    capsys.readouterr()
