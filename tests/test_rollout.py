"""Truncation at depth k is the window of the last k inputs, read from the initial state."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit.cells import (
    readout,
    reads,
    run,
    run_layer,
    run_single,
    run_stack,
    trajectory,
    truncated,
)
from rnnaudit.model import Activation, Layer, Stack
from tests import strategies
from tests.references import brute_force, close
from tests.strategies import (
    KINDS,
    random_cell,
    random_inputs,
    random_stack,
    random_states,
    torch_module,
)

bounded = strategies.standard_cells(("gru", "lstm")) | st.builds(
    random_cell, strategies.seeds, st.just("elman"), gain=st.floats(0.01, 3.0)
)


@settings(max_examples=60)
@given(
    cell=bounded,
    seed=strategies.seeds,
    T=st.integers(1, 8),
    depth=st.integers(0, 10),
    reverse=st.booleans(),
)
def test_truncation_is_the_window_run_from_the_initial_state(cell, seed, T, depth, reverse):
    recurrence = strategies.recurrence(cell, random_states(seed, cell), reverse=reverse)
    x = random_inputs(seed, cell, 2, T)
    close(truncated(recurrence, x, depth), brute_force(recurrence, x, depth))


@settings(max_examples=40)
@given(cell=bounded, seed=strategies.seeds, depth=st.integers(0, 8), reverse=st.booleans())
def test_truncation_is_exact_while_the_window_reaches_the_start(cell, seed, depth, reverse):
    recurrence = strategies.recurrence(cell, random_states(seed, cell), reverse=reverse)
    x = random_inputs(seed, cell, 3, 8)
    full, cut = (
        reads(recurrence, y) for y in (run(recurrence, x), truncated(recurrence, x, depth))
    )
    close(cut[:, :depth], full[:, :depth])
    close(truncated(recurrence, x, 8), run(recurrence, x))
    close(truncated(recurrence, x, 50), run(recurrence, x))


@settings(max_examples=30)
@given(cell=bounded, seed=strategies.seeds)
def test_a_reverse_recurrence_is_the_forward_one_on_the_flipped_sequence(cell, seed):
    forward = strategies.recurrence(cell, random_states(seed, cell))
    backward = dataclasses.replace(forward, reverse=True)
    x = random_inputs(seed, cell, 2, 6)
    close(run(backward, x), run(forward, x.flip(1)).flip(1))


@settings(max_examples=25)
@given(
    seed=strategies.seeds,
    kind=st.sampled_from(KINDS),
    layers=st.integers(1, 3),
    bidirectional=st.booleans(),
)
def test_a_stack_is_pytorch_s_module(seed, kind, layers, bidirectional):
    stack = random_stack(seed, kind, layers=layers, bidirectional=bidirectional, readout=2)
    x = random_inputs(seed, stack, 3, 7)
    with torch.no_grad():
        features, _ = torch_module(stack)(x)
    close(run_stack(stack, x), readout(stack, features))
    bare = dataclasses.replace(stack, readout=None)
    close(run_stack(bare, x), features)
    if layers == 1:
        close(run_layer(stack.layers[0], x), features)


def test_a_projected_stack_is_pytorch_s_module():
    stack = random_stack(1, "lstm", 6, layers=2, bidirectional=True, projection=2)
    x = random_inputs(1, stack, 3, 7)
    with torch.no_grad():
        close(run_stack(stack, x), torch_module(stack)(x)[0])


@settings(max_examples=25)
@given(seed=strategies.seeds, kind=st.sampled_from(KINDS), cuts=st.tuples(*[st.integers(0, 6)] * 4))
def test_depths_cut_the_recurrences_they_name(seed, kind, cuts):
    stack = random_stack(seed, kind, layers=2, bidirectional=True, start="constant", readout=3)
    x = random_inputs(seed, stack, 2, 5)
    depths = {r.label: k for r, k in zip(stack.recurrences(), cuts, strict=True)}
    del depths["rnn[1]"]  # it runs in full
    h = x
    for layer in stack.layers:
        h = torch.cat(
            [brute_force(r, h, depths.get(r.label, h.shape[1])) for r in layer.recurrences], -1
        )
    close(run_stack(stack, x, depths), readout(stack, h))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("N", "T"), [(0, 3), (2, 0), (0, 0), (1, 1)])
def test_empty_and_single_sequences_keep_their_shapes(kind, N, T):
    stack = random_stack(0, kind, layers=2, bidirectional=True, readout=4)
    x = random_inputs(0, stack, N, T)
    first = stack.layers[0].recurrences[0]
    assert run_stack(stack, x).shape == (N, T, 4)
    assert truncated(first, x, 3).shape == run(first, x).shape == (N, T, 5)
    assert trajectory(first.cell, x, first.initial.value).shape == (N, T, first.cell.state_size)
    close(truncated(first, x, 3), run(first, x))


def test_a_trajectory_starts_from_one_state_or_one_per_sequence():
    cell = random_cell(0, "lstm")
    x, start = random_inputs(1, cell, 3, 4), random_states(2, cell, 3)
    each = torch.cat([trajectory(cell, x[n : n + 1], start[n]) for n in range(3)])
    close(trajectory(cell, x, start), each)


def test_a_scalar_relu_cell_converges_as_the_geometric_series_says():
    """h' = relu(λh + 1) from 0 is (1 − λ^t)/(1 − λ), and depth k misses (λ^k − λ^t)/(1 − λ)."""
    rate = 0.9
    one = torch.ones(1, 1, dtype=torch.float64)
    cell = strategies.ElmanCell(rate * one, one, torch.zeros(1).double(), Activation("relu"))
    recurrence, x = strategies.recurrence(cell), torch.ones(1, 200, 1).double()
    t = torch.arange(1, 201).double()
    close(run(recurrence, x)[0, :, 0], (1 - rate**t) / (1 - rate), 1e-13)
    for k in (1, 10, 88):
        error = (run(recurrence, x) - truncated(recurrence, x, k))[0, :, 0]
        close(error, torch.where(t > k, (rate**k - rate**t) / (1 - rate), 0.0), 1e-13)


