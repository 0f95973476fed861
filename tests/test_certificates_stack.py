"""Proofs of stacks: no input makes a truncated stack err by more than the proof allows."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit.cells import advance, drive, output, readout, run_stack
from rnnaudit.certificates import Domain, certify_stack
from rnnaudit.certificates.comparison import Decay
from rnnaudit.certificates.interface import DEEPEST
from rnnaudit.certificates.split import cheapest
from rnnaudit.model import RELU, ElmanCell, Layer, Readout, Stack

from .attacks import REPEAT, inputs
from .strategies import generator, random_stack, recurrence, seeds


def restarted(stack, x, depth):
    """Return outputs [N, windows, O] of every window of ``depth`` inputs, all layers restarted."""
    windows = x.unfold(1, depth, 1).movedim(-1, 2) if depth else x[:, :, None][:, :, :0]
    y = windows.flatten(0, 1)
    for layer in stack.layers:
        (r,) = layer.recurrences
        s, outs = r.initial.value.expand(len(y), -1), []
        z = drive(r.cell, y)
        for t in range(depth):
            s = advance(r.cell, s, z[:, t])
            outs.append(output(r.cell, s))
        y = torch.stack(outs, 1)
    return readout(stack, y[:, -1]).unflatten(0, windows.shape[:2])


stacks = st.builds(
    random_stack,
    seeds,
    st.sampled_from(["elman", "gru", "lstm"]),
    st.integers(1, 4),
    st.integers(1, 3),
    layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    readout=st.none() | st.integers(1, 3),
    start=st.sampled_from(["zero", "constant"]),
    gain=st.floats(0.05, 0.4),
)


@given(stack=stacks, seed=seeds, norm=st.sampled_from(["max", "2"]), eps=st.floats(1e-3, 0.3))
@settings(max_examples=25 * REPEAT)
def test_no_input_beats_depths_that_are_cut_one_by_one(stack, seed, norm, eps):
    domain = Domain(-0.4, 0.4, "|x| ≤ 0.4")
    proof = certify_stack(stack, domain)
    depths = proof.layerwise(eps, norm)
    if depths is None or max(depths.values()) > 60:
        return
    x = inputs(generator(seed), domain, stack.input_size, 24, max(depths.values()) + 15)
    error = run_stack(stack, x, depths) - run_stack(stack, x)
    size = error.abs().amax() if norm == "max" else error.norm(dim=-1).max()
    assert float(size) <= eps


@given(stack=stacks.filter(lambda s: s.causal), seed=seeds, eps=st.floats(1e-3, 0.3))
@settings(max_examples=25 * REPEAT)
def test_no_input_beats_a_depth_at_which_all_layers_restart(stack, seed, eps):
    domain = Domain(-0.4, 0.4, "|x| ≤ 0.4")
    k = certify_stack(stack, domain).depth(eps)
    if k is None or not 0 < k <= 60:
        return
    x = inputs(generator(seed), domain, stack.input_size, 24, k + 15)
    for depth in (k, k + 1):
        error = restarted(stack, x, depth) - run_stack(stack, x)[:, depth - 1 :]
        assert float(error.abs().max()) <= eps


def chain(*rates):
    """Stack scalar ReLU cells h' = λ h + x, whose errors at depth k are known exactly."""
    one = torch.ones(1, 1, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    return Stack(
        "chain",
        tuple(
            Layer((recurrence(ElmanCell(rate * one, one, zero, RELU), layer=layer),))
            for layer, rate in enumerate(rates)
        ),
    )


def test_two_equal_layers_decay_like_k_times_a_power():
    # With x ≡ 1 and both at rest: error = Σ_{j ≥ k} of the impulse response (j + 1) λʲ.
    rate, eps = 0.8, 1e-3
    k = certify_stack(chain(rate, rate), Domain()).depth(eps)
    exact = next(k for k in range(1000) if sum((j + 1) * rate**j for j in range(k, 2000)) <= eps)
    assert exact <= k <= exact + 2


@given(rate=st.floats(0.05, 0.999), asked=st.lists(st.floats(1e-6, 2), min_size=1, max_size=6))
def test_no_error_asked_for_before_changes_a_depth_and_no_step_is_taken_twice(rate, asked):
    taken = []

    def advance(e):
        taken.append(e)
        return rate * e

    def decay():
        one = torch.ones(1, dtype=torch.float64)
        return Decay(advance, one, one, rate=rate, output=lambda e: float(e[0]))

    kept = decay()
    found = [kept.depth(eps) for eps in asked]
    steps = len(taken)
    assert found == [decay().depth(eps) for eps in asked]
    for eps, k in zip(asked, found, strict=True):
        exact = math.log(eps) / math.log(rate)
        assert max(0, exact) - 1e-6 <= k <= max(0, exact) + 1 + 1e-6
    assert steps <= min(max(found) + 1, 3000)


def test_a_layer_without_a_proof_leaves_the_stack_without_one():
    stack = chain(0.5, 1.5)
    proof = certify_stack(stack, Domain())
    assert proof.depth(0.1) is None
    assert proof.layerwise(0.1) is None
    assert "rnn[1]" in proof.reason
    assert proof.recurrences["rnn[0]"].best is not None


@pytest.mark.parametrize("eps", [1e308, 1e-299, 1e-301, 5e-324])
@pytest.mark.parametrize("scale", [1e308, 1.0, 1e-308])
def test_a_search_ends_for_every_error_and_every_readout(eps, scale):
    stack = chain(0.9999, 0.5)
    A = torch.full((2, 1), scale, dtype=torch.float64)
    read = replace(stack, readout=Readout("fc", A, torch.zeros(2, dtype=torch.float64)))
    proof = certify_stack(read, Domain())
    assert proof.depth(eps) is None or proof.depth(eps) <= DEEPEST
    assert proof.layerwise(eps) is None or max(proof.layerwise(eps).values()) <= DEEPEST
    for found in proof.recurrences.values():
        assert found.depth(eps) is None or found.depth(eps) <= DEEPEST


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan])
def test_an_error_that_is_not_positive_has_no_depth(eps):
    proof = certify_stack(chain(0.5, 0.5), Domain())
    assert proof.depth(eps) is None
    assert proof.layerwise(eps) is None


