"""Measured depth: every depth at once equals running the model on windows."""

# ruff: noqa: E741, PLR0917
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit import cells, depth, evidence
from rnnaudit.depth import layerwise, restarts
from rnnaudit.model import (
    RELU,
    Activation,
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

KINDS = ("elman", "relu", "gru", "gru-before", "lstm", "lstm-projected")


def random_cell(kind, I, H, rng, gain=1.0):
    scale = gain / math.sqrt(H)
    if kind in {"elman", "relu"}:
        activation = RELU if kind == "relu" else Activation("tanh")
        return ElmanCell(scale * draw(rng, H, H), draw(rng, H, I), draw(rng, H), activation)
    if kind.startswith("gru"):
        return GRUCell(
            draw(rng, 3 * H, I),
            scale * draw(rng, 3 * H, H),
            draw(rng, 3 * H),
            draw(rng, 3 * H),
            reset_after=kind == "gru",
        )
    if kind == "lstm":
        return LSTMCell(draw(rng, 4 * H, I), scale * draw(rng, 4 * H, H), draw(rng, 4 * H))
    P = max(1, H - 2)
    return LSTMCell(
        draw(rng, 4 * H, I),
        scale * draw(rng, 4 * H, P),
        draw(rng, 4 * H),
        projection=draw(rng, P, H),
    )


def recurrence(cell, rng=None, *, layer=0, reverse=False):
    if rng is None:
        return Recurrence("r", layer, cell, InitialState(torch.zeros(cell.state_size).double()))
    start = InitialState(0.5 * draw(rng, cell.state_size), "constant")
    return Recurrence("r", layer, cell, start, reverse)


def random_stack(kinds, I, H, rng, *, reverse=False, bidirectional=False, readout=0, gain=1.0):
    layers = []
    for layer, kind in enumerate(kinds):
        directions = (False, True) if bidirectional else (reverse,)
        layers.append(
            Layer(
                tuple(
                    recurrence(random_cell(kind, I, H, rng, gain), rng, layer=layer, reverse=r)
                    for r in directions
                )
            )
        )
        I = layers[-1].output_size
    head = Readout("head", draw(rng, readout, I), draw(rng, readout)) if readout else None
    return Stack("s", tuple(layers), head)


def on_windows(stack, x):
    """Run the original on the last k inputs of every position: errors [N, T] by depth 0 … T−1."""
    N, T, _ = x.shape
    full = cells.run_stack(stack, x)
    reverse = next(stack.recurrences()).reverse
    errors = torch.zeros(N, T, dtype=torch.float64)
    last = list(stack.recurrences())[-1]
    nothing = cells.readout(stack, cells.output(last.cell, last.initial.value))
    for k in range(T):
        for t in range(1, T + 1):
            at = T - t if reverse else t - 1
            if k == 0:
                y = nothing.expand(N, -1)
            else:
                first = max(0, t - k)
                window = x[:, T - t : T - first] if reverse else x[:, first:t]
                outputs = cells.run_stack(stack, window)
                y = outputs[:, 0] if reverse else outputs[:, -1]
            errors[:, k] = torch.maximum(errors[:, k], (y - full[:, at]).abs().amax(-1))
    return errors


def padded(study):
    """Return the errors of all depths [N, T]: past the last one restarts have merged."""
    errors = torch.zeros(len(study.lengths), study.T, dtype=torch.float64)
    errors[:, : study.errors.shape[1]] = study.errors
    return errors


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    reverse=st.booleans(),
    readout=st.sampled_from([0, 3]),
    T=st.integers(1, 14),
    gain=st.sampled_from([0.3, 1.0, 2.5]),
)
def test_every_depth_equals_the_original_run_on_windows(seed, kinds, reverse, readout, T, gain):
    rng = torch.Generator().manual_seed(seed)
    stack = random_stack(kinds, 2, 4, rng, reverse=reverse, readout=readout, gain=gain)
    x = draw(rng, 3, T, 2)
    study = depth.study_stack(stack, x)
    brute = on_windows(stack, x)
    assert study.complete
    assert study.every_depth
    scale = 1 + brute.max()
    assert torch.allclose(padded(study), brute, rtol=1e-9, atol=1e-10 * float(scale))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    reverse=st.booleans(),
    T=st.integers(1, 20),
)
def test_one_recurrence_equals_its_jacobi_sweeps(seed, kind, reverse, T):
    rng = torch.Generator().manual_seed(seed)
    r = recurrence(random_cell(kind, 3, 5, rng, 0.7), rng, reverse=reverse)
    x = draw(rng, 4, T, 3)
    errors = padded(depth.study_recurrence(r, x))
    full = cells.run(r, x)
    for k in range(T):
        assert torch.allclose(
            errors[:, k],
            (cells.truncated(r, x, k) - full).abs().amax((1, 2)),
            rtol=1e-9,
            atol=1e-10 * float(1 + full.abs().max()),
        )


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    reverse=st.booleans(),
    eps=st.sampled_from([1e-1, 1e-3]),
)
def test_units_of_the_state_need_what_restarted_states_show(seed, kind, reverse, eps):
    rng = torch.Generator().manual_seed(seed)
    r = recurrence(random_cell(kind, 2, 5, rng, 0.5), rng, reverse=reverse)
    x = draw(rng, 3, 24, 2)
    study = depth.study_recurrence(r, x, unit_eps=eps)
    read = cells.reads(r, x)
    full = cells.trajectory(r.cell, read, r.initial.value)
    last = torch.full((3, r.cell.state_size), -1)
    for k in range(24):
        restarted = [cells.trajectory(r.cell, read[:, max(0, t - k) : t], r.initial.value)
                     for t in range(1, 25)]  # fmt: skip
        s = torch.stack([y[:, -1] if k else r.initial.value.expand(3, -1) for y in restarted], 1)
        last[((s - full).abs() > eps).any(1)] = k
    needed = (last + 1).amax(0)
    known = (2 * (last + 1) <= 24).all(0)
    expected = [int(k) if ok else None for k, ok in zip(needed, known, strict=True)]
    assert list(study.unit_depths()) == expected
    parts = depth.pool([depth.study_recurrence(r, part, unit_eps=eps) for part in x.split(2)])
    assert parts.unit_depths() == study.unit_depths()