def test_a_strictly_triangular_linear_cell_is_exact_at_its_width():
    cell = random_cell(4, "elman", 6, activation=Activation("affine"))
    nilpotent = dataclasses.replace(cell, W=cell.W.tril(-1))
    recurrence, x = strategies.recurrence(nilpotent), random_inputs(1, cell, 2, 20)
    close(truncated(recurrence, x, 6), run(recurrence, x))
    assert (truncated(recurrence, x, 5) - run(recurrence, x)).abs().max() > 1e-6


def test_directions_of_a_layer_stand_side_by_side():
    forward, backward = (
        strategies.recurrence(random_cell(seed, "gru"), reverse=seed == 1) for seed in (0, 1)
    )
    x = random_inputs(0, forward.cell, 2, 5)
    both = run_stack(Stack("rnn", (Layer((forward, backward)),)), x)
    close(both, torch.cat([run(forward, x), run(backward, x)], -1))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@settings(max_examples=12, deadline=None)
@given(cell=strategies.standard_cells(("gru", "lstm")), seed=strategies.seeds)
def test_float32_is_computed_in_float32_and_leaves_the_weights_as_they_are(cell, seed):
    stack = Stack("s", (Layer((strategies.recurrence(cell),)),))
    x = random_inputs(seed, cell, 2, 3)
    before = run_stack(stack, x)
    single = run_single(stack, x)
    assert single.dtype == torch.float32
    with torch.no_grad():
        theirs = torch_module(stack).float()(x.float())[0]
    scale = before.abs().amax().clamp(min=1)
    # Three steps round to 2^-24 of their parts, which gains of the cell may raise.
    assert (single - theirs).abs().max() <= 1e-4 * scale
    assert torch.equal(run_stack(stack, x), before)
