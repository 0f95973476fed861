"""ONNX operators in torch: on values with a leading batch axis, and on constants without one.

A step is evaluated for many states at once, though its graph was written for one sequence.
Every value that depends on a state or an input therefore carries one axis more, in front,
which no operator sees: axes, shapes and broadcasts are those of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Value(NamedTuple):
    """A tensor, and whether its first axis is the batch that the graph does not know."""

    tensor: Tensor
    batched: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the graph knows."""
        return tuple(self.tensor.shape)[self.batched :]

    @property
    def ndim(self) -> int:
        """The rank that the graph knows."""
        return len(self.shape)

    def reshaped(self, shape: Sequence[int]) -> Value:
        """Return the value in another shape of the graph's."""
        if not self.batched:
            return Value(self.tensor.reshape(tuple(shape)), False)
        return Value(self.tensor.reshape(len(self.tensor), *shape), True)

    def axis(self, axis: int) -> int:
        """Return where an axis of the graph's is in the tensor."""
        if not -self.ndim <= axis < self.ndim:
            raise ValueError(f"axis {axis} of a value with {self.ndim}")
        return axis % self.ndim + self.batched

    def integers(self) -> list[int]:
        """Return the entries of a constant that holds sizes or indices.

        Raises:
            ValueError: They depend on a state or an input.
        """
        if self.batched:
            raise ValueError("a shape or an index depends on the state or the input")
        return [int(i) for i in self.tensor.reshape(-1).tolist()]


class Node(NamedTuple):
    """What an operator needs beside its inputs."""

    attributes: Mapping[str, object]
    outputs: int

    def integer(self, name: str, default: int) -> int:
        """Return an integer attribute."""
        return int(self.attributes.get(name, default))  # type: ignore[call-overload,no-any-return]

    def number(self, name: str, default: float) -> float:
        """Return a float attribute."""
        return float(self.attributes.get(name, default))  # type: ignore[arg-type]

    def list(self, name: str, inputs: Sequence[Value | None], index: int) -> list[int] | None:
        """Return integers that are an attribute in older opsets and an input in newer ones."""
        if name in self.attributes:
            return [int(i) for i in self.attributes[name]]  # type: ignore[attr-defined]
        given = inputs[index] if index < len(inputs) else None
        return None if given is None else given.integers()


Rule = Callable[[Node, Sequence[Value]], Sequence[Value]]


def _aligned(values: Sequence[Value]) -> tuple[list[Tensor], bool]:
    """Give values one rank, with the batch in front, so that torch broadcasts as ONNX does."""
    rank = max(v.ndim for v in values)
    batched = any(v.batched for v in values)
    padded = [v.reshaped((1,) * (rank - v.ndim) + v.shape).tensor for v in values]
    return padded, batched


def _elementwise(function: Callable[..., Tensor]) -> Rule:
    def rule(_: Node, inputs: Sequence[Value]) -> Sequence[Value]:
        tensors, batched = _aligned(inputs)
        return [Value(function(*tensors), batched)]

    return rule