def test_no_unit_is_given_a_depth_that_rounding_could_explain():
    rng = torch.Generator().manual_seed(0)
    r = recurrence(random_cell("gru", 2, 4, rng, 0.5), rng)
    assert depth.study_recurrence(r, draw(rng, 2, 30, 2), unit_eps=1e-15).unit_depths() is None
    assert depth.study_recurrence(r, draw(rng, 2, 30, 2)).unit_depths() is None


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    layers=st.integers(1, 2),
    readout=st.sampled_from([0, 2]),
)
def test_both_directions_are_each_truncated_to_the_same_depth(seed, kind, layers, readout):
    rng = torch.Generator().manual_seed(seed)
    stack = random_stack([kind] * layers, 2, 4, rng, bidirectional=True, readout=readout, gain=0.4)
    x = draw(rng, 3, 16, 2)
    study = depth.study_stack(stack, x)
    full = cells.run_stack(stack, x)
    assert study.every_depth or layers == 2
    grid = set(depth.grid(16)) if layers == 2 else set(study.depths)
    for k in grid & set(study.depths):
        cut = cells.run_stack(stack, x, {r.label: k for r in stack.recurrences()})
        error = (cut - full).abs().amax((1, 2))
        found = study.errors[:, study.depths.index(k)]
        assert torch.allclose(found, error, rtol=1e-8, atol=1e-10)


def layerwise_errors(stack, x):
    """Cut every recurrence to each depth 0 … T − 1: errors [N, T]."""
    full = cells.run_stack(stack, x)
    cut = [
        cells.run_stack(stack, x, {r.label: k for r in stack.recurrences()})
        for k in range(x.shape[1])
    ]
    return torch.stack([(y - full).abs().amax((1, 2)) for y in cut], dim=1)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), gain=st.sampled_from([0.3, 0.7, 2.0]))
