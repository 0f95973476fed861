"""Truncated nn.RNN, nn.GRU and nn.LSTM are the windows of the originals, in every form."""

import copy
import io

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from rnnaudit import cells
from rnnaudit.modules import Cut, Truncated, truncate_
from tests.references import close
from tests.strategies import normal, random_stack, seeds, torch_module

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("elman", "gru", "lstm")


def cut(module, depth, block=1):
    """Return a truncated copy with every layer and direction cut alike."""
    made = copy.deepcopy(module)
    directions = 1 + module.bidirectional
    truncate_(made, ((Cut(depth, block),) * directions,) * module.num_layers)
    return made


def final(state):
    return state if isinstance(state, tuple) else (state,)


@st.composite
def stacks(draw):
    kind = draw(st.sampled_from(KINDS))
    options = {"projection": 2} if kind == "lstm" and draw(st.booleans()) else {}
    shape = {"layers": draw(st.integers(1, 2)), "bidirectional": draw(st.booleans())}
    return random_stack(draw(seeds), kind, 4, 3, gain=draw(st.floats(0.1, 3)), **shape, **options)


@settings(max_examples=40, deadline=None)
@given(stack=stacks(), steps=st.integers(1, 23), depth=st.integers(1, 12), block=st.integers(1, 9))
def test_it_computes_what_the_exported_model_does(stack, steps, depth, block):
    module = torch_module(stack)
    x = normal(torch.Generator().manual_seed(steps), 2, steps, 3)
    labels = [r.label for r in stack.recurrences()]
    wanted = cells.run_stack(stack, x, dict.fromkeys(labels, depth), dict.fromkeys(labels, block))
    y, _ = cut(module, depth, block)(x)
    close(y.detach(), wanted)


@settings(max_examples=40, deadline=None)
@given(
    seed=seeds,
    kind=st.sampled_from(KINDS),
    steps=st.integers(1, 15),
    form=st.tuples(st.integers(1, 8), st.integers(1, 5)),
    start=st.booleans(),
)
def test_it_is_the_original_on_windows(seed, kind, steps, form, start):
    """Windows that reach the start begin at ``hx``, every other one at zero."""
    depth, block = form
    module = torch_module(random_stack(seed, kind, 4, 3))
    rng = torch.Generator().manual_seed(seed)
    x = normal(rng, 2, steps, 3)
    parts = tuple(normal(rng, 1, 2, 4) for _ in range(1 + (kind == "lstm")))
    hx = (parts if kind == "lstm" else parts[0]) if start else None
    outputs = []
    for t in range(steps):
        # A block restarts once for all of its outputs, k − 1 steps before the first of them.
        first = (t - depth + 1) // block * block
        window = x[:, max(0, first) : t + 1]
        y, last = module(window) if first > 0 else module(window, hx)
        outputs.append(y[:, -1])
    truncated = cut(module, depth, block)
    y, came = truncated(x) if hx is None else truncated(x, hx)
    close(y.detach(), torch.stack(outputs, dim=1).detach())
    if (
        block > 1 and kind == "lstm"
    ):  # the fused kernel's own c is not asked for: the last k give it
        whole = steps <= depth
        c = (module(x, hx) if whole else module(x[:, -depth:]))[1][1]
        last = (last[0], c)
    for got, wanted in zip(final(came), final(last), strict=True):
        close(got.detach(), wanted.detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 4])
def test_deep_enough_it_is_the_original(kind, block):
    module = torch_module(random_stack(3, kind, 4, 3, layers=2, bidirectional=True))
    truncated = cut(module, 50, block)
    assert list(truncated.state_dict()) == list(module.state_dict())
    x = normal(torch.Generator().manual_seed(0), 2, 20, 3)
    for given_ in (x, x[0]):  # batched, and a single sequence
        y, last = module(given_)
        got, came = truncated(given_)
        close(got, y)
        for a, b in zip(final(came), final(last), strict=True):
            close(a, b)
    y, last = module(x, last_of(module, x))
    got, came = truncated(x, last_of(module, x))
    close(got, y)
    for a, b in zip(final(came), final(last), strict=True):
        close(a, b)


