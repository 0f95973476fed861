"""Random models for every test: seeded builders, and hypothesis strategies over them.

Weights are float64 but hold float32 values, as a stored model's do, so that the same
cell can be handed to PyTorch or ONNX Runtime without rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from rnnaudit.model import (
    Activation,
    Cell,
    ElmanCell,
    GRUCell,
    InitialState,
    Layer,
    LSTMCell,
    Model,
    Readout,
    Recurrence,
    Stack,
)

KINDS = ("elman", "gru", "lstm")

ACTIVATIONS = (
    Activation("tanh"),
    Activation("relu"),
    Activation("sigmoid"),
    Activation("affine", 0.75, 0.125),
    Activation("leakyrelu", 0.125),
    Activation("thresholdedrelu", 0.5),
    Activation("scaledtanh", 1.5, 0.75),
    Activation("hardsigmoid", 0.25, 0.5),
    Activation("elu", 0.75),
    Activation("softsign"),
    Activation("softplus"),
)
"""One of each kind; alpha and beta are exact in float32."""


def generator(seed: int) -> torch.Generator:
    """Return a CPU generator seeded with ``seed``."""
    return torch.Generator().manual_seed(seed)


def draw(rng: torch.Generator, *shape: int) -> Tensor:
    """Draw a normal float64 tensor."""
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def normal(rng: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Draw a normal float64 tensor whose values are exact in float32."""
    return (scale * torch.randn(*shape, generator=rng, dtype=torch.float64)).float().double()


def random_cell(
    seed: int, kind: str, hidden: int = 5, inputs: int = 3, gain: float = 1.0, **options: Any
) -> Cell:
    """Draw a cell: recurrent weights N(0, gain²/H), input weights N(0, 1/I), biases N(0, ¼).

    Args:
        seed: Same seed, same weights.
        kind: ``elman``, ``gru`` or ``lstm``.
        hidden: Width H (of c for an LSTM).
        inputs: Width I.
        gain: Scale of the recurrent weights; an Elman cell's ρ(W) is near it.
        options: Fields of the cell's class (``activation``, ``clip``, ``reset_after``, …), and for
            an LSTM ``peephole=True`` and ``projection=P``, which draw the matrices.
    """
    rng = generator(seed)
    rows = {"elman": 1, "gru": 3, "lstm": 4}[kind] * hidden
    outputs = options.pop("projection", None) or hidden
    recurrent = normal(rng, rows, outputs, scale=gain / outputs**0.5)
    reads = normal(rng, rows, inputs, scale=1 / max(inputs, 1) ** 0.5)
    bias = normal(rng, rows, scale=0.5)
    if kind == "elman":
        return ElmanCell(recurrent, reads, bias, **options)
    if kind == "gru":
        return GRUCell(reads, recurrent, bias, normal(rng, rows, scale=0.5), **options)
    if options.pop("peephole", False):
        options["peephole"] = normal(rng, 3, hidden, scale=0.5)
    if outputs != hidden:
        options["projection"] = normal(rng, outputs, hidden, scale=hidden**-0.5)
    return LSTMCell(reads, recurrent, bias, **options)


def random_states(seed: int, cell: Cell, *batch: int, scale: float = 1.0) -> Tensor:
    """Draw states [*batch, S]."""
    return normal(generator(seed), *batch, cell.state_size, scale=scale)


def random_inputs(seed: int, cell: Cell | Stack, *batch: int, scale: float = 1.0) -> Tensor:
    """Draw inputs [*batch, I]."""
    return normal(generator(seed ^ 0x5EED), *batch, cell.input_size, scale=scale)


def recurrence(
    cell: Cell,
    start: Tensor | None = None,
    *,
    name: str = "rnn",
    layer: int = 0,
    reverse: bool = False,
) -> Recurrence:
    """Wrap a cell, started from zero or from the constant state ``start`` [S]."""
    zero = torch.zeros(cell.state_size, dtype=torch.float64)
    initial = InitialState(zero) if start is None else InitialState(start, "constant")
    return Recurrence(name, layer, cell, initial, reverse)


def random_stack(
    seed: int,
    kind: str,
    hidden: int = 5,
    inputs: int = 3,
    *,
    layers: int = 1,
    bidirectional: bool = False,
    readout: int | None = None,
    start: Literal["zero", "constant"] = "zero",
    gain: float = 1.0,
    name: str = "rnn",
    **options: Any,
) -> Stack:
    """Draw a stack of ``layers`` layers, with a readout of width ``readout`` where one is given."""
    width, built = inputs, []
    for layer in range(layers):
        directions = []
        for reverse in (False, True)[: 1 + bidirectional]:
            part = seed * 1009 + 2 * layer + reverse
            cell = random_cell(part, kind, hidden, width, gain, **options)
            s = None if start == "zero" else random_states(part + 1, cell, scale=0.5)
            directions.append(recurrence(cell, s, name=name, layer=layer, reverse=reverse))
        built.append(Layer(tuple(directions)))
        width = built[-1].output_size
    if readout is None:
        return Stack(name, tuple(built))
    rng = generator(seed + 7)
    A = normal(rng, readout, width, scale=width**-0.5)
    return Stack(name, tuple(built), Readout("head", A, normal(rng, readout)))


