"""Cells step as PyTorch and ONNX Runtime do, and their closed forms are the derivative."""

from __future__ import annotations

import dataclasses
import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rnnaudit import cells
from rnnaudit.cells import interface, output, step, trajectory
from rnnaudit.model import Activation, Cell, ElmanCell, GRUCell, LSTMCell
from tests import strategies
from tests.references import close, onnxruntime_outputs
from tests.strategies import ACTIVATIONS, KINDS, random_cell, random_inputs, random_states

shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)


def autodiff_jacobian(cell: Cell, s: Tensor, x: Tensor) -> Tensor:
    """Differentiate ``step`` with torch.func at states [..., S]."""
    derivative = torch.func.vmap(torch.func.jacrev(lambda s, x: step(cell, s, x)))
    flat = derivative(s.reshape(-1, s.shape[-1]), x.reshape(-1, x.shape[-1]))
    return flat.reshape(*s.shape, s.shape[-1])


# The step


@settings(max_examples=40)
@given(cell=strategies.standard_cells(), seed=strategies.seeds)
def test_a_sequence_of_steps_is_pytorch_s_own_layer(cell, seed):
    x = random_inputs(seed, cell, 2, 6)
    start = random_states(seed, cell, 2)
    h, c = output(cell, start)[None], start[None, :, cell.hidden_size :].contiguous()
    stack = strategies.Stack("rnn", (strategies.Layer((strategies.recurrence(cell),)),))
    module = strategies.torch_module(stack)
    with torch.no_grad():
        reference, _ = module(x, (h, c) if isinstance(cell, LSTMCell) else h)
    close(output(cell, trajectory(cell, x, start)), reference)


ONNX_VARIANTS = [
    *(("elman", {"activation": a}) for a in ACTIVATIONS),
    *(
        ("gru", {"reset_after": after, field: a})
        for after, field, a in product((False, True), ("gate", "candidate"), ACTIVATIONS)
    ),
    *(
        ("lstm", {"peephole": peephole, "input_forget": coupled, field: a})
        for peephole, coupled, field, a in product(
            (False, True), (False, True), ("gate", "candidate", "squash"), ACTIVATIONS
        )
    ),
]


@pytest.mark.parametrize("clip", [None, 0.75])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_onnx_runtime_s_nodes_for_every_option(kind, clip):
    for seed, (of, options) in enumerate(ONNX_VARIANTS):
        if of != kind:
            continue
        cell = random_cell(seed, kind, 6, 4, 0.5, clip=clip, **options)
        x, start = random_inputs(seed, cell, 3, 4), random_states(seed, cell, 3, scale=0.5)
        ours = output(cell, trajectory(cell, x, start))
        close(ours, onnxruntime_outputs(cell, x, start), 1e-5)


def test_clip_output_bounds_the_cell_inside_the_last_tanh():
    cell = random_cell(5, "lstm", clip=0.5)
    x, s = random_inputs(1, cell, 7), random_states(2, cell, 7, scale=4.0)
    plain, bounded = (step(dataclasses.replace(cell, clip_output=on), s, x) for on in (False, True))
    h, c = plain[:, :5], plain[:, 5:]
    assert torch.equal(bounded[:, 5:], c)  # c' itself is not clipped
    assert (c.abs() > 0.5).any()
    close(bounded[:, :5], h * torch.tanh(c.clamp(-0.5, 0.5)) / torch.tanh(c))


def test_a_linear_elman_cell_is_its_matrix():
    cell = random_cell(0, "elman", activation=Activation("affine"))
    s, x = random_states(1, cell, 4), random_inputs(2, cell, 4)
    close(step(cell, s, x), s @ cell.W.T + x @ cell.U.T + cell.b)
    close(cells.jacobian(cell, s, x), cell.W.expand(4, -1, -1))


def test_both_reset_conventions_agree_only_when_nothing_resets():
    after = random_cell(3, "gru", gate=Activation("affine", 0.0, 1.0))  # r = 1
    after = dataclasses.replace(after, gate=Activation("sigmoid"))
    before = dataclasses.replace(after, reset_after=False)
    s, x = random_states(1, after, 9), random_inputs(2, after, 9)
    assert (step(after, s, x) - step(before, s, x)).abs().max() > 1e-3
    open_reset = after.b_input.clone()
    open_reset[: after.hidden_size] = 1e3
    after, before = (dataclasses.replace(c, b_input=open_reset) for c in (after, before))
    close(step(after, s, x), step(before, s, x))


