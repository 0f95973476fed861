"""Proofs of gated cells: closed forms, counterexamples that must fail, and attacks."""

import math
import re
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit.cells import step
from rnnaudit.certificates import Domain, certify, check, document
from rnnaudit.certificates.balls import Balls, _lstm_step, _weights, find_balls, place_in
from rnnaudit.certificates.gated import comparison_matrix
from rnnaudit.certificates.intervals import Interval
from rnnaudit.certificates.loops import gru_loop, gru_sectors, lstm_loop, lstm_sectors
from rnnaudit.certificates.places import gru_place, lstm_place, reachable_box
from rnnaudit.model import RELU, Activation, GRUCell, LSTMCell

from .attacks import REPEAT, attack, inputs, reached
from .strategies import cells, generator, normal, random_cell, random_states, recurrence, seeds


def default(kind, inputs_, hidden, scale, seed=0):
    torch.manual_seed(seed)
    module = getattr(torch.nn, kind)(inputs_, hidden).double()
    U, W = module.weight_hh_l0.detach() * scale, module.weight_ih_l0.detach() * scale
    b, c = module.bias_ih_l0.detach() * scale, module.bias_hh_l0.detach() * scale
    return recurrence(LSTMCell(W, U, b + c) if kind == "LSTM" else GRUCell(W, U, b, c))


def bistable():
    """One GRU unit that passes a published condition for the other reset form, and latches."""
    zero = torch.zeros(3, 1, dtype=torch.float64)
    U = torch.tensor([[5.0], [0.0], [0.1]], dtype=torch.float64)
    b = torch.tensor([0.0, -4.0, -4.0], dtype=torch.float64)
    return GRUCell(zero, U, b, torch.tensor([0.0, 0.0, 8.0], dtype=torch.float64))


@given(seed=seeds, hidden=st.integers(1, 5))
@settings(max_examples=15)
def test_an_lstm_without_weights_forgets_at_its_forget_gate(seed, hidden):
    b = normal(generator(seed), 4 * hidden)
    cell = LSTMCell(
        torch.zeros(4 * hidden, 2).double(), torch.zeros(4 * hidden, hidden).double(), b
    )
    exact = float(torch.sigmoid(b[hidden : 2 * hidden]).max())
    proofs = certify(recurrence(cell), Domain())
    rate = min(c.bound.value for c in proofs.certificates)
    assert exact <= rate <= exact + 1e-12


def test_the_bistable_gru_is_bistable_and_not_certified():
    cell = bistable()
    x = torch.zeros(2, 1, dtype=torch.float64)
    s = torch.tensor([[-0.99], [0.99]], dtype=torch.float64)
    for _ in range(2000):
        s = step(cell, s, x)
    assert s.flatten().tolist() == pytest.approx([-0.99925, 0.99939], abs=1e-5)
    # From rest, which is one of its fixed points, and wherever both of the others are in reach.
    proofs = certify(recurrence(cell), Domain(0, 0, "x = 0"))
    assert proofs.best is None
    assert proofs.depth(0.5) is None
    cell.W[2] = 10.0
    proofs = certify(recurrence(cell), Domain())
    assert proofs.best is None
    assert proofs.depth(0.5) is None


def test_a_gate_that_holds_is_named_as_the_reason():
    cell = random_cell(0, "lstm", 4, 2, 0.1)
    cell.b[4:8] = 8.0
    reason = certify(recurrence(cell), Domain()).no_proof.reason
    assert reason.startswith("forget gate can reach 0.999")
    assert reason.endswith("for |x| ≤ 1")


def test_any_input_at_all_leaves_a_gate_open():
    cell = random_cell(0, "lstm", 4, 2, 0.1)
    proofs = certify(recurrence(cell), Domain(-math.inf, math.inf, "any input"))
    assert "forget gate can reach 1 for any input" in proofs.no_proof.reason