@st.composite
def divisions(draw):
    """Draw an ε, falling bounds with how many share each depth, and what the last one needs."""
    count = draw(st.integers(0, 3))
    tables = [
        sorted(draw(st.lists(st.floats(0, 1), min_size=12, max_size=12)), reverse=True)
        for _ in range(count)
    ]
    counts = [draw(st.sampled_from([1, 2])) for _ in range(count)]
    needs = sorted(draw(st.lists(st.floats(1e-3, 1), min_size=12, max_size=12)), reverse=True)
    return draw(st.floats(0.05, 1.5)), tables, counts, needs


@given(divisions(), st.integers(2, 12))
@settings(max_examples=150 * REPEAT)
def test_no_other_division_of_a_tolerance_has_a_smaller_sum_of_depths(made, most):
    eps, tables, counts, needs = made

    def last(share):
        k = next((k for k, need in enumerate(needs[:most], 1) if need <= share), None)
        return None if k is None else {"last": k}

    def sums():
        for ks in itertools.product(range(1, most + 1), repeat=len(tables)):
            passed = sum(Fraction(t[k - 1]) for t, k in zip(tables, ks, strict=True))
            rest = last(math.nextafter(float(Fraction(eps) - passed) * (1 - 1e-12), 0))
            if rest is not None:
                yield sum(k * c for k, c in zip(ks, counts, strict=True)) + rest["last"]

    bounds = [lambda k, t=t: t[min(k, 12) - 1] for t in tables]
    found = cheapest(bounds, counts, last, eps, most)
    smallest = min(sums(), default=None)
    if found is None:
        assert smallest is None
        return
    depths, rest = found
    passed = sum(Fraction(t[k - 1]) for t, k in zip(tables, depths, strict=True))
    assert passed + Fraction(needs[rest["last"] - 1]) <= Fraction(eps)
    assert max((*depths, rest["last"])) <= most
    sum_ = sum(k * c for k, c in zip(depths, counts, strict=True)) + rest["last"]
    assert smallest is None or sum_ <= smallest


def bound_of_chain(rates, depths):
    """Bound the output of a chain of scalar cells under |x| ≤ 1, each cut on its own."""
    total, reach = 0.0, 1.0
    for layer, (rate, k) in enumerate(zip(rates, depths, strict=True)):
        reach /= 1 - rate  # no state of this layer is larger
        total += rate**k * reach / math.prod(1 - above for above in rates[layer + 1 :])
    return total


@pytest.mark.parametrize("rates", [(0.6, 0.2), (0.2, 0.6), (0.5, 0.5), (0.4, 0.1, 0.3)])
@pytest.mark.parametrize("eps", [0.3, 1e-2, 1e-4])
def test_a_proved_tolerance_is_divided_so_that_the_depths_sum_to_least(rates, eps):
    depths = certify_stack(chain(*rates), Domain()).layerwise(eps)
    found = [depths[f"rnn[{layer}]"] for layer in range(len(rates))]
    most = max(found) + 8
    sums = [
        sum(ks)
        for ks in itertools.product(range(1, most), repeat=len(rates))
        if bound_of_chain(rates, ks) <= eps
    ]
    assert bound_of_chain(rates, found) <= eps
    # Their rates are proved to a thousandth.
    assert min(sums) <= sum(found) <= min(sums) + 1


def test_what_is_not_cut_leaves_all_of_the_tolerance_to_the_rest():
    rates, eps = (0.7, 0.5, 0.6), 1e-3
    proof = certify_stack(chain(*rates), Domain())
    for layer in range(3):
        label = f"rnn[{layer}]"
        alone = proof.layerwise(eps, only={label})
        assert list(alone) == [label]
        assert alone[label] < proof.layerwise(eps)[label]
    ends = proof.layerwise(eps, only={"rnn[0]", "rnn[2]"})
    assert sum(ends.values()) < sum(proof.layerwise(eps).values())


def test_a_limit_takes_another_division_before_it_takes_none():
    proof = certify_stack(chain(0.6, 0.9), Domain())
    free = proof.layerwise(1e-3)
    tight = proof.layerwise(1e-3, most=max(free.values()) - 1)
    assert sum(tight.values()) >= sum(free.values())
    assert max(tight.values()) < max(free.values())
    assert proof.layerwise(1e-3, most=10) is None


@pytest.mark.parametrize("seed", range(3))
def test_one_depth_for_both_directions_is_no_larger_than_the_largest_of_several(seed):
    outputs = (None, 2)[seed % 2]
    stack = random_stack(
        seed, "elman", 3, 2, layers=2, bidirectional=True, readout=outputs, start="zero", gain=0.3
    )
    proof = certify_stack(stack, Domain(-0.4, 0.4, "|x| ≤ 0.4"))
    assert 1 < proof.depth(1e-3) <= max(proof.layerwise(1e-3).values())