def test_no_depth_at_or_above_a_layerwise_claim_errs_by_more(seed, gain):
    rng = torch.Generator().manual_seed(seed)
    stack = random_stack(["gru", "elman"], 2, 4, rng, bidirectional=True, gain=gain)
    x = draw(rng, 3, 40, 2)
    study, errors = depth.study_stack(stack, x), layerwise_errors(stack, x)
    for eps in EPSILONS:
        for row, k in zip(errors, study.needed(eps), strict=True):
            wrong = (row > eps * (1 + 1e-6)).nonzero()
            truth = int(wrong.max()) + 1 if len(wrong) else 0
            assert k == truth if 2 * truth <= 40 else k is None


def turning(amplitude, T):
    """Two layers, the first of which turns by 45° a step: every fourth depth shows nothing."""
    turn = math.pi / 4
    R = (
        0.99
        * torch.tensor(
            [[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]]
        ).double()
    )
    none, eye = torch.zeros(2, 2).double(), torch.eye(2).double()
    b, wide = torch.zeros(2).double(), torch.zeros(2, 4).double()
    first = wide.clone()
    first[0, 0] = 1.0
    layers = [
        Layer(
            (
                recurrence(ElmanCell(W, U, b), layer=i),
                recurrence(ElmanCell(none, 0 * U, b), layer=i, reverse=True),
            )
        )
        for i, (W, U) in enumerate([(R, eye), (none, first)])
    ]
    s = amplitude * torch.tensor([0.0, 1.0]).double()
    x = ((eye - R) @ s).expand(1, T, 2).clone()
    x[0, 0] = s
    return Stack("s", tuple(layers), None), x


def test_depths_between_those_of_a_grid_are_not_taken_on_trust():
    stack, x = turning(1e-4, 160)
    errors = layerwise_errors(stack, x)[0]
    assert errors[8] < 1e-7
    assert errors[10] > 1e-5
    assert depth.study_stack(stack, x).needed(1e-6) == (None,)
    assert depth.study_stack(stack, x).longer_than(1e-6) == (80,)


def test_a_layerwise_study_that_must_stop_claims_no_depth_that_it_has_not_seen(monkeypatch):
    rng = torch.Generator().manual_seed(12)
    stack = random_stack(["gru"] * 2, 2, 4, rng, bidirectional=True, gain=0.3)
    x = draw(rng, 3, 60, 2)
    whole = depth.study_stack(stack, x)
    for most in (0, 1e9, 1e10):
        monkeypatch.setattr(layerwise, "_MOST", most)
        part = depth.study_stack(stack, x)
        for eps in EPSILONS:
            for k, least in zip(part.needed(eps), whole.needed(eps), strict=True):
                assert k is None or k >= least
    spent = depth.study_stack(stack, x, budget_s=1e-9)
    assert spent.needed(1e-1) == (None,) * 3
    assert not spent.complete


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), gain=st.sampled_from([0.3, 0.7]))
def test_a_layerwise_study_that_must_be_cheap_evaluates_what_it_claims(seed, gain):
    rng = torch.Generator().manual_seed(seed)
    stack = random_stack(["gru", "elman"], 2, 4, rng, bidirectional=True, gain=gain)
    x = draw(rng, 3, 80, 2)
    errors = layerwise_errors(stack, x)
    wanted = (1e-3, *EPSILONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layerwise, "_LEAST", 2e10)
        patch.setattr(layerwise, "_EACH", 0.0)
        study = depth.study_stack(stack, x, epsilons=wanted)
    for eps in EPSILONS:
        for row, k in zip(errors, study.needed(eps), strict=True):
            if k is None:
                assert row[40] > eps * (1 - 1e-6)
            else:
                assert k in study.depths
                assert row[k] <= eps * (1 + 1e-6)
    # The one that needs most of the ε that matters most is known to the step.
    if None not in study.needed(1e-3):
        assert max(study.needed(1e-3)) == int((errors.amax(0) > 1e-3).nonzero().max()) + 1


