"""Whether a step keeps the sequences of a batch apart: what is proved of one holds of several.

A step is traced for one sequence, every axis whose length only the run decides taken as 1.
That says something of the file only if entries along such an axis never meet. Each number
of a wider step is therefore followed back to the first and the last entry that it is made
of: operators that move numbers move these too, and all others take the least and the
greatest of what they combine. Each entry of the next state must be made of its own alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rnnaudit.cells.interface import next_state
from rnnaudit.cells.operators import Value, apply
from rnnaudit.cells.traced import evaluate
from rnnaudit.loaders.onnx.bodies import MAX_WIDTH, Carried, Entering
from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.model import Operation, Port, TracedCell

Ports = tuple[list[Carried], list[Entering]]

_LENGTHS = ((3, 5, 7, 11), (2, 3, 5, 7))
"""How long the axes of unknown length are made, in the order in which a value has them."""

_ALONG = ("the sequences of a batch", "the entries of an axis of unknown length")

_MOVES = frozenset(
    {"Identity", "Dropout", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Split"}
    | {"Slice", "Gather", "Expand", "Tile", "Concat"}
)
_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Where", "Equal", "Less", "LessOrEqual", "Greater"}
    | {"GreaterOrEqual", "And", "Or", "Xor", "Min", "Max", "Sum", "Not", "Neg", "Abs", "Exp"}
    | {"Log", "Sqrt", "Reciprocal", "Erf", "Sin", "Cos", "Sign", "Floor", "Ceil", "Sigmoid"}
    | {"Tanh", "Relu", "LeakyRelu", "Elu", "Selu", "Gelu", "HardSigmoid", "HardSwish"}
    | {"Softplus", "Softsign", "Clip", "Cast"}
)
_REDUCES = frozenset({"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"}) | frozenset(
    {"ReduceL2", "ReduceSumSquare"}
)


def alone(ports: Ports) -> Ports:
    """Take one sequence where the graph fixes how many it reads at once."""
    carried, entering = ports
    rows = {c.shape[0] for c in carried if c.shape} - {1}
    rows |= {n for e in entering for n, m in zip(e.shape, e.alone().shape, strict=True) if n != m}
    if len(rows) != 1 or any(len(c.shape) < 2 for c in carried):
        return ports
    return (
        [Carried(c.before, c.after, (1, *c.shape[1:])) for c in carried],
        [e.alone() for e in entering],
    )


def keep_apart(
    one: TracedCell,
    ports: Callable[[Sequence[int]], Ports],
    make: Callable[[Ports], TracedCell],
) -> None:
    """Refuse a step that mixes the sequences of a batch, where it can take several.

    Args:
        one: The step for one sequence.
        ports: What it carries and reads, given how long axes of unknown length are.
        make: Traces the step for those.

    Raises:
        Refused: Some sequence's step is not, or is not known to be, what it is alone.
    """
    widths, ran, size = 0, False, 0
    for lengths in _LENGTHS:
        wide = ports(lengths)
        shapes = [part.shape for side in wide for part in side]
        narrow = [port.shape for port in (*one.states, *one.inputs)]
        widths = max(len(_apart_axes(m, n)) for m, n in zip(shapes, narrow, strict=True))
        size = max(sum(math.prod(part.shape) for part in side) for side in wide)
        several = _made(make, wide) or (_made(make, _spread(wide, lengths)) if widths else None)
        if several is not None:
            ran = True
            _check(one, several, widths)
    if widths > 1 and not ran:
        raise Refused("which of its axes is the batch is not known")
    if size > MAX_WIDTH and not ran:
        raise Refused("it is too wide to see whether it keeps the sequences of a batch apart")


def _made(make: Callable[[Ports], TracedCell], ports: Ports) -> TracedCell | None:
    try:
        return make(ports)
    except Refused:
        return None


def _spread(ports: Ports, lengths: Sequence[int]) -> Ports:
    """Let all sequences start from one state that is stored once."""
    carried, entering = ports
    shapes = [
        (lengths[0], *c.shape[1:]) if len(c.shape) > 1 and c.shape[0] == 1 else c.shape
        for c in carried
    ]
    return [Carried(c.before, c.after, n) for c, n in zip(carried, shapes, strict=True)], entering


def settled(
    ports: Callable[..., Ports], make: Callable[[Ports], TracedCell]
) -> tuple[Ports, TracedCell, bool]:
    """Trace a step for one sequence; for all together where the graph fixes how many those are.

    Returns:
        What it carries and reads, the step, and whether several sequences are its one state.

    Raises:
        Refused: It is not read, or mixes sequences of which there may be any number.
    """
    given = ports()
    for few in (alone(given), given):
        try:
            cell = make(few)
            keep_apart(cell, ports, make)
        except Refused:
            if few is given:
                raise
        else:
            return few, cell, few is given is not alone(given)
    raise AssertionError


def _apart_axes(many: Sequence[int], single: Sequence[int]) -> list[int]:
    return [i for i, (n, m) in enumerate(zip(many, single, strict=True)) if n != m]


def _check(one: TracedCell, several: TracedCell, widths: int) -> None:
    """Compare the steps along the first, the second, … axis of a value that may be long."""
    if not _agree(one, several):
        raise Refused(f"its step mixes {_ALONG[widths > 1]}")
    for kind in range(widths):
        if not _separate(one, several, kind):
            raise Refused(f"its step is not known to keep {_ALONG[kind > 0]} apart")


# --- by numbers: the step of several is that of one -------------------------------------------


def _agree(one: TracedCell, several: TracedCell) -> bool:
    """Whether the first and the last sequence's steps, at random points, are those of one alone."""
    rng = torch.Generator().manual_seed(0)
    for scale in (0.5, 5.0):
        s, x = (
            scale * torch.randn(8, n, generator=rng, dtype=torch.float64)
            for n in (several.state_size, several.input_size)
        )
        after = next_state(several, s, x)
        for last in (False, True):
            own = _row(s, several.states, one.states, last=last)
            alone = next_state(one, own, _row(x, several.inputs, one.inputs, last=last))
            beside = _row(after, several.states, one.states, last=last)
            if not torch.allclose(alone, beside, rtol=1e-9, atol=1e-9, equal_nan=True):
                return False
    return True