@pytest.mark.parametrize(("kind", "rate"), [("LSTM", 0.65), ("GRU", 0.66)])
def test_a_default_cell_scaled_to_a_fifth_is_proved(kind, rate):
    proofs = certify(default(kind, 16, 64, 0.2), Domain())
    assert proofs.best.bound.value <= rate


@given(cell=cells(kinds=("gru", "lstm")), seed=seeds)
@settings(max_examples=40 * REPEAT)
def test_the_entrywise_bound_holds_for_pairs_anywhere_in_a_box(cell, seed):
    """|φ(a, x) − φ(b, x)| ≤ M |a − b| for the loop's multipliers over any box of states."""
    rng = generator(seed)
    radius = normal(rng, cell.state_size).abs()
    box = Interval(-radius, radius)
    x_box = Interval(-torch.ones(cell.input_size).double(), torch.ones(cell.input_size).double())
    P = cell.hidden_size
    if isinstance(cell, GRUCell):
        place = gru_place(cell, x_box, box)
        loops = [
            (gru_loop(cell, mixed=mixed), gru_sectors(cell, place, place, mixed=mixed))
            for mixed in (False, True)
        ]
    else:
        h, c = Interval(box.lo[:P], box.hi[:P]), Interval(box.lo[P:], box.hi[P:])
        place = lstm_place(cell, x_box, h, c)
        loops = [(lstm_loop(cell), lstm_sectors(cell, place, place))]
    a, b = (radius * (2 * torch.rand(64, len(radius), generator=rng).double() - 1) for _ in "ab")
    x = 2 * torch.rand(64, cell.input_size, generator=rng).double() - 1
    moved = (step(cell, a, x) - step(cell, b, x)).abs()
    for loop, sector in loops:
        if sector is None:
            continue
        bound = (a - b).abs() @ comparison_matrix(loop, sector).mT
        assert (moved <= bound * (1 + 1e-9) + 1e-12).all()


@given(cell=cells(kinds=("gru", "lstm")), seed=seeds, low=st.floats(-2, 0), high=st.floats(0, 2))
@settings(max_examples=25 * REPEAT)
def test_no_reached_state_leaves_the_box(cell, seed, low, high):
    rng = generator(seed)
    domain = Domain(low, high, "a range")
    r = recurrence(cell, random_states(seed, cell))
    box = reachable_box(cell, Interval(*domain.box(cell.input_size)), r.initial.value)
    s = reached(r, domain, rng, 30)
    if not box.finite:  # the states of an unbounded activation may run away
        return
    assert (s >= box.lo - 1e-12).all()
    assert (s <= box.hi + 1e-12).all()


@given(
    seed=seeds,
    kind=st.sampled_from(["gru", "lstm"]),
    hidden=st.integers(1, 8),
    gain=st.floats(0.01, 3),
    reset_after=st.booleans(),
    low=st.floats(-2, 0.5),
    width=st.floats(0, 2),
)
@settings(max_examples=40 * REPEAT)
def test_no_reached_state_leaves_the_balls(  # noqa: PLR0917
    seed, kind, hidden, gain, reset_after, low, width
):
    rng = generator(seed)
    options = {"reset_after": reset_after} if kind == "gru" else {}
    cell = random_cell(seed, kind, hidden, 3, gain, **options)
    domain = Domain(low, low + width, "a range")
    r = recurrence(cell, random_states(seed, cell))
    x = Interval(*domain.box(3))
    balls = find_balls(cell, x, r.initial.value)
    if balls is None:
        return
    s = reached(r, domain, rng, 40)
    away = s - balls.centre
    assert (away.abs() <= balls.box).all()
    for part, radius in zip(away.split(hidden, dim=1), balls.radii, strict=True):
        assert part.norm(dim=1).max() <= radius
    place = place_in(cell, x, balls, reachable_box(cell, x, r.initial.value).meet(balls.states()))
    U_h = s[:, :hidden] @ cell.U.mT
    if kind == "lstm":
        drives_ = inputs(rng, domain, 3, len(s), 1)[:, 0] @ cell.W.mT + cell.b + U_h
        for name, pre in zip("ifgo", drives_.split(hidden, dim=1), strict=True):
            assert (pre >= place.pre[name].lo - 1e-12).all()
            assert (pre <= place.pre[name].hi + 1e-12).all()