@pytest.mark.slow
def test_what_a_study_is_worth_encloses_the_depth_of_a_stack_of_real_size():
    rng = torch.Generator().manual_seed(3)
    stack = random_stack(["gru"] * 3, 19, 64, rng, bidirectional=True)
    study = depth.study_stack(stack, draw(rng, 15, 256, 19), epsilons=(1e-3, *EPSILONS))
    k = max(study.needed(1e-3))
    below = max(depth for depth in study.depths if depth < k)
    assert below >= 7 / 8 * k
    assert study.errors[:, study.depths.index(below)].max() > 1e-3


def test_what_a_glance_finds_to_have_no_depth_has_none():
    rng = torch.Generator().manual_seed(5)
    hopeless = 0
    for gain in (0.3, 0.7, 2.0):
        stack = random_stack(["gru", "elman"], 2, 4, rng, bidirectional=True, gain=gain)
        x = draw(rng, 4, 60, 2)
        full, glance = depth.study_stack(stack, x), depth.glance_at_stack(stack, x)
        first = glance.study
        assert first.depths == (0, 30)
        for eps in EPSILONS:
            for exact, told in zip(full.needed(eps), first.needed(eps), strict=True):
                assert told is not None or exact is None
                hopeless += told is None
        later = glance.finish(None)
        assert later.depths == full.depths
        torch.testing.assert_close(later.errors, full.errors, rtol=0, atol=0, equal_nan=True)
    assert hopeless


def test_a_glance_without_time_can_still_be_finished():
    rng = torch.Generator().manual_seed(5)
    stack = random_stack(["gru", "elman"], 2, 4, rng, bidirectional=True, gain=0.3)
    x = draw(rng, 4, 60, 2)
    glance = depth.glance_at_stack(stack, x, budget_s=1e-9)
    assert not glance.study.complete
    full = depth.study_stack(stack, x)
    later = glance.finish(None)
    torch.testing.assert_close(later.errors, full.errors, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("decay", "T", "k"), [(0.9, 400, 88), (0.99, 2400, 1146)])
def test_a_leaky_integrator_needs_exactly_what_its_geometric_series_says(decay, T, k):
    one = torch.ones(1, 1, dtype=torch.float64)
    cell = ElmanCell(decay * one, one, torch.zeros(1, dtype=torch.float64), RELU)
    study = depth.study_recurrence(recurrence(cell), torch.ones(1, T, 1, dtype=torch.float64))
    # In the limit the error is λ^k/(1 − λ); at T it is smaller by λ^T, which does not matter here.
    assert k == math.ceil(math.log(1 / ((1 - decay) * 1e-3)) / math.log(1 / decay))
    assert evidence.measured_depth(study, 1e-3).k == k