def _unary(function: Callable[[Tensor, Node], Tensor]) -> Rule:
    def rule(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
        return [Value(function(inputs[0].tensor, node), inputs[0].batched)]

    return rule


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Apply a function of two to any number of inputs, one after another."""

    def rule(_: Node, inputs: Sequence[Value]) -> Sequence[Value]:
        result = inputs[0]
        for other in inputs[1:]:
            (a, b), batched = _aligned([result, other])
            result = Value(function(a, b), batched)
        return [result]

    return rule


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """Divide as ONNX does: integers towards zero."""
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _power(a: Tensor, b: Tensor) -> Tensor:
    return a ** b.to(a.dtype) if a.is_floating_point() else a**b


def _hard_sigmoid(v: Tensor, node: Node) -> Tensor:
    alpha, beta = node.number("alpha", 0.2), node.number("beta", 0.5)
    return (alpha * v + beta).clamp(0, 1)


def _elu(v: Tensor, node: Node) -> Tensor:
    return torch.where(v > 0, v, node.number("alpha", 1.0) * torch.expm1(v.clamp(max=0)))


def _selu(v: Tensor, node: Node) -> Tensor:
    alpha = node.number("alpha", 1.67326319217681884765625)
    gamma = node.number("gamma", 1.05070102214813232421875)
    return gamma * torch.where(v > 0, v, alpha * torch.expm1(v.clamp(max=0)))


def _gelu(v: Tensor, node: Node) -> Tensor:
    kind = node.attributes.get("approximate", "none")
    return functional.gelu(v, approximate="tanh" if kind == "tanh" else "none")


def _clip(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    v = inputs[0]
    bounds = [
        float(given.tensor)
        if (given := inputs[i] if i < len(inputs) else None) is not None
        else node.number(name, default)
        for i, name, default in ((1, "min", -math.inf), (2, "max", math.inf))
    ]
    return [Value(v.tensor.clamp(*bounds), v.batched)]


def _cast(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    """Convert between floats, integers and truth; rounding of narrower floats is left out."""
    v = inputs[0]
    return [Value(v.tensor.to(kind_of(node.integer("to", 1))), v.batched)]


def kind_of(onnx_type: int) -> torch.dtype:
    """Return the type in which values of an ONNX data type are kept.

    Raises:
        ValueError: It holds neither numbers nor truth values.
    """
    if onnx_type in {1, 10, 11, 16}:
        return torch.float64
    if onnx_type == 9:
        return torch.bool
    if 2 <= onnx_type <= 13 and onnx_type != 8:
        return torch.int64
    raise ValueError(f"values of ONNX type {onnx_type}")


def _matmul(_: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    a, b = inputs
    rows, columns = a.ndim == 1, b.ndim == 1
    a = a.reshaped((1, *a.shape)) if rows else a
    b = b.reshaped((*b.shape, 1)) if columns else b
    (left, right), batched = _aligned([a, b])
    product = Value(left @ right, batched)
    shape = product.shape
    if columns:
        shape = shape[:-1]
    if rows:
        shape = (*shape[: -2 + columns], *shape[len(shape) - 1 + columns :])
    return [product.reshaped(shape)]


def _gemm(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    a, b = (
        Value(v.tensor.mT, v.batched) if node.integer(name, 0) else v
        for v, name in zip(inputs, ("transA", "transB"), strict=False)
    )
    (product,) = _matmul(node, [a, b])
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    scaled = product if alpha == 1 else Value(alpha * product.tensor, product.batched)
    if len(inputs) < 3 or inputs[2] is None:
        return [scaled]
    bias = inputs[2] if beta == 1 else Value(beta * inputs[2].tensor, inputs[2].batched)
    return _elementwise(torch.add)(node, [scaled, bias])


def _transpose(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    v = inputs[0]
    order = node.attributes.get("perm", range(v.ndim)[::-1])
    perm = [int(i) + v.batched for i in order]  # type: ignore[attr-defined]
    return [Value(v.tensor.permute([0, *perm] if v.batched else perm), v.batched)]


def _reshape(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    v, shape = inputs[0], node.list("shape", inputs, 1) or []
    if not node.integer("allowzero", 0):
        shape = [v.shape[i] if n == 0 else n for i, n in enumerate(shape)]
    if -1 in shape:
        rest = math.prod(n for n in shape if n != -1)
        shape[shape.index(-1)] = math.prod(v.shape) // max(1, rest)
    return [v.reshaped(shape)]


def _flatten(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    v, cut = inputs[0], node.integer("axis", 1)
    cut = cut if cut >= 0 else cut + v.ndim
    return [v.reshaped((math.prod(v.shape[:cut]), math.prod(v.shape[cut:])))]


def _squeeze(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    v, axes = inputs[0], node.list("axes", inputs, 1)
    dropped = (
        {i for i, n in enumerate(v.shape) if n == 1} if axes is None else {i % v.ndim for i in axes}
    )
    if any(v.shape[i] != 1 for i in dropped):
        raise ValueError("Squeeze of an axis that is longer than 1")
    return [v.reshaped([n for i, n in enumerate(v.shape) if i not in dropped])]


def _unsqueeze(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    v, axes = inputs[0], node.list("axes", inputs, 1) or []
    rank = v.ndim + len(axes)
    new, rest = {i % rank for i in axes}, iter(v.shape)
    return [v.reshaped([1 if i in new else next(rest) for i in range(rank)])]


def _split(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    v, axis = inputs[0], inputs[0].axis(node.integer("axis", 0))
    length = v.tensor.shape[axis]
    sizes = node.list("split", inputs, 1)
    if sizes is None:
        each = math.ceil(length / node.outputs)
        sizes = [each] * (node.outputs - 1) + [length - each * (node.outputs - 1)]
    return [Value(part, v.batched) for part in v.tensor.split(sizes, dim=axis)]


def _slice(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    v = inputs[0]
    starts, ends = (node.list(name, inputs, i) for i, name in ((1, "starts"), (2, "ends")))
    if starts is None or ends is None:
        raise ValueError("Slice needs starts and ends")
    axes = node.list("axes", inputs, 3) or list(range(len(starts)))
    steps = node.list("steps", inputs, 4) or [1] * len(starts)
    result = v.tensor
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        at = v.axis(axis)
        length = result.shape[at]
        # Counting down, an end before the first entry means "to the very first", and a start
        # before it is the first.
        stop = None if step < 0 and end < -length else end
        first = max(start, -length) if step < 0 else start
        kept = range(length)[slice(first, stop, step)]
        if step == 1:
            result = result.narrow(at, kept.start, len(kept))
        else:
            result = result.index_select(at, torch.tensor(list(kept), dtype=torch.int64))
    return [Value(result, v.batched)]


def _gather(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    v, index = inputs
    axis = v.axis(node.integer("axis", 0))
    length = v.tensor.shape[axis]
    at = torch.where(index.tensor < 0, index.tensor + length, index.tensor)
    if v.batched and index.batched:
        raise ValueError("Gather whose data and indices both depend on the state or the input")
    taken = v.tensor.index_select(axis, at.reshape(-1))
    shape = (*v.tensor.shape[:axis], *at.shape, *v.tensor.shape[axis + 1 :])
    taken = taken.reshape(shape)
    # The batch of the indices sits where the axis was; it belongs in front.
    return [Value(taken.movedim(axis, 0) if index.batched else taken, v.batched or index.batched)]


def _concat(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    batch = next((len(v.tensor) for v in inputs if v.batched), None)
    axis = inputs[0].ndim + node.integer("axis", 0) if node.integer("axis", 0) < 0 else None
    axis = node.integer("axis", 0) if axis is None else axis
    if batch is None:
        return [Value(torch.cat([v.tensor for v in inputs], dim=axis), False)]
    parts = [v.tensor if v.batched else v.tensor.expand(batch, *v.shape) for v in inputs]
    return [Value(torch.cat(parts, dim=axis + 1), True)]


def _expand(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    v, wanted = inputs[0], inputs[1].integers()
    rank = max(v.ndim, len(wanted))
    shape = torch.broadcast_shapes(v.shape, tuple(wanted))
    padded = v.reshaped((1,) * (rank - v.ndim) + v.shape).tensor
    return [Value(padded.expand((len(padded), *shape) if v.batched else shape), v.batched)]


def _tile(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    v, times = inputs[0], inputs[1].integers()
    return [Value(v.tensor.repeat([1, *times] if v.batched else times), v.batched)]


def _shape(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    shape = inputs[0].shape
    kept = shape[node.integer("start", 0) : node.integer("end", len(shape))]
    return [Value(torch.tensor(kept, dtype=torch.int64), False)]


def _size(_: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    return [Value(torch.tensor(math.prod(inputs[0].shape)), False)]


def _constant_of_shape(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    fill = node.attributes.get("value", torch.zeros((), dtype=torch.float64))
    assert isinstance(fill, Tensor)
    return [Value(fill.reshape(()).expand(tuple(inputs[0].integers())), False)]


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Rule:
    def rule(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
        v, axes = inputs[0], node.list("axes", inputs, 1)
        if axes is None or not axes:
            if node.integer("noop_with_empty_axes", 0):
                return [v]
            axes = list(range(v.ndim))
        at = [v.axis(i) for i in axes]
        result = function(v.tensor, at, bool(node.integer("keepdims", 1))) if at else v.tensor
        return [Value(result, v.batched)]

    return rule


def _softmax(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    """Share out one axis; or all from that one on, as before opset 13, with ``flattened``."""
    v = inputs[0]
    axis = v.axis(node.integer("axis", -1))
    if not node.integer("flattened", 0):
        return [Value(v.tensor.softmax(axis), v.batched)]
    flat = v.tensor.flatten(axis).softmax(-1)
    return [Value(flat.reshape(v.tensor.shape), v.batched)]


def _layer_normalization(node: Node, inputs: Sequence[Value]) -> Sequence[Value]:
    v = inputs[0]
    over = tuple(range(v.axis(node.integer("axis", -1)), v.tensor.ndim))
    mean = v.tensor.mean(over, keepdim=True)
    spread = (v.tensor - mean).square().mean(over, keepdim=True)
    unit = (v.tensor - mean) * torch.rsqrt(spread + node.number("epsilon", 1e-5))
    (result,) = _elementwise(torch.mul)(node, [Value(unit, v.batched), inputs[1]])
    if len(inputs) > 2 and inputs[2] is not None:
        (result,) = _elementwise(torch.add)(node, [result, inputs[2]])
    return [result]


OPERATORS: dict[str, Rule] = {
    "Add": _elementwise(torch.add),
    "Sub": _elementwise(torch.sub),
    "Mul": _elementwise(torch.mul),
    "Div": _elementwise(_divide),
    "Pow": _elementwise(_power),
    "Where": _elementwise(torch.where),
    "Equal": _elementwise(torch.eq),
    "Less": _elementwise(torch.lt),
    "LessOrEqual": _elementwise(torch.le),
    "Greater": _elementwise(torch.gt),
    "GreaterOrEqual": _elementwise(torch.ge),
    "And": _elementwise(torch.logical_and),
    "Or": _elementwise(torch.logical_or),
    "Xor": _elementwise(torch.logical_xor),
    "Min": _folded(torch.minimum),
    "Max": _folded(torch.maximum),
    "Sum": _folded(torch.add),
    "Not": _unary(lambda v, _: v.logical_not()),
    "Neg": _unary(lambda v, _: -v),
    "Abs": _unary(lambda v, _: v.abs()),
    "Exp": _unary(lambda v, _: v.exp()),
    "Log": _unary(lambda v, _: v.log()),
    "Sqrt": _unary(lambda v, _: v.sqrt()),
    "Reciprocal": _unary(lambda v, _: v.reciprocal()),
    "Erf": _unary(lambda v, _: v.erf()),
    "Sin": _unary(lambda v, _: v.sin()),
    "Cos": _unary(lambda v, _: v.cos()),
    "Sign": _unary(lambda v, _: v.sign()),
    "Floor": _unary(lambda v, _: v.floor()),
    "Ceil": _unary(lambda v, _: v.ceil()),
    "Identity": _unary(lambda v, _: v),
    "Dropout": _unary(lambda v, _: v),
    "Sigmoid": _unary(lambda v, _: v.sigmoid()),
    "Tanh": _unary(lambda v, _: v.tanh()),
    "Relu": _unary(lambda v, _: v.relu()),
    "LeakyRelu": _unary(lambda v, node: torch.where(v >= 0, v, node.number("alpha", 0.01) * v)),
    "Elu": _unary(_elu),
    "Selu": _unary(_selu),
    "Gelu": _unary(_gelu),
    "HardSigmoid": _unary(_hard_sigmoid),
    "HardSwish": _unary(lambda v, _: v * (v / 6 + 0.5).clamp(0, 1)),
    "Softplus": _unary(lambda v, _: torch.logaddexp(v, torch.zeros_like(v))),
    "Softsign": _unary(lambda v, _: v / (1 + v.abs())),
    "Clip": _clip,
    "Cast": _cast,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Concat": _concat,
    "Expand": _expand,
    "Tile": _tile,
    "Shape": _shape,
    "Size": _size,
    "ConstantOfShape": _constant_of_shape,
    "ReduceSum": _reduce(lambda v, axes, keep: v.sum(axes, keepdim=keep)),
    "ReduceMean": _reduce(lambda v, axes, keep: v.mean(axes, keepdim=keep)),
    "ReduceMax": _reduce(lambda v, axes, keep: v.amax(axes, keepdim=keep)),
    "ReduceMin": _reduce(lambda v, axes, keep: v.amin(axes, keepdim=keep)),
    "ReduceL2": _reduce(lambda v, axes, keep: v.square().sum(axes, keepdim=keep).sqrt()),
    "ReduceSumSquare": _reduce(lambda v, axes, keep: v.square().sum(axes, keepdim=keep)),
    "Softmax": _softmax,
    "LayerNormalization": _layer_normalization,
}
"""What a traced step may be made of."""


def apply(
    op: str, attributes: Mapping[str, object], inputs: Sequence[Value | None], outputs: int
) -> Sequence[Value]:
    """Apply one of ``OPERATORS``.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: The inputs break the operator's rules.
    """
    # An absent input in the middle is None; a rule that takes it looks for that.
    return OPERATORS[op](Node(attributes, outputs), inputs)  # type: ignore[arg-type]