def random_model(seed: int, kind: str, *args: Any, **options: Any) -> Model:
    """Wrap ``random_stack`` of the same arguments as a model that was read from no file."""
    stack = random_stack(seed, kind, *args, **options)
    return Model(Path("random.pt"), "PyTorch state_dict", "0" * 64, (stack,), whole=True)


def torch_module(stack: Stack) -> torch.nn.RNNBase:
    """Return the float64 nn.RNN, nn.GRU or nn.LSTM with the stack's weights, batch first.

    The stack's initial state and readout are not part of it.
    """
    first = stack.layers[0].recurrences[0].cell
    settings: dict[str, Any] = {
        "num_layers": len(stack.layers),
        "bidirectional": stack.layers[0].bidirectional,
        "batch_first": True,
        "dtype": torch.float64,
    }
    module: torch.nn.RNNBase
    if isinstance(first, ElmanCell):
        settings["nonlinearity"] = first.activation.name
        module = torch.nn.RNN(first.input_size, first.hidden_size, **settings)
    elif isinstance(first, GRUCell):
        module = torch.nn.GRU(first.input_size, first.hidden_size, **settings)
    else:
        if first.projection is not None:
            settings["proj_size"] = first.hidden_size
        module = torch.nn.LSTM(first.input_size, first.cell_size, **settings)
    weights: dict[str, Tensor] = {}
    for r in stack.recurrences():
        suffix = f"l{r.layer}{'_reverse' if r.reverse else ''}"
        weights |= {f"{key}_{suffix}": w for key, w in _torch_weights(r.cell).items()}
    module.load_state_dict(weights)
    return module


def _torch_weights(cell: Cell) -> Mapping[str, Tensor]:
    """Return the cell's tensors by PyTorch's names, without the layer's suffix."""
    if isinstance(cell, ElmanCell):
        return _named(cell.U, cell.W, cell.b, torch.zeros_like(cell.b))
    if isinstance(cell, GRUCell):
        return _named(cell.W, cell.U, cell.b_input, cell.b_recurrent)
    named = _named(cell.W, cell.U, cell.b, torch.zeros_like(cell.b))
    return named if cell.projection is None else {**named, "weight_hr": cell.projection}


def _named(reads: Tensor, recurrent: Tensor, b_input: Tensor, b_recurrent: Tensor) -> dict:
    return {
        "weight_ih": reads,
        "weight_hh": recurrent,
        "bias_ih": b_input,
        "bias_hh": b_recurrent,
    }


seeds = st.integers(0, 2**31 - 1)
gains = st.floats(1e-3, 10.0)
clips = st.none() | st.floats(0.25, 4.0)
activations = st.sampled_from(ACTIVATIONS)


@st.composite
def options(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """Draw every option of a kind of cell, activations among them."""
    chosen: dict[str, Any] = {"clip": draw(clips)}
    if kind == "elman":
        chosen["activation"] = draw(activations)
    else:
        chosen["gate"], chosen["candidate"] = draw(activations), draw(activations)
    if kind == "gru":
        chosen["reset_after"] = draw(st.booleans())
    if kind == "lstm":
        chosen["squash"] = draw(activations)
        chosen["peephole"] = draw(st.booleans())
        chosen["input_forget"] = draw(st.booleans())
        chosen["clip_output"] = draw(st.booleans())
        chosen["projection"] = draw(st.none() | st.integers(1, 3))
    return chosen


@st.composite
def cells(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, max_hidden: int = 6) -> Cell:
    """Draw a cell of any kind, width and option."""
    kind = draw(st.sampled_from(kinds))
    hidden, inputs = draw(st.integers(1, max_hidden)), draw(st.integers(1, 4))
    return random_cell(draw(seeds), kind, hidden, inputs, draw(gains), **draw(options(kind)))


@st.composite
def standard_cells(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, max_hidden: int = 6) -> Cell:
    """Draw a cell as PyTorch has it (tanh or ReLU, reset after, maybe projected)."""
    kind = draw(st.sampled_from(kinds))
    hidden, inputs = draw(st.integers(1, max_hidden)), draw(st.integers(1, 4))
    chosen: dict[str, Any] = {}
    if kind == "elman":
        chosen["activation"] = draw(st.sampled_from(ACTIVATIONS[:2]))
    if kind == "lstm" and hidden > 1:
        chosen["projection"] = draw(st.none() | st.integers(1, hidden - 1))
    return random_cell(draw(seeds), kind, hidden, inputs, draw(gains), **chosen)
