"""Proofs of stacks: no input makes a truncated stack err by more than the proof allows."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit.cells import advance, drive, output, readout, run_stack
from rnnaudit.certificates import Domain, certify_stack
from rnnaudit.certificates.interface import MAX_DEPTH
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
    assert proof.depth(eps) is None or proof.depth(eps) <= MAX_DEPTH
    assert proof.layerwise(eps) is None or max(proof.layerwise(eps).values()) <= MAX_DEPTH
    for found in proof.recurrences.values():
        assert found.depth(eps) is None or found.depth(eps) <= MAX_DEPTH


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan])
def test_an_error_that_is_not_positive_has_no_depth(eps):
    proof = certify_stack(chain(0.5, 0.5), Domain())
    assert proof.depth(eps) is None
    assert proof.layerwise(eps) is None