@given(seed=st.integers(0, 2**31), n=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_a_strictly_triangular_weight_is_exact_at_its_size(seed, n):
    rng = torch.Generator().manual_seed(seed)
    W = draw(rng, n, n).tril(-1)
    study = depth.study_recurrence(
        recurrence(ElmanCell(W, draw(rng, n, 2), draw(rng, n))), draw(rng, 3, 30, 2)
    )
    assert evidence.measured_depth(study, 1e-10).k <= n
    if n > 1:
        W[1:, :-1].diagonal().fill_(2.0)
        study = depth.study_recurrence(
            recurrence(ElmanCell(W, torch.ones(n, 1).double(), draw(rng, n))), draw(rng, 9, 30, 1)
        )
        assert evidence.measured_depth(study, 1e-10).k == n


@pytest.mark.parametrize("eps", [1e-7, 1e-9, 1e-11, 1e-12, 1e-13, 1e-14, 1e-30, 5e-324])
def test_a_depth_is_exact_however_small_the_error_or_there_is_none(eps):
    one = torch.ones(1, 1, dtype=torch.float64)
    cell = ElmanCell(0.9 * one, one, torch.zeros(1, dtype=torch.float64), RELU)
    x = torch.ones(2, 2000, 1, dtype=torch.float64)
    study = depth.study_recurrence(recurrence(cell), x, floor=depth.floor_for(eps))
    truth = math.ceil((math.log(eps) + math.log(1 - 0.9)) / math.log(0.9))
    measured = evidence.measured_depth(study, eps)
    assert measured.k == (truth if eps >= 2e-12 else None)
    ids = {f.id for f in evidence.caveats(study, measured, eps, "r")}
    assert ("RA214" in ids) == (measured.k is None)
    if measured.k is None:
        assert 250 < measured.longer_than < truth


def latch():
    """Return h' = tanh(5h + 5x): a bit that is set once and held for ever."""
    five = torch.full((1, 1), 5.0, dtype=torch.float64)
    return recurrence(ElmanCell(five, five, torch.zeros(1, dtype=torch.float64)))


def test_a_latch_is_longer_than_the_data():
    x = torch.zeros(4, 200, 1, dtype=torch.float64)
    x[:, 0] = 1.0
    measured = evidence.measured_depth(depth.study_recurrence(latch(), x), 1e-3)
    assert measured.k is None
    assert measured.longer_than == 100
    assert measured.exceed_probability is None


def test_a_sequence_that_none_is_longer_than_shows_all_and_its_length_is_exact():
    # h_t = x_1 + … + x_t of x ≡ 1 errs by t − k at depth k: T alone is exact for ε < 1.
    one = torch.ones(1, 1, dtype=torch.float64)
    adder = recurrence(ElmanCell(one, one, torch.zeros(1, dtype=torch.float64), RELU))
    x = torch.ones(3, 30, 1, dtype=torch.float64)
    for whole in (False, True):
        study = depth.study_recurrence(adder, x, whole=whole, unit_eps=0.5)
        assert study.needed(0.5) == (30 if whole else None,) * 3
        assert study.needed(20.5) == (10,) * 3
        assert study.needed(10.5) == (20 if whole else None,) * 3
        assert study.unit_depths() == (30 if whole else None,)
    found = evidence.caveats(study, evidence.measured_depth(study, 0.5), 0.5, "rnn")
    assert [f.id for f in found] == ["RA203"]  # three sequences are few; none is short
    spent = depth.study_recurrence(adder, x, whole=True, budget_s=1e-9)
    assert spent.needed(0.5) == (None,) * 3


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**31), gain=st.sampled_from([0.7, 2.0, 5.0]))
def test_whole_sequences_need_of_a_grid_what_every_depth_shows(seed, gain):
    rng = torch.Generator().manual_seed(seed)
    stack = random_stack(["gru", "elman"], 2, 4, rng, bidirectional=True, gain=gain)
    x = draw(rng, 3, 14, 2)
    study, errors = depth.study_stack(stack, x, whole=True), layerwise_errors(stack, x)
    for eps in EPSILONS:
        for row, k in zip(errors, study.needed(eps), strict=True):
            wrong = (row > eps * (1 + 1e-6)).nonzero()
            assert k == (int(wrong.max()) + 1 if len(wrong) else 0)


def test_an_error_of_zero_at_depth_zero_does_not_excuse_the_depths_after_it():
    # Unit 0 adds up x_0 and unit 1, the output, is relu(x_1 − unit 0). A pulse of x_0 at t = 1
    # silences x_1 = 1 at t = 2 … 10: the output is 0 in full, and so it is at depth 0.
    W = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    cell = ElmanCell(W, torch.eye(2).double(), torch.zeros(2).double(), RELU)
    readout = Readout("y", torch.tensor([[0.0, 1.0]]).double(), torch.zeros(1).double())
    x = torch.zeros(1, 40, 2, dtype=torch.float64)
    x[:, 0, 0] = 1.0
    x[:, 1:10, 1] = 1.0
    study = depth.study_recurrence(recurrence(cell), x, readout=readout)
    assert study.errors[0].tolist() == [0.0] + 9 * [1.0]
    assert evidence.measured_depth(study, 0.5).k == 10