@pytest.mark.parametrize("open_", [1.0, 19.0, 20.5, 22.0, 30.0])
def test_the_bound_on_one_step_of_a_ball_holds_where_the_forget_gate_is_open(open_):
    """Without weights c settles at i g / (1 − f), which a set that holds it must not leave."""
    zero = torch.zeros(4, 1, dtype=torch.float64)
    cell = LSTMCell(zero, zero, torch.tensor([0.3, open_, 0.7, 0.1], dtype=torch.float64))
    start = torch.zeros(2, dtype=torch.float64)
    x = Interval(-torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    settled = math.tanh(0.7) * (1 + math.exp(open_)) / (1 + math.exp(-0.3))
    now = Balls(start, torch.tensor([1.0, settled], dtype=torch.float64), (1.0, settled))
    after = _lstm_step(_weights(cell, x, start, start), now)
    assert float(after.box[1]) >= settled * (1 - 1e-14)


def test_balls_beat_the_box_that_they_are_in():
    r = default("LSTM", 16, 64, 0.2)
    x = Interval(*Domain().box(16))
    balls = find_balls(r.cell, x, r.initial.value)
    box = reachable_box(r.cell, x, r.initial.value)
    assert float(balls.box.max()) < 0.4 * float(box.size.max())
    assert balls.radii[0] < 0.6 * float(balls.box[:64].norm())


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_saturated_cells_have_balls_or_none_but_no_nan(kind):
    r = default(kind, 3, 5, 300.0)
    balls = find_balls(r.cell, Interval(*Domain().box(3)), r.initial.value)
    if balls is not None:
        assert balls.box.isfinite().all()
        assert all(math.isfinite(radius) for radius in balls.radii)


@given(cell=cells(kinds=("gru", "lstm"), max_hidden=4), seed=seeds, scale=st.floats(0, 1))
@settings(max_examples=10 * REPEAT)
def test_no_attack_beats_a_proof(cell, seed, scale):
    rng = generator(seed)
    domain = Domain(-scale, scale, "a range")
    r = recurrence(cell, random_states(seed, cell, scale=0.5))
    attack(r, domain, rng, certify(r, domain))


@given(
    seed=seeds,
    kind=st.sampled_from(["gru", "lstm"]),
    gain=st.floats(0.01, 0.6),
    reset_after=st.booleans(),
)
@settings(max_examples=10 * REPEAT)
def test_no_attack_beats_a_proof_where_proofs_are_found(seed, kind, gain, reset_after):
    rng = generator(seed)
    options = {"reset_after": reset_after} if kind == "gru" else {}
    r = recurrence(random_cell(seed, kind, 5, 2, gain, **options))
    domain = Domain(-0.3, 0.3, "|x| ≤ 0.3")
    attack(r, domain, rng, certify(r, domain))


def test_inputs_stay_in_the_domain():
    x = inputs(generator(0), Domain(-0.5, 0.25, "a range"), 3, 9, 5)
    assert x.shape == (9, 5, 3)
    assert float(x.min()) >= -0.5
    assert float(x.max()) <= 0.25


ODD = {
    "peephole": ("lstm", {"peephole": True}),
    "projection": ("lstm", {"projection": 2}),
    "input forget": ("lstm", {"input_forget": True}),
    "clip": ("lstm", {"clip": 0.5, "clip_output": True}),
    "other squash": ("lstm", {"squash": Activation("softsign"), "candidate": RELU}),
    "hard gates": ("lstm", {"gate": Activation("hardsigmoid", 0.25, 0.5)}),
    "reset before": ("gru", {"reset_after": False}),
    "hard mixing": ("gru", {"gate": Activation("hardsigmoid", 0.25, 0.5)}),
    "clipped mixing": ("gru", {"clip": 0.5, "candidate": Activation("scaledtanh", 0.5, 0.75)}),
}


@pytest.mark.parametrize("name", ODD)
@given(seed=seeds, hidden=st.integers(2, 3 + REPEAT), half=st.booleans())
@settings(max_examples=2 * REPEAT, deadline=None)
def test_odd_cells_have_proofs_that_no_attack_beats_and_files_that_hold(name, seed, hidden, half):
    kind, options = ODD[name]
    cell = random_cell(seed, kind, min(hidden, 64), 2, 0.1, **options)
    # Small weights as a float16 or float32 file stores them.
    tensors = {f.name: getattr(cell, f.name) for f in fields(cell)}
    dtype = torch.float16 if half else torch.float32
    small = {k: (0.2 * v).to(dtype).double() for k, v in tensors.items() if torch.is_tensor(v)}
    r = recurrence(replace(cell, **small), random_states(seed, cell, scale=0.2))
    domain = Domain(-0.3, 0.3, "|x| ≤ 0.3")
    proofs = certify(r, domain)
    assert proofs.best is not None, proofs.failures
    attack(r, domain, generator(seed), proofs)
    for certificate in proofs.certificates:
        text = document(r, domain, replace(proofs, certificates=(certificate,)))
        assert text is not None, certificate.method
        for claim in check(text, r).claims:
            assert claim.k >= certificate.depth(claim.eps, None, claim.norm)


def held(kind, rows, **options):
    """Return a cell of small weights, the gate of these rows held open by its bias."""
    cell = random_cell(0, kind, 4, 2, 0.1, **options)
    bias = cell.b if kind == "lstm" else cell.b_input
    bias[rows] = 8.0
    return cell


def busy(kind):
    """Return a cell whose gates forget, and whose candidate is strong."""
    cell = random_cell(0, kind, 4, 2, 8.0)
    bias = cell.b if kind == "lstm" else cell.b_input
    cell.U[4:8] *= 1e-3
    cell.W[4:8] *= 1e-2
    bias[4:8] = -4.0
    return cell


REASONS = {
    "forget gate": (held("lstm", slice(4, 8)), r"^forget gate can reach 0\.999\d* for"),
    "coupled gate": (
        replace(held("lstm", slice(0, 4), input_forget=True), b=-held("lstm", slice(0, 4)).b),
        r"^forget gate can reach 0\.99\d* for",
    ),
    "update gate": (held("gru", slice(4, 8)), r"^update gate z can reach 0\.999\d* for"),
    "strong LSTM": (
        busy("lstm"),
        r"^over the box \|h\| ≤ 0\.\d+ for \|x\| ≤ 1, the scaled 2-norm is about \d[\d.]*, not",
    ),
    "strong GRU": (
        busy("gru"),
        r"^over the box \|h\| ≤ 1 for \|x\| ≤ 1, the scaled 2-norm is about \d[\d.]*, not",
    ),
    "jump": (
        random_cell(0, "lstm", 4, 2, 0.1, gate=Activation("thresholdedrelu", 0.5)),
        "^thresholdedrelu jumps, so no slope bounds its steps$",
    ),
    "unbounded gate": (
        random_cell(0, "gru", 4, 2, 3.0, gate=RELU, candidate=RELU),
        r"^nothing bounds the update gate z for \|x\| ≤ 1, so no box holds the states$",
    ),
    "tanh": (
        random_cell(0, "elman", 4, 2, 3.0),
        r"^the numerical radius of the scaled weight is about 4\.\d+, not below 1$",
    ),
    "linear": (
        random_cell(0, "elman", 4, 2, 3.0, activation=Activation("affine")),
        r"^the spectral radius of its matrix is about 4\.\d+, not below 1$",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_names_the_term_that_is_too_large(name):
    cell, words = REASONS[name]
    proofs = certify(recurrence(cell), Domain())
    assert proofs.best is None
    assert re.search(words, proofs.no_proof.reason), proofs.no_proof.reason
    for method, reason in proofs.failures:
        number = re.search(r"\d", reason)
        assert number or "jumps" in reason or "nothing bounds" in reason, (method, reason)