# The derivative


@settings(max_examples=100)
@given(cell=strategies.cells(), seed=strategies.seeds, batch=shapes)
def test_every_jacobian_is_autodiff_s(cell, seed, batch):
    s, x = random_states(seed, cell, *batch), random_inputs(seed, cell, *batch)
    close(cells.jacobian(cell, s, x), autodiff_jacobian(cell, s, x))


@settings(max_examples=100)
@given(cell=strategies.cells(), seed=strategies.seeds)
def test_jvp_and_vjp_are_autodiff_s(cell, seed):
    s, x = random_states(seed, cell), random_inputs(seed, cell)
    v, u = random_states(seed + 1, cell), random_states(seed + 2, cell)
    _, tangent = torch.func.jvp(lambda s: step(cell, s, x), (s,), (v,))
    close(cells.jvp(cell, s, x, v), tangent)
    _, pull = torch.func.vjp(lambda s: step(cell, s, x), s)
    close(cells.vjp(cell, s, x, u), pull(u)[0])


@settings(max_examples=60)
@given(cell=strategies.cells(), seed=strategies.seeds, batch=shapes, m=st.integers(1, 4))
def test_blocks_of_tangents_pass_through_the_matrix(cell, seed, batch, m):
    s, x = random_states(seed, cell, *batch), random_inputs(seed, cell, *batch)
    derivative = cells.linearize(cell, s, cells.drive(cell, x))
    V, J = random_states(seed + 1, cell, *batch, m), derivative.matrix()
    close(derivative.jvp(V), V @ J.mT, 1e-11)
    close(derivative.vjp(V), V @ J, 1e-11)


@settings(max_examples=60)
@given(cell=strategies.cells(), seed=strategies.seeds, batch=shapes)
def test_vjp_is_the_adjoint_of_jvp(cell, seed, batch):
    s, x = random_states(seed, cell, *batch), random_inputs(seed, cell, *batch)
    v, u = random_states(seed + 1, cell, *batch), random_states(seed + 2, cell, *batch)
    forward, back = cells.jvp(cell, s, x, v), cells.vjp(cell, s, x, u)
    scale = forward.norm() * u.norm() + back.norm() * v.norm() + 1
    assert ((forward * u).sum() - (v * back).sum()).abs() <= 1e-13 * scale


@settings(max_examples=30)
@given(cell=strategies.cells(), seed=strategies.seeds, batch=shapes)
def test_leading_axes_are_only_batch_axes(cell, seed, batch):
    s, x = random_states(seed, cell, *batch), random_inputs(seed, cell, *batch)
    stepped, J = step(cell, s, x), cells.jacobian(cell, s, x)
    assert stepped.shape == s.shape
    for at in product(*map(range, batch)):
        close(stepped[at], step(cell, s[at], x[at]))
        close(J[at], cells.jacobian(cell, s[at], x[at]))


@settings(max_examples=30)
@given(cell=strategies.cells(), seed=strategies.seeds)
def test_one_input_drives_many_states(cell, seed):
    s, x = random_states(seed, cell, 3, 2), random_inputs(seed, cell)
    close(step(cell, s, x), step(cell, s, x.expand(3, 2, -1)))
    close(cells.jacobian(cell, s, x), cells.jacobian(cell, s, x.expand(3, 2, -1)))


@settings(max_examples=30)
@given(cell=strategies.cells(), seed=strategies.seeds)
def test_many_inputs_drive_one_state(cell, seed):
    s, x = random_states(seed, cell), random_inputs(seed, cell, 3, 2)
    many = s.expand(3, 2, -1)
    close(step(cell, s, x), step(cell, many, x))
    close(cells.jacobian(cell, s, x), cells.jacobian(cell, many, x))
    close(cells.jvp(cell, s, x, many), cells.jvp(cell, many, x, many))
    close(cells.vjp(cell, s, x, many), cells.vjp(cell, many, x, many))