def _row(values: Tensor, wide: Sequence[Port], narrow: Sequence[Port], *, last: bool) -> Tensor:
    """Return the first or last sequence's numbers: of length 1 where a batch is longer."""
    parts = []
    for part, many, single in zip(
        values.split([port.size for port in wide], dim=-1), wide, narrow, strict=True
    ):
        shaped = part.reshape(len(part), *many.shape)
        for axis, (n, m) in enumerate(zip(many.shape, single.shape, strict=True), 1):
            if n != m:
                shaped = shaped.narrow(axis, n - m if last else 0, m)
        parts.append(shaped.reshape(len(part), -1))
    return torch.cat(parts, dim=-1)


# --- by structure: what each number of the next state is made of ------------------------------


def _separate(one: TracedCell, several: TracedCell, kind: int) -> bool:
    """Whether every entry of the next state is made of its own entries of states and inputs."""
    wide, narrow = (*several.states, *several.inputs), (*one.states, *one.inputs)
    spans = {w.name: _numbered(w, n, kind) for w, n in zip(wide, narrow, strict=True)}
    own = [spans[port.name] for port in several.states]
    s, x = (
        torch.zeros(1, n, dtype=torch.float64) for n in (several.state_size, several.input_size)
    )
    shapes = {name: value.shape for name, value in evaluate(several, s, x).items()}
    for operation in several.operations:
        found = _spans(operation, spans, several.constants, shapes)
        spans |= zip(operation.outputs, found, strict=False)
    for name, port, mine in zip(several.next_states, several.states, own, strict=True):
        after = spans.get(name, _nothing(port.shape))
        if not bool((after.isinf() | (after == mine)).all()):
            return False
    return True


def _nothing(shape: Sequence[int]) -> Tensor:
    return torch.full((2, *shape), torch.inf, dtype=torch.float64)


def _numbered(wide: Port, narrow: Port, kind: int) -> Tensor:
    """Return the first entry and, negated, the last [2, …] that a port's numbers are made of."""
    span = _nothing(wide.shape)
    axes = _apart_axes(wide.shape, narrow.shape)
    if kind < len(axes):
        entry = torch.arange(wide.shape[axes[kind]], dtype=torch.float64)
        entry = entry.reshape([-1 if i == axes[kind] else 1 for i in range(len(wide.shape))])
        span = torch.stack([entry.expand(wide.shape), -entry.expand(wide.shape)])
    return span


def _spans(
    operation: Operation,
    spans: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> Sequence[Tensor]:
    op, names = operation.op, [name for name in operation.inputs if name]
    given = [spans[n] if n in spans else _nothing(shapes[n]) for n in names]
    shape, count = shapes[operation.outputs[0]], len(operation.outputs)
    fixed = [Value(constants[n], False) if n in constants else None for n in operation.inputs]
    data = [Value(span, True) for span in given]
    if op in _MOVES and all(n in constants for n in operation.inputs[1:] if n and op != "Concat"):
        moved = data if op == "Concat" else [data[0], *fixed[1:]]
        if op == "Dropout":
            return [given[0]] * count
        return [v.tensor for v in apply(op, operation.attributes, moved, count)]
    if op in _ELEMENTWISE:
        return [_least(given, shape)]
    if op in _REDUCES and all(n in constants for n in operation.inputs[1:] if n):
        reduced = apply("ReduceMin", operation.attributes, [data[0], *fixed[1:]], 1)
        return [reduced[0].tensor]
    if op in {"Softmax", "LayerNormalization"}:
        axis = int(str(operation.attributes.get("axis", -1))) % len(shape) + 1
        several = op == "LayerNormalization" or "flattened" in operation.attributes
        over = list(range(axis, len(shape) + 1)) if several else [axis]
        return [_least([given[0].amin(over, keepdim=True), *given[1:]], shape)]
    if op in {"MatMul", "Gemm"} and min(len(shapes[n]) for n in names[:2]) > 1:
        a, b = (
            span.mT if op == "Gemm" and operation.attributes.get(key) else span
            for span, key in zip(given, ("transA", "transB"), strict=False)
        )
        return [_least([a.amin(-1, keepdim=True), b.amin(-2, keepdim=True), *given[2:]], shape)]
    everything = torch.stack([span.reshape(2, -1).amin(1) for span in given if span.numel()])
    least = everything.amin(0)
    return [
        least.reshape(2, *(1 for _ in shapes[out])).expand(2, *shapes[out])
        for out in operation.outputs
    ]


def _least(spans: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Combine spans as they are broadcast."""
    result = _nothing(shape)
    for span in spans:
        padded = span.reshape(2, *(1,) * (len(shape) + 1 - span.ndim), *span.shape[1:])
        result = torch.minimum(result, padded)
    return result
