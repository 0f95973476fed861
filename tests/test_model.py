"""Cells refuse shapes and types that do not fit, and a fingerprint follows every bit."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit.cells import step
from rnnaudit.model import (
    Activation,
    ElmanCell,
    GRUCell,
    InitialState,
    Layer,
    LSTMCell,
    Readout,
    Stack,
    fingerprint,
)
from tests import strategies
from tests.strategies import KINDS, random_cell, random_model, random_stack


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ElmanCell(zeros(3, 2), zeros(3, 2), zeros(3)),
            "recurrent weights must be square, got shape (3, 2); is it the input weight?",
        ),
        (
            lambda: ElmanCell(zeros(3), zeros(3, 2), zeros(3)),
            "W must be a matrix, got shape (3,)",
        ),
        (
            lambda: ElmanCell(zeros(3, 3), zeros(4, 2), zeros(3)),
            "U must have shape (3, 2), got (4, 2)",
        ),
        (
            lambda: ElmanCell(zeros(3, 3), zeros(3), zeros(3)),
            "U must be a matrix, got shape (3,)",
        ),
        (
            lambda: ElmanCell(zeros(3, 3), zeros(3, 2), zeros(3, 1)),
            "b must have shape (3,), got (3, 1)",
        ),
        (
            lambda: ElmanCell(zeros(3, 3), zeros(3, 2), zeros(3).float()),
            "b must be float64, got torch.float32; convert it before",
        ),
        (
            lambda: GRUCell(zeros(6, 2), zeros(8, 2), zeros(6), zeros(6)),
            "U must have shape (6, 2), got (8, 2)",
        ),
        (
            lambda: GRUCell(zeros(5, 2), zeros(6, 2), zeros(6), zeros(6)),
            "W must have shape (6, 2), got (5, 2)",
        ),
        (
            lambda: GRUCell(zeros(6, 2), zeros(6, 2), zeros(6), zeros(2)),
            "b_recurrent must have shape (6,), got (2,)",
        ),
        (
            lambda: GRUCell(zeros(6), zeros(6, 2), zeros(6), zeros(6)),
            "W must be a matrix, got shape (6,)",
        ),
        (
            lambda: LSTMCell(zeros(8, 1), zeros(9, 2), zeros(8)),
            "U must have shape (8, 2), got (9, 2)",
        ),
        (
            lambda: LSTMCell(zeros(12, 1), zeros(12, 2), zeros(12)),
            "U must have 3 columns without a projection, got 2",
        ),
        (
            lambda: LSTMCell(zeros(12, 1), zeros(12, 2), zeros(12), projection=zeros(3, 2)),
            "projection must have shape (2, 3), got (3, 2)",
        ),
        (
            lambda: LSTMCell(zeros(8, 1), zeros(8, 2), zeros(8), peephole=zeros(6)),
            "peephole must have shape (3, 2), got (6,)",
        ),
        (
            lambda: LSTMCell(zeros(8, 1).half(), zeros(8, 2), zeros(8)),
            "W must be float64, got torch.float16; convert it before",
        ),
        (
            lambda: Readout("head", zeros(3, 5), zeros(5)),
            "b must have shape (3,), got (5,)",
        ),
        (
            lambda: strategies.recurrence(random_cell(0, "lstm", 3), zeros(3)),
            "the initial state must have shape (6,), got (3,)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(build, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build()


def test_layers_must_feed_one_another():
    one, two = random_stack(0, "gru", 5, 3, bidirectional=True, layers=2).layers
    narrow = random_stack(0, "gru", 5, 5, layers=2).layers[1]
    message = r"^rnn\[1\] must read 10 features, got a cell that reads 5$"
    with pytest.raises(ValueError, match=message):
        Stack("rnn", (one, narrow))
    message = r"^the readout head must read 10 features, got A of shape \(1, 5\)$"
    with pytest.raises(ValueError, match=message):
        Stack("rnn", (one, two), Readout("head", zeros(1, 5), zeros(1)))


@given(cell=strategies.cells(), seed=strategies.seeds)
@settings(max_examples=50)
def test_sizes_are_those_of_a_step(cell, seed):
    s, x = strategies.random_states(seed, cell), strategies.random_inputs(seed, cell)
    assert x.shape == (cell.input_size,)
    assert step(cell, s, x).shape == s.shape == (cell.state_size,)
    extra = cell.state_size - cell.hidden_size
    assert extra == (cell.cell_size if isinstance(cell, LSTMCell) else 0)


def test_options_name_what_departs_from_the_default():
    assert random_cell(0, "elman", clip=2.0).options == {"activation": "tanh", "clip": 2.0}
    assert random_cell(0, "gru", reset_after=False).options == {
        "linear_before_reset": 0,
        "activations": ["sigmoid", "tanh"],
    }
    everything = random_cell(0, "lstm", peephole=True, projection=2, input_forget=True, clip=1.0)
    assert everything.options == {
        "activations": ["sigmoid", "tanh", "tanh"],
        "input_forget": 1,
        "peephole": True,
        "proj_size": 2,
        "clip": 1.0,
    }
    assert [random_cell(0, kind).kind for kind in KINDS] == list(KINDS)


def test_a_stack_knows_its_shape():
    stack = random_stack(0, "lstm", 5, 3, layers=2, bidirectional=True, readout=4)
    assert (stack.input_size, stack.output_size, stack.causal) == (3, 4, False)
    assert [r.label for r in stack.recurrences()] == [
        "rnn[0]",
        "rnn[0] reverse",
        "rnn[1]",
        "rnn[1] reverse",
    ]
    assert [r.direction for r in stack.layers[0].recurrences] == ["forward", "reverse"]
    assert (stack.layers[0].bidirectional, stack.layers[1].input_size) == (True, 10)
    plain = random_stack(0, "gru", 5, 3)
    assert (plain.output_size, plain.causal, plain.layers[0].bidirectional) == (5, True, False)
    assert len(list(random_model(0, "elman", layers=3).recurrences())) == 3


def test_the_initial_state_says_where_it_comes_from():
    assert InitialState(zeros(2)).describe() == "zero"
    assert InitialState(zeros(2), "constant").describe() == "constant"
    asked = InitialState(zeros(2), "graph input", "h0, c0")
    assert asked.describe() == "zero assumed for graph input h0, c0"
    assert asked.inputs == ("h0", "c0")
    computed = InitialState(zeros(2), "computed", "initial_h")
    assert computed.inputs == ()
    assert computed.describe() == "zero assumed for a state that the model computes"


# The fingerprint


@given(cell=strategies.cells(), data=st.data())
@settings(max_examples=80)
def test_any_changed_bit_changes_the_fingerprint(cell, data):
    base = strategies.recurrence(cell)
    tensors = [f.name for f in dataclasses.fields(cell)]
    tensors = [name for name in tensors if isinstance(getattr(cell, name), torch.Tensor)]
    name = data.draw(st.sampled_from(tensors))
    changed = getattr(cell, name).clone()
    at = data.draw(st.integers(0, changed.numel() - 1))
    bits = changed.view(torch.int64).view(-1)
    bits[at] ^= 1 << data.draw(st.integers(0, 62))
    other = dataclasses.replace(base, cell=dataclasses.replace(cell, **{name: changed}))
    assert fingerprint(other) != fingerprint(base)


@given(cell=strategies.cells(), data=st.data())
@settings(max_examples=60)
def test_any_changed_option_changes_the_fingerprint(cell, data):
    base = strategies.recurrence(cell)
    options = {
        f.name: getattr(cell, f.name)
        for f in dataclasses.fields(cell)
        if not isinstance(getattr(cell, f.name), torch.Tensor) and f.name != "projection"
    }
    name = data.draw(st.sampled_from(sorted(options)))
    old = options[name]
    new: object
    if isinstance(old, bool):
        new = not old
    elif isinstance(old, Activation):
        new = dataclasses.replace(old, alpha=(old.alpha or 0) + 1)
    elif name == "peephole":
        new = zeros(3, cell.cell_size)
    else:
        new = (old or 0) + 1.0
    other = dataclasses.replace(base, cell=dataclasses.replace(cell, **{name: new}))
    assert fingerprint(other) != fingerprint(base)


@given(cell=strategies.cells(), seed=strategies.seeds)
@settings(max_examples=40)
def test_the_fingerprint_follows_the_numbers_and_not_the_name(cell, seed):
    base = strategies.recurrence(cell)
    assert fingerprint(base) == fingerprint(strategies.recurrence(cell, name="other", layer=3))
    copies = {
        f.name: value.clone()
        for f in dataclasses.fields(cell)
        if isinstance(value := getattr(cell, f.name), torch.Tensor)
    }
    strided = {name: v.mT.contiguous().mT if v.ndim == 2 else v for name, v in copies.items()}
    assert fingerprint(strategies.recurrence(dataclasses.replace(cell, **strided))) == fingerprint(
        base
    )
    started = strategies.recurrence(cell, strategies.random_states(seed, cell))
    assert fingerprint(started) != fingerprint(base)


def test_minus_zero_is_another_bit():
    cell = ElmanCell(zeros(1, 1), zeros(1, 1), zeros(1))
    negative = dataclasses.replace(cell, b=-zeros(1))
    assert fingerprint(strategies.recurrence(cell)) != fingerprint(strategies.recurrence(negative))


def test_same_numbers_in_another_kind_of_cell_are_another_model():
    W, b = zeros(3, 1), zeros(3)
    after, before = (GRUCell(W, W, b, b, reset_after=on) for on in (True, False))
    prints = {fingerprint(strategies.recurrence(cell)) for cell in (after, before)}
    prints.add(fingerprint(strategies.recurrence(ElmanCell(zeros(1, 1), zeros(1, 1), zeros(1)))))
    assert len(prints) == 3


def test_a_layer_s_output_is_both_directions_together():
    layer = random_stack(0, "lstm", 6, 3, bidirectional=True, projection=2).layers[0]
    assert isinstance(layer, Layer)
    assert layer.output_size == 4