@pytest.mark.parametrize("batch", [(2500,), (3, 700), (1, 2000), (1500, 1, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_large_batch_are_the_batch(kind, batch):
    cell = random_cell(1, kind, 30, 2)
    wide, x = random_states(2, cell, *batch), random_inputs(3, cell, *batch)
    z = cells.drive(cell, x)
    close(cells.advance(cell, wide, z), interface.next_state(cell, wide, z))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_stays_empty(kind):
    cell = random_cell(0, kind)
    s, x = torch.zeros(0, cell.state_size).double(), torch.zeros(0, 3).double()
    assert step(cell, s, x).shape == (0, cell.state_size)
    assert cells.jacobian(cell, s, x).shape == (0, cell.state_size, cell.state_size)
    assert cells.jvp(cell, s, x, s).shape == cells.vjp(cell, s, x, s).shape == s.shape


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_into_what_was_given(kind):
    cell = random_cell(0, kind, 4, 2)
    s, x = random_states(1, cell, 3), random_inputs(2, cell, 3)
    V = random_states(3, cell, 3, 2)
    tensors = [
        v for f in dataclasses.fields(cell) if isinstance(v := getattr(cell, f.name), Tensor)
    ]
    given_tensors = [s, x, V, *tensors]
    before = [tensor.clone() for tensor in given_tensors]
    derivative = cells.linearize(cell, s, cells.drive(cell, x))
    first = derivative.matrix()
    derivative.jvp(V), derivative.vjp(V), step(cell, s, x)
    assert torch.equal(first, derivative.matrix())
    assert all(map(torch.equal, given_tensors, before))


# Saturation

SIGMOID_MINUS_50 = math.exp(-50) / (1 + math.exp(-50))


@pytest.mark.parametrize("bias", [20.0, 40.0, 300.0])
def test_a_saturated_elman_unit_keeps_the_digits_of_its_slope(bias):
    """tanh(b)' = sech²(b) → 4 exp(−2b), where 1 − tanh² is 0 from b = 20 on."""
    one, zero = torch.ones(1, 1).double(), torch.zeros(1).double()
    cell = ElmanCell(one, one, torch.tensor([bias]).double())
    J = cells.jacobian(cell, zero, zero).item()
    assert pytest.approx(4 * math.exp(-2 * bias), rel=1e-12, abs=0) == J


def test_a_closed_gru_update_gate_keeps_the_digits_of_one_minus_z():
    """σ(50) rounds to 1, yet h' = (1 − z) n with 1 − z = σ(−50)."""
    b = torch.tensor([0.0, 50.0, 1.0]).double()
    zero = torch.zeros(3, 1).double()
    cell = GRUCell(zero, zero, b, torch.zeros(3).double())
    moved = step(cell, torch.zeros(1).double(), torch.zeros(1).double()).item()
    assert moved == pytest.approx(SIGMOID_MINUS_50 * math.tanh(1), rel=1e-12, abs=0)


def test_a_coupled_lstm_keeps_the_digits_of_one_minus_i():
    """f = 1 − σ(50) = σ(−50), so with g = 0 the cell state becomes σ(−50) c."""
    zero = torch.zeros(4, 1).double()
    b = torch.tensor([50.0, 0.0, 0.0, 0.0]).double()
    cell = LSTMCell(zero, zero, b, input_forget=True)
    s, x = torch.tensor([0.0, 1.0]).double(), torch.zeros(1).double()
    assert step(cell, s, x)[1].item() == pytest.approx(SIGMOID_MINUS_50, rel=1e-12, abs=0)
    J = cells.jacobian(cell, s, x)
    assert J[1, 1].item() == pytest.approx(SIGMOID_MINUS_50, rel=1e-12, abs=0)


def test_an_lstm_without_weights_forgets_at_the_rate_of_its_bias():
    zero = torch.zeros(8, 2).double()
    b = torch.tensor([0.5, -1.0, 2.0, 3.0, 0.0, 0.0, 1.0, 1.0]).double()
    J = cells.jacobian(LSTMCell(zero, zero, b), torch.zeros(4).double(), torch.zeros(2).double())
    close(J[2:, 2:], torch.diag(torch.sigmoid(b[2:4])))
    assert torch.linalg.eigvals(J).abs().max().item() == pytest.approx(torch.sigmoid(b[2:4]).max())


def test_what_is_no_cell_is_our_own_mistake_and_named():
    with pytest.raises(NotImplementedError, match=r"^str$"):
        cells.drive("lstm", torch.zeros(1))
    for function in (cells.advance, cells.linearize):
        with pytest.raises(NotImplementedError, match=r"^str$"):
            function("lstm", torch.zeros(1), torch.zeros(1))