def last_of(module, x):
    return module(x)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_come_back_packed(kind):
    module = torch_module(random_stack(4, kind, 4, 3, layers=2, bidirectional=True))
    x = normal(torch.Generator().manual_seed(0), 4, 12, 3)
    packed = pack_padded_sequence(x, torch.tensor([5, 12, 5, 7]), True, enforce_sorted=False)
    y, last = module(packed)
    got, came = cut(module, 50, 3)(packed)
    close(got.data, y.data)
    assert torch.equal(got.sorted_indices, y.sorted_indices)
    for a, b in zip(final(came), final(last), strict=True):
        close(a, b)
    window, _ = pad_packed_sequence(cut(module, 2)(packed)[0], batch_first=True)
    close(window[3, :7], cut(module, 2)(x[3, :7])[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 3])
def test_gradients_are_those_of_the_windows(kind, block):
    truncated = cut(torch_module(random_stack(5, kind, 3, 2)), 3, block)
    x = normal(torch.Generator().manual_seed(0), 1, 7, 2).requires_grad_()

    def run(x, *weights):
        names = [name for name, _ in truncated.named_parameters()]
        return torch.func.functional_call(truncated, dict(zip(names, weights, strict=True)), (x,))[
            0
        ]

    assert torch.autograd.gradcheck(run, (x, *truncated.parameters()))


def test_dropout_between_layers_is_that_of_training_only():
    module = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)
    truncated = cut(module, 20, 4)
    x = torch.randn(1, 10, 3)
    assert not torch.equal(truncated(x)[0], truncated(x)[0])
    truncated.eval()
    torch.testing.assert_close(truncated(x)[0], module.eval()(x)[0])


def test_a_parametrized_weight_stays_parametrized():
    module = nn.GRU(3, 4, batch_first=True).double()
    parametrizations.weight_norm(module, "weight_hh_l0")
    truncated = cut(module, 30, 4)
    x = torch.randn(2, 9, 3, dtype=torch.float64)
    close(truncated(x)[0].detach(), module(x)[0].detach())
    truncated(x)[0].sum().backward()
    assert truncated.parametrizations.weight_hh_l0.original0.grad.abs().sum() > 0
    parametrize.remove_parametrizations(truncated, "weight_hh_l0")
    assert type(truncated) is Truncated
    close(truncated(x)[0].detach(), module(x)[0].detach())


def test_it_can_be_saved_copied_and_seen():
    truncated = cut(nn.LSTM(3, 4), 5, 8)
    assert repr(truncated) == "TruncatedLSTM(3, 4, depth=5, block=8)"
    file = io.BytesIO()
    torch.save(truncated, file)
    file.seek(0)
    x = torch.randn(30, 1, 3)
    assert torch.equal(torch.load(file, weights_only=False)(x)[0], truncated(x)[0])


def test_what_the_original_refuses_is_refused():
    truncated = cut(nn.LSTM(3, 4), 5)
    with pytest.raises(ValueError, match="at least one step, got none"):
        truncated(torch.zeros(0, 1, 3))
    wrong = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    with pytest.raises(ValueError, match=r"hx must have shapes \[\(1, 1, 4\), \(1, 1, 4\)\]"):
        truncated(torch.zeros(2, 1, 3), wrong)
    with pytest.raises(RuntimeError, match=r"input.size\(-1\) must be equal to input_size"):
        truncated(torch.zeros(2, 1, 5))


LENGTHS = (1, 2, 3, 4, 6, 31)


@pytest.mark.parametrize(("kind", "block"), [("lstm", 1), ("lstm", 2), ("gru", 2)])
def test_it_exports_with_dynamic_time_and_batch(kind, block):
    truncated = cut(torch_module(random_stack(6, kind, 3, 2, bidirectional=True)), 3, block)
    dynamic = {"input": {0: Dim("batch", min=1), 1: Dim("time", min=1)}}
    x = torch.randn(2, 20, 2, dtype=torch.float64)
    exported = torch.export.export(truncated, (x,), dynamic_shapes=dynamic)
    assert not any(kind in str(node.target) for node in exported.graph.nodes)
    for batch in (1, 3):
        for steps in LENGTHS:
            x = torch.randn(batch, steps, 2, dtype=torch.float64)
            close(exported.module()(x)[0].detach(), truncated(x)[0].detach())


@pytest.mark.parametrize("block", [1, 2])
def test_it_compiles_once_for_every_length(block):
    truncated = cut(torch_module(random_stack(7, "lstm", 3, 2)), 3, block)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(truncated, dynamic=True, fullgraph=True, backend=counter)
    with torch.no_grad():
        for steps in (20, 7, 4, 31):
            x = torch.randn(2, steps, 2, dtype=torch.float64)
            close(compiled(x)[0], truncated(x)[0])
    assert [len(each.graph.nodes) > 0 for each in counter.graphs].count(True) == 1