def test_one_step_of_data_shows_at_most_depth_zero():
    r = latch()
    study = depth.study_recurrence(r, torch.ones(2, 1, 1, dtype=torch.float64))
    assert study.errors.shape == (2, 1)
    assert evidence.measured_depth(study, 1e-3).longer_than == 0
    nothing = depth.study_recurrence(r, torch.zeros(2, 1, 1, dtype=torch.float64))
    assert evidence.measured_depth(nothing, 1e-3).k == 0


def test_a_model_that_overflows_has_no_depth_and_says_so():
    cell = ElmanCell(
        torch.full((1, 1), 1e30).double(), torch.ones(1, 1).double(), torch.zeros(1).double(), RELU
    )
    x = torch.ones(2, 40, 1, dtype=torch.float64)
    x[1] = 0.0
    study = depth.study_recurrence(recurrence(cell), x)
    measured = evidence.measured_depth(study, 1e-3)
    assert measured.k is None
    assert study.needed(1e-3) == (None, 0)
    assert evidence.curve(study) == ()
    assert "RA209" in {f.id for f in evidence.caveats(study, measured, 1e-3, "r")}


def test_a_spent_budget_is_labelled_and_claims_half_of_what_it_saw():
    x = torch.zeros(2, 4000, 1, dtype=torch.float64)
    x[:, 0] = 1.0
    study = depth.study_recurrence(latch(), x, budget_s=0.05)
    assert not study.complete
    (horizon,) = set(study.horizons)
    assert horizon < 4000
    measured = evidence.measured_depth(study, 1e-3)
    assert measured.longer_than == horizon // 2
    assert "RA208" in {f.id for f in evidence.caveats(study, measured, 1e-3, "r")}


def test_groups_of_sequences_change_nothing(monkeypatch):
    rng = torch.Generator().manual_seed(3)
    r = recurrence(random_cell("lstm", 2, 6, rng, 0.5), rng)
    x = draw(rng, 7, 50, 2)
    whole = depth.study_recurrence(r, x)
    monkeypatch.setattr(restarts, "_BYTES", 100_000)
    monkeypatch.setattr(restarts, "_BLOCK", 2_000)
    seen = []
    parts = depth.study_recurrence(r, x, progress=seen.append)
    assert torch.allclose(padded(whole), padded(parts), atol=1e-11)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_studies_of_several_lengths_pool():
    rng = torch.Generator().manual_seed(5)
    r = recurrence(random_cell("gru", 2, 5, rng, 0.5), rng)
    short, long = draw(rng, 3, 20, 2), draw(rng, 2, 90, 2)
    study = depth.pool([depth.study_recurrence(r, short), depth.study_recurrence(r, long)])
    assert study.lengths == (20, 20, 20, 90, 90)
    assert study.needed(1e-2)[3:] == depth.study_recurrence(r, long).needed(1e-2)
    with pytest.raises(ValueError, match="norm"):
        depth.pool([study, depth.study_recurrence(r, short, norm="2")])


def test_grids_of_several_lengths_pool_and_keep_each_depth():
    rng = torch.Generator().manual_seed(11)
    stack = random_stack(["gru"] * 2, 2, 4, rng, bidirectional=True, gain=0.3)
    parts = [depth.study_stack(stack, draw(rng, 2, T, 2), epsilons=[0.05]) for T in (24, 60)]
    study = depth.pool(parts)
    assert not study.every_depth
    for eps in (0.5, 0.05, 1e-3):
        assert study.needed(eps) == parts[0].needed(eps) + parts[1].needed(eps)


def test_the_two_norm_is_over_output_units():
    rng = torch.Generator().manual_seed(6)
    r = recurrence(random_cell("gru", 2, 5, rng, 0.5), rng)
    x = draw(rng, 3, 20, 2)
    gap = torch.linalg.vector_norm(cells.truncated(r, x, 4) - cells.run(r, x), dim=-1)
    study = depth.study_recurrence(r, x, norm="2")
    assert torch.allclose(study.errors[:, 4], gap.amax(1))


