"""Shapes that nothing declares, from the operators that make a value: as far as steps need them.

``None`` stands for a length that only the run decides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from rnnaudit.loaders.onnx.axes import Atom, Layout, axis, length
from rnnaudit.loaders.onnx.contents import integer, integers
from rnnaudit.loaders.onnx.layouts import LAYOUTS
from rnnaudit.loaders.onnx.refusal import MALFORMED
from rnnaudit.loaders.onnx.values import Knowledge

Sizes = list[int | None]

_DEEPEST = 100
"""Operators, one behind another, that a shape is followed through."""

_SAME = frozenset(
    {"Identity", "Cast", "Dropout", "Tanh", "Sigmoid", "HardSigmoid", "Relu", "LeakyRelu", "Elu"}
    | {"Softsign", "Softplus", "Softmax", "Clip", "Neg", "Abs", "Exp", "Erf", "Sqrt"}
)
_SUMS: dict[str, Callable[[int, int], int | None]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": lambda a, b: a // b if a >= 0 and b > 0 else None,
}

_MOST = 64
"""Numbers that a shape or a list of axes may hold."""

_BROADCAST = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Sum", "Min", "Max", "Where"})


class Inference:
    """Follows shapes back to where they are told; each value once."""

    def __init__(
        self, known: Knowledge, told: Callable[[Knowledge, ir.Value], Sizes | None]
    ) -> None:
        """Begin with nothing but what ``told`` says of a value."""
        self._known, self._told = known, told
        self._found: dict[ir.Value, Sizes | None] = {}
        self._counted: dict[ir.Value, Sizes | None] = {}

    def shape(self, value: ir.Value | None, depth: int = 0) -> Sizes | None:
        """Return a value's axes; None where their number is not known."""
        if value is None or depth > _DEEPEST:
            return None
        if value not in self._found:
            self._found[value] = None  # a graph may bite its tail
            found = self._told(self._known, value)
            try:
                self._found[value] = self._made(value, depth + 1) if found is None else found
            except MALFORMED:  # what breaks its operator's rules tells nothing
                return None
        return self._found[value]

    def made(self, value: ir.Value) -> Sizes | None:
        """Return a value's axes as its operator makes them, whatever is told of it."""
        try:
            return self._made(value, 1)
        except MALFORMED:
            return None

    def _made(self, value: ir.Value, depth: int) -> Sizes | None:
        node = value.producer()
        if node is None or node.domain not in {"", "ai.onnx"} or not node.inputs:
            return None
        if node.op_type in _BROADCAST:
            return _broadcast([self.shape(v, depth) for v in node.inputs])
        first = self.shape(node.inputs[0], depth)
        if node.op_type == "Reshape":
            return self._reshaped(node, first, depth)
        if node.op_type == "Gemm":
            return self._gemm(node, first, depth)
        if first is None:
            return None
        if node.op_type in _SAME:
            return first
        if node.op_type == "MatMul":
            second = self.shape(node.inputs[1], depth)
            if second is None or min(len(first), len(second)) < 2:
                return None
            front = _broadcast([first[:-2], second[:-2]])
            return None if front is None else [*front, first[-2], second[-1]]
        if node.op_type in {"Concat", "Split"}:
            return self._along(node, value, first, depth)
        if node.op_type == "Slice":
            return self._sliced(node, first, depth)
        return self._moved(node, first)

    def _reshaped(self, node: ir.Node, first: Sizes | None, depth: int) -> Sizes | None:
        wanted: Sequence[object] | None = self._numbers(node.inputs[1], depth)
        content = self._known.content(node.inputs[1])
        if wanted is None and isinstance(content, np.ndarray):
            wanted = content.reshape(-1).tolist()
        if wanted is None:
            return None
        copied = [] if first is None or integer(node, "allowzero", 0) else first
        sizes = [
            (copied[i] if i < len(copied) else None) if n == 0 else n for i, n in enumerate(wanted)
        ]
        return [n if isinstance(n, int) and n > 0 else None for n in sizes]

    def _gemm(self, node: ir.Node, first: Sizes | None, depth: int) -> Sizes | None:
        second = self.shape(node.inputs[1], depth)
        rows = None if first is None or len(first) != 2 else first[integer(node, "transA", 0)]
        if second is None or len(second) != 2:
            return None
        return [rows, second[1 - integer(node, "transB", 0)]]

    def _along(self, node: ir.Node, value: ir.Value, first: Sizes, depth: int) -> Sizes | None:
        along = integer(node, "axis", 0)
        if not -len(first) <= along < len(first):
            return None
        sizes = list(first)
        if node.op_type == "Concat":
            parts = [self.shape(v, depth) for v in node.inputs]
            lengths = [p[along] if p is not None and len(p) == len(first) else None for p in parts]
            whole = [n for n in lengths if n is not None]
            sizes[along] = sum(whole) if len(whole) == len(lengths) else None
            return sizes
        given = integers(node, "split", [self._known.constant(v) for v in node.inputs], 1)
        size, count = sizes[along], len(node.outputs)
        if given is not None:
            sizes[along] = given[[*node.outputs].index(value)] if len(given) == count else None
        elif size is not None and size % count == 0:
            sizes[along] = size // count
        else:
            sizes[along] = None
        return sizes

    def _sliced(self, node: ir.Node, first: Sizes, depth: int) -> Sizes | None:
        starts, ends, axes, steps = (
            [self._numbers(v, depth) for v in node.inputs[1:]] + [None] * 4
        )[:4]
        unknown = any(v is not None and self._numbers(v, depth) is None for v in node.inputs[1:])
        if starts is None or ends is None or unknown:
            return None
        axes = axes or [*range(len(starts))]
        steps = steps or [1] * len(starts)
        if not len(starts) == len(ends) == len(axes) == len(steps):
            return None
        sizes = list(first)
        for along, start, end, step in zip(axes, starts, ends, steps, strict=True):
            if along is None:
                return None
            size = sizes[along]
            told = size is not None and None not in {start, end, step}
            sizes[along] = len(range(size or 0)[slice(start, end, step)]) if told else None
        return sizes

    def _numbers(self, value: ir.Value | None, depth: int) -> Sizes | None:
        """Return the whole numbers that a value holds, where they follow from shapes."""
        if value is None or depth > _DEEPEST:
            return None
        if value not in self._counted:
            self._counted[value] = None  # a graph may bite its tail
            self._counted[value] = self._summed(value, depth)
        return self._counted[value]

    def _summed(self, value: ir.Value, depth: int) -> Sizes | None:
        stored, node = self._known.constant(value), value.producer()
        if stored is not None:
            whole = stored.dtype.kind in "iu" and stored.size <= _MOST
            return [int(n) for n in stored.reshape(-1)] if whole else None
        if node is None or node.domain not in {"", "ai.onnx"} or not node.inputs:
            return None
        if node.op_type == "Shape":
            sizes = self.shape(node.inputs[0], depth + 1)
            return None if sizes is None or node.attributes else sizes
        given = [self._numbers(v, depth + 1) for v in node.inputs]
        first = given[0]
        if first is None:
            return None
        if node.op_type in {"Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape"}:
            return first
        second = given[1] if len(given) > 1 else None
        if second is None:
            return None
        if node.op_type == "Gather":
            found = [n for n in second if n is not None and -len(first) <= n < len(first)]
            return [first[n] for n in found] if len(found) == len(second) else None
        if node.op_type not in _SUMS or len(first) != 1 or len(second) != 1:
            return None
        a, b = first[0], second[0]
        return [None if a is None or b is None else _SUMS[node.op_type](a, b)]

    def _moved(self, node: ir.Node, first: Sizes) -> Sizes | None:
        given = [self._known.constant(v) for v in node.inputs]
        if node.op_type in {"Transpose", "Unsqueeze", "Flatten"} and node.inputs[0] is not None:
            axes = tuple(axis(Atom(str(i), n)) for i, n in enumerate(first))
            moved = LAYOUTS[node.op_type](self._known, node, Layout(node.inputs[0], axes))
            sizes = [length(one) for one in moved or ()]
            return None if moved is None else [n if isinstance(n, int) else None for n in sizes]
        if node.op_type == "Gather" and given[1] is not None:
            along = integer(node, "axis", 0) % max(1, len(first))
            return [*first[:along], *given[1].shape, *first[along + 1 :]]
        if node.op_type == "Squeeze":
            gone = integers(node, "axes", given, 1)
            if gone is not None:
                dropped = {along % max(1, len(first)) for along in gone}
                return [n for i, n in enumerate(first) if i not in dropped]
        return None


def _broadcast(shapes: Sequence[Sizes | None]) -> Sizes | None:
    told = [shape for shape in shapes if shape is not None]
    if len(told) < len(shapes):
        return None
    rank = max(map(len, told))
    sizes: Sizes = []
    padded: list[Sizes] = [[*[1] * (rank - len(shape)), *shape] for shape in told]
    for column in zip(*padded, strict=True):
        longer = {n for n in column if n is not None and n != 1}
        if len(longer) > 1:
            return None
        sizes.append(longer.pop() if longer else None if None in column else 1)
    return sizes
