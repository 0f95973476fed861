"""Elman proofs: the values of theory, the cases that must fail, and attacks that must not win."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit.certificates import Domain, certify, check, document
from rnnaudit.certificates.elman import proves_rate
from rnnaudit.certificates.interface import DEEPEST, geometric_depth
from rnnaudit.certificates.intervals import Interval
from rnnaudit.certificates.radius import minimise_radius, numerical_radius_above
from rnnaudit.model import RELU, TANH, Activation, ElmanCell, InitialState, Readout, Recurrence

from .attacks import REPEAT, attack, truncation_error
from .strategies import cells, generator, normal, random_cell, recurrence, seeds

ANY = Domain(-math.inf, math.inf, "any input")


def default_rnn(inputs_, hidden, seed=0):
    torch.manual_seed(seed)
    module = torch.nn.RNN(inputs_, hidden).double()
    W, U = module.weight_hh_l0.detach(), module.weight_ih_l0.detach()
    return recurrence(ElmanCell(W, U, (module.bias_ih_l0 + module.bias_hh_l0).detach()))


def by_method(certificates):
    return {c.method: c for c in certificates.certificates}


@pytest.mark.parametrize(("hidden", "rate", "k"), [(32, 0.768, 37), (64, 0.79, 41)])
def test_the_default_rnn_is_stable_though_its_norm_exceeds_one(hidden, rate, k):
    proofs = certify(default_rnn(16, hidden), ANY)
    assert "‖W‖₂ is 1." in dict(proofs.failures)["spectral norm"]
    assert proofs.best.method == "numerical radius"
    assert proofs.best.bound.value <= rate
    assert proofs.depth(1e-3) <= k


def test_the_two_norm_depth_beats_the_published_tool():
    proofs = certify(default_rnn(32, 64), ANY)
    assert proofs.depth(1e-3, norm="2", radius=8.0) <= 44


@pytest.mark.slow
@pytest.mark.parametrize(("inputs_", "hidden", "k"), [(16, 128, 43), (32, 256, 53)])
def test_larger_default_rnns(inputs_, hidden, k):
    proofs = certify(default_rnn(inputs_, hidden), ANY)
    assert proofs.depth(1e-3) <= k
    assert proofs.depth(1e-3, norm="2", radius=math.sqrt(hidden)) <= 53


@pytest.mark.parametrize(("rate", "k"), [(0.9, 88), (0.99, 1146)])
def test_a_relu_cell_has_its_exact_depth(rate, k):
    one = torch.ones(1, 1, dtype=torch.float64)
    cell = ElmanCell(rate * one, one, torch.zeros(1, dtype=torch.float64), RELU)
    assert certify(recurrence(cell), Domain()).depth(1e-3) == k


@given(
    normal_matrix=st.booleans(),
    seed=seeds,
    n=st.integers(1, 6),
    radius=st.floats(0.1, 0.95),
    eps=st.floats(1e-6, 0.5),
)
@settings(max_examples=20)
def test_a_linear_cell_has_the_depth_of_its_filter(seed, n, radius, eps, normal_matrix):
    rng = generator(seed)
    W = normal(rng, n, n)
    W = W + W.mT if normal_matrix else W
    W = W * (radius / float(torch.linalg.eigvals(W).abs().max()))
    cell = ElmanCell(W, normal(rng, n, 2), torch.zeros(n).double(), Activation("affine", 1.0, 0.0))
    proofs = certify(recurrence(cell), Domain())
    # The worst of all d with |d| ≤ sup |U x| makes every term of Σ_{j ≥ k} Aʲ d largest.
    reach = cell.U.abs().sum(1)
    power, terms = torch.eye(n, dtype=torch.float64), []
    for _ in range(1500):
        terms.append(power.abs() @ reach)
        power = power @ W
    tails = torch.stack(terms).flip(0).cumsum(0).flip(0).amax(1)
    worst = next(k for k in range(1500) if float(tails[k]) <= eps)
    found = proofs.depth(eps)
    assert found is not None
    assert worst <= found <= worst + 1


@given(seed=seeds, n=st.integers(1, 12), gain=st.floats(0.1, 20))
@settings(max_examples=15)
def test_a_strictly_triangular_cell_forgets_in_n_steps(seed, n, gain):
    rng = generator(seed)
    order = torch.randperm(n, generator=rng)
    W = normal(rng, n, n, scale=gain).tril(-1)[order][:, order]
    cell = ElmanCell(W, normal(rng, n, 2), normal(rng, n))
    assert certify(recurrence(cell), ANY).depth(1e-12) <= n


def test_the_nilpotent_latch_is_not_certified():
    W = torch.tensor([[4.0, -4.0], [4.0, -4.0]], dtype=torch.float64)
    cell = ElmanCell(W, torch.zeros(2, 1).double(), torch.tensor([-2.0, -20.0]).double())
    proofs = certify(recurrence(cell), Domain())
    assert proofs.best is None
    assert proofs.depth(0.5) is None
    assert "numerical radius of the scaled weight is about 4" in proofs.no_proof.reason


@given(
    seed=seeds,
    n=st.integers(1, 16),
    bias=st.sampled_from([20.0, 350.0, 400.0, 1e5]),
    exponent=st.sampled_from([0, -250, -310, -323, 100, 300]),
)
@settings(max_examples=20, deadline=None)
def test_weights_of_any_size_and_saturation_end_in_a_valid_proof_or_in_none(
    seed, n, bias, exponent
):
    rng = generator(seed)
    size = float(f"1e{exponent}")
    W = size * (2 * torch.rand(n, n, generator=rng, dtype=torch.float64) - 1)
    r = recurrence(ElmanCell(W, normal(rng, n, 2), torch.full((n,), bias, dtype=torch.float64)))
    proofs = certify(r, Domain())
    assert proofs.best is not None or exponent > 0 or (exponent == 0 and bias == 20)
    depths = [proofs.depth(eps) for eps in (1e-3, 1e-301, 5e-324)]
    known = [k for k in depths if k is not None]
    assert known == sorted(known)
    if depths[0] is not None:
        assert truncation_error(r, Domain(), depths[0], rng) <= 1e-3


@pytest.mark.parametrize("rate", [0.0, 1e-310, 0.5, 0.9999, 1 - 2**-53])
@pytest.mark.parametrize("eps", [1e308, 1e-3, 1.0000001e-300, 1e-301, 5e-324])
@pytest.mark.parametrize("later", [0.0, 5e-324, 1.0, 1e308, math.inf, math.nan])
def test_a_search_for_a_depth_ends_and_what_it_finds_holds(rate, eps, later):
    k = geometric_depth(rate, later, later, eps)
    if k is not None:
        assert 0 <= k <= DEEPEST
        # Exact but for the last digits: rational numbers of this size are too long.
        assert math.log(later or 5e-324) + k * math.log(rate or 1e-320) <= math.log(eps) + 1e-9


def test_a_power_that_underflows_proves_nothing():
    assert geometric_depth(0.5, 1e300, 1e300, 1e-20) is None
    assert geometric_depth(0.5, 1e200, 1e200, 1e-20) == 731


def test_a_jump_has_no_proof():
    cell = random_cell(0, "elman", gain=0.01, activation=Activation("thresholdedrelu", 0.5))
    assert "thresholdedrelu jumps" in certify(recurrence(cell), Domain()).no_proof.reason


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_numbers_have_no_proof(bad):
    cell = random_cell(0, "elman", gain=0.1)
    cell.W[0, 0] = bad
    assert "NaN or infinity" in certify(recurrence(cell), Domain()).no_proof.reason


@pytest.mark.parametrize("rate", [0.5, 0.999])
def test_a_rate_below_the_numerical_radius_is_refused(rate):
    # w of the 2×2 Jordan block is 1/2, so no metric with T = I proves less.
    W = torch.tensor([[0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    sector = Interval(torch.zeros(2).double(), torch.ones(2).double())
    eye = torch.eye(2, dtype=torch.float64)
    assert not proves_rate(W, sector, eye, torch.ones(2).double(), rate)


def test_a_metric_that_is_not_positive_definite_is_refused():
    sector = Interval(torch.zeros(2).double(), torch.ones(2).double())
    W = 0.1 * torch.eye(2, dtype=torch.float64)
    P = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert not proves_rate(W, sector, P, torch.ones(2).double(), 0.9)
    assert proves_rate(W, sector, torch.eye(2).double(), torch.ones(2).double(), 0.9)


@given(seed=seeds, n=st.integers(1, 10))
@settings(max_examples=20)
def test_the_numerical_radius_is_bounded_from_above(seed, n):
    rng = generator(seed)
    A = normal(rng, n, n)
    bound = numerical_radius_above(A)
    v = torch.view_as_complex(torch.randn(n, 500, 2, generator=rng, dtype=torch.float64))
    v = v / torch.linalg.vector_norm(v, dim=0)
    fields = (v.conj() * (A.to(v.dtype) @ v)).sum(0).abs()
    theta = torch.linspace(0, math.pi, 181, dtype=torch.float64)
    phase = torch.polar(torch.ones_like(theta), theta)[:, None, None]
    H = (phase * A + phase.conj() * A.mT) / 2
    exact = float(torch.linalg.eigvalsh(H).amax())
    assert float(fields.max()) <= bound
    assert exact * (1 - 1e-12) <= bound <= exact * 1.006


@given(seed=seeds, n=st.integers(2, 12))
@settings(max_examples=10)
def test_scaling_never_makes_the_radius_larger(seed, n):
    A = normal(generator(seed), n, n)
    D, _ = minimise_radius(A, iterations=60)
    scaled = numerical_radius_above(D[:, None] * A / D)
    assert scaled <= numerical_radius_above(A) * 1.02
    assert scaled >= float(torch.linalg.eigvals(A).abs().max()) * (1 - 1e-9)


@st.composite
def hard_weights(draw):
    """Draw W of every bad kind: non-normal, triangular, rank-deficient, huge and tiny rows."""
    rng = generator(draw(seeds))
    n = draw(st.integers(1, 7))
    W = normal(rng, n, n, scale=draw(st.floats(0.05, 1.5)) / n**0.5)
    kind = draw(st.sampled_from(["plain", "triangular", "rank one", "scaled", "shear"]))
    if kind == "triangular":
        W = W.tril()
    elif kind == "rank one":
        W = W[:, :1] @ normal(rng, 1, n)
    elif kind == "scaled":
        d = 10 ** (3 * torch.randn(n, generator=rng, dtype=torch.float64))
        W = d[:, None] * W / d
    elif kind == "shear":
        W = W + 3 * torch.diag(torch.ones(n - 1, dtype=torch.float64), 1)
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.float16]))
    W = W.to(dtype).double()
    bias = normal(rng, n, scale=draw(st.sampled_from([0.0, 1.0, 30.0])))
    return W if bool(W.isfinite().all()) else torch.zeros_like(W), bias


@given(weights=hard_weights(), seed=seeds, activation=st.sampled_from([TANH, RELU]))
@settings(max_examples=15 * REPEAT)
def test_no_attack_beats_a_proof_on_hard_weights(weights, seed, activation):
    W, b = weights
    rng = generator(seed)
    start = normal(rng, W.shape[0])
    r = Recurrence(
        "rnn",
        0,
        ElmanCell(W, normal(rng, W.shape[0], 2), b, activation),
        InitialState(start, "constant"),
    )
    attack(r, Domain(), rng, certify(r, Domain()))


@given(cell=cells(kinds=("elman",)), seed=seeds, low=st.floats(-2, 0), high=st.floats(0, 2))
@settings(max_examples=15 * REPEAT)
def test_no_attack_beats_a_proof_with_any_activation(cell, seed, low, high):
    domain = Domain(low, high, "a range")
    attack(recurrence(cell), domain, generator(seed), certify(recurrence(cell), domain))


@given(seed=seeds, norm=st.sampled_from(["max", "2"]))
@settings(max_examples=8 * REPEAT)
def test_no_attack_beats_a_depth_through_a_readout(seed, norm):
    rng = generator(seed)
    r = recurrence(random_cell(seed, "elman", 6, 2, 0.7))
    A = normal(rng, 3, 6)
    proofs = certify(r, Domain())
    k = proofs.depth(1e-2, Readout("head", A, torch.zeros(3).double()), norm)
    if k is not None and k < 80:
        assert truncation_error(r, Domain(), k, rng, norm=norm, A=A) <= 1e-2


@given(seed=seeds, name=st.sampled_from(["affine", "hardsigmoid"]))
@settings(max_examples=30 * REPEAT)
def test_terms_that_cancel_leave_no_state_outside_its_box(seed, name):
    """The clip is exact, so that only α·clip + β rounds, and β takes nearly all of it away."""
    share, more = torch.rand(2, generator=generator(seed), dtype=torch.float64).tolist()
    alpha, clip = 0.2 + share, (1 + more) * 1e10
    beta = -(alpha * clip)
    exact = Fraction(alpha) * Fraction(clip) + Fraction(beta)
    if name == "hardsigmoid":
        exact = max(exact, Fraction(0))
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    r = recurrence(ElmanCell(zero, one, zero[0], Activation(name, alpha, beta), clip))
    r = replace(r, initial=InitialState(zero[0]))
    domain = Domain(2 * clip, 3 * clip)
    proofs = certify(r, domain)
    lo, hi = proofs.outputs
    assert Fraction(float(lo)) <= exact <= Fraction(float(hi))
    written = document(r, domain, proofs, eps=1e-8, epsilons=(1e-8,))
    claims = [(c.eps, c.k) for c in check(written, r).claims] + [(1e-8, proofs.depth(1e-8))]
    assert all(k > 0 or abs(exact) <= Fraction(eps) for eps, k in claims)