def test_confidence_is_clopper_and_pearson():
    assert evidence.exceed_probability(77, 0, 0.95) == pytest.approx(1 - 0.05 ** (1 / 77))
    assert evidence.exceed_probability(10, 10, 0.95) == 1.0
    # The bound's own definition: at p, r or fewer failures have probability 1 − confidence.
    p = evidence.exceed_probability(50, 2, 0.95)
    tail = sum(math.comb(50, j) * p**j * (1 - p) ** (50 - j) for j in range(3))
    assert tail == pytest.approx(0.05)
    assert evidence.allowed_failures(50, p, 0.95) == 2
    assert evidence.allowed_failures(5, 0.1, 0.95) is None


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_the_stated_confidence_holds_over_simulated_audits(failures):
    """Depths of random sequences: the chosen k exceeds its stated share in ≤ 5 % of audits."""
    rng = torch.Generator().manual_seed(17 + failures)
    n, audits, misses = 24, 1000, 0
    for _ in range(audits):
        p = float(torch.rand(1, generator=rng)) * 0.8 + 0.1
        # K is geometric (integers: many ties); study errors are 1 below K_i and 0 from it on.
        K = (torch.rand(n, generator=rng).log() / math.log(p)).long().clamp(max=200)
        errors = (torch.arange(201) < K.unsqueeze(1)).double()
        study = depth.DepthStudy(errors, tuple(range(201)), (1000,) * n, (1000,) * n)
        measured = evidence.measured_depth(study, 0.5, failures=failures)
        exceeding = p ** (measured.k + 1)  # P(K > k)
        misses += exceeding > measured.exceed_probability
    assert misses <= 0.05 * audits + 2 * math.sqrt(0.05 * 0.95 * audits)


def test_warnings_name_what_weakens_a_depth():
    rng = torch.Generator().manual_seed(8)
    r = recurrence(random_cell("gru", 2, 5, rng, 0.6), rng)
    study = depth.study_recurrence(r, draw(rng, 3, 400, 2))
    found = evidence.caveats(study, evidence.measured_depth(study, 1e-3), 1e-3, "r")
    assert [f.id for f in found] == ["RA203"]
    assert "64\u00a0% of others" in found[0].message  # 1 − 0.05^⅓ = 63.2 %, rounded up
    x = torch.zeros(30, 20, 1, dtype=torch.float64)
    x[:, 0] = 1.0
    study = depth.study_recurrence(latch(), x)
    found = evidence.caveats(study, evidence.measured_depth(study, 1e-3), 1e-3, "r")
    assert [f.id for f in found] == ["RA202"]
    assert "more than 10 of 20 steps" in found[0].message


def test_a_counter_drifts_and_a_default_lstm_does_not():
    count = LSTMCell(
        torch.zeros(4, 1).double(),
        torch.zeros(4, 1).double(),
        torch.tensor([3.0, 9.0, 3.0, 0.0]).double(),
    )
    x = torch.zeros(2, 200, 1, dtype=torch.float64)
    found = evidence.drift(recurrence(count), x, "lstm")
    assert found is not None
    assert found.id == "RA206"
    rng = torch.Generator().manual_seed(9)
    calm = random_cell("lstm", 1, 6, rng, 0.3)
    assert evidence.drift(recurrence(calm), draw(rng, 4, 200, 1), "lstm") is None
    assert evidence.drift(latch(), x, "rnn") is None


def test_slow_cells_under_noise_seldom_seem_to_drift():
    rng = torch.Generator().manual_seed(10)
    seen = 0
    for _ in range(20):
        W, U, b = draw(rng, 128, 1), torch.zeros(128, 32).double(), torch.zeros(128).double()
        b[32:64] = 2.5  # f about 0.92: what is held changes slowly
        cell = LSTMCell(2 * W, U, b)
        seen += evidence.drift(recurrence(cell), draw(rng, 8, 240, 1), "lstm") is not None
    assert seen <= 1
