"""Constant folding: operators on arrays whose entries may be symbolic sizes, and on broadcasts.

Only the operators listed here are evaluated, each within a limit on its elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from rnnaudit.loaders.onnx.axes import Size
from rnnaudit.loaders.onnx.reading import Array, array

MAX_ELEMENTS = 2**27
"""Elements of all constants that are computed while a file is read."""


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """``core`` broadcast to a larger shape, of rank ``rank`` where that is known."""

    core: Array
    rank: int | None = None

    def aligned(self) -> Array | None:
        """Return the core with one axis for each axis of the value."""
        if self.rank is None or self.rank < self.core.ndim:
            return None
        return self.core.reshape((1,) * (self.rank - self.core.ndim) + self.core.shape)


Content = Array | Spread


def integer(node: ir.Node, name: str, default: int) -> int:
    """Return an integer attribute."""
    attribute = node.attributes.get(name)
    return default if attribute is None else int(attribute.as_int())


def integers(
    node: ir.Node, name: str, inputs: Sequence[Array | None], index: int
) -> list[int] | None:
    """Return a list that is an attribute in older opsets and an input in newer ones.

    None where it is left out.

    Raises:
        ValueError: It is given, and not known.
    """
    attribute = node.attributes.get(name)
    if attribute is not None:
        return [int(i) for i in attribute.as_ints()]
    stored = inputs[index] if index < len(inputs) else None
    if stored is None and index < len(node.inputs) and node.inputs[index] is not None:
        raise ValueError(f"{name} of {node.op_type} is not known")
    return None if stored is None else [int(i) for i in np.atleast_1d(stored)]


Rule = Callable[[ir.Node, Sequence[Any]], Sequence[Array]]


def _result_elements(node: ir.Node, inputs: Sequence[Array | None]) -> int:
    """Bound the elements of the result before it is made."""
    largest = max((a.size for a in inputs if a is not None), default=1)
    if node.op_type in {"Expand", "ConstantOfShape", "Tile"}:
        grown = inputs[-1]
        factor = 1 if grown is None else math.prod(max(1, int(e)) for e in grown.ravel()[:64])
        return factor if node.op_type == "ConstantOfShape" else largest * factor
    shapes: list[tuple[int, ...]] = [a.shape for a in inputs if a is not None]
    if node.op_type == "Concat":
        return sum(math.prod(shape) for shape in shapes)
    if node.op_type == "Gather":
        rows = max(1, shapes[0][integer(node, "axis", 0)])
        return math.prod(shapes[0]) // rows * math.prod(shapes[1])
    if node.op_type in {"Add", "Sub", "Mul", "Div", "Where", "Equal"}:
        return math.prod(np.broadcast_shapes(*shapes))
    return largest


def _arithmetic(exact: Callable[[Any, Any], Any], symbolic: Callable[[Any, Any], Any]) -> Rule:
    def rule(_: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
        a, b = inputs
        if is_symbolic(a, b):
            return [np.asarray(np.frompyfunc(symbolic, 2, 1)(a, b), dtype=object)]
        return [np.asarray(exact(a, b))]

    return rule


def is_symbolic(*arrays: Array) -> bool:
    """Whether entries may be sizes that only the run decides."""
    return any(a.dtype.kind == "O" for a in arrays)


def _times(a: Any, b: Any) -> Any:
    if isinstance(a, Size) and isinstance(b, Size):
        return Size(a.factor * b.factor, tuple(sorted(a.axes + b.axes)))
    if isinstance(a, Size):
        return Size(a.factor * int(b), a.axes) if b else 0
    return _times(b, a) if isinstance(b, Size) else a * b


def _plus(a: Any, b: Any) -> Any:
    if isinstance(a, Size) or isinstance(b, Size):
        return b if _is_zero(a) else a if _is_zero(b) else Size.unknown()
    return a + b


def _minus(a: Any, b: Any) -> Any:
    if isinstance(a, Size) or isinstance(b, Size):
        return a if _is_zero(b) else Size.unknown()
    return a - b


def _over(a: Any, b: Any) -> Any:
    if isinstance(a, Size) and not isinstance(b, Size) and b and a.factor % int(b) == 0:
        return Size(a.factor // int(b), a.axes)
    if isinstance(a, Size) or isinstance(b, Size):
        return Size.unknown()
    return int(a / b)


def _equal(a: Any, b: Any) -> Any:
    if isinstance(a, Size) and isinstance(b, Size):
        return True if a == b else Size.unknown()
    if isinstance(b, Size):
        a, b = b, a
    if isinstance(a, Size):
        return False if a.is_axis and b < 0 else Size.unknown()
    return bool(a == b)


def _is_zero(entry: Any) -> bool:
    return not isinstance(entry, Size) and entry == 0


def _choose(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, Size):
        return a if a is b or (type(a) is type(b) and a == b) else Size.unknown()
    return a if condition else b


def _where(_: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    if is_symbolic(*inputs):
        return [np.asarray(np.frompyfunc(_choose, 3, 1)(*inputs), dtype=object)]
    return [np.asarray(np.where(*inputs))]


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        return np.asarray(np.divide(a, b))
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)))  # towards zero


def _constant(node: ir.Node, _: Sequence[Any]) -> Sequence[Array]:
    for name, attribute in node.attributes.items():
        if name == "value":
            return [array(attribute.as_tensor(), f"constant {node.outputs[0].name!r}")]
        if name in {"value_int", "value_ints"}:
            return [np.array(attribute.value, dtype=np.int64)]
        if name in {"value_float", "value_floats"}:
            return [np.array(attribute.value, dtype=np.float32)]
    return ()


def _cast(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    (a,) = inputs
    if is_symbolic(a):
        return [a]
    return [a.astype(ir.DataType(node.attributes["to"].as_int()).numpy())]


def _axes_of(a: Array, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(i % a.ndim for i in axes)


def _squeeze(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    axes = integers(node, "axes", inputs, 1)
    a = inputs[0]
    return [a.squeeze(None if axes is None else _axes_of(a, axes))]


def _unsqueeze(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    axes = integers(node, "axes", inputs, 1)
    return [np.expand_dims(inputs[0], tuple(axes or ()))]


def _transpose(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    perm = node.attributes.get("perm")
    return [inputs[0].transpose(None if perm is None else [int(i) for i in perm.as_ints()])]


def _reshape(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    a, shape = inputs[0], integers(node, "shape", inputs, 1)
    if shape is None:
        return ()
    if not integer(node, "allowzero", 0):
        shape = [a.shape[i] if n == 0 else n for i, n in enumerate(shape)]
    return [a.reshape(shape)]


def _flatten(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    a, cut = inputs[0], integer(node, "axis", 1)
    cut = cut if cut >= 0 else cut + a.ndim
    return [a.reshape(math.prod(a.shape[:cut]), math.prod(a.shape[cut:]))]


def slices(node: ir.Node, inputs: Sequence[Any], rank: int) -> dict[int, slice]:
    """Return what a Slice takes of each axis that it cuts.

    Raises:
        ValueError: Where it starts or ends is not known.
    """
    starts, ends = integers(node, "starts", inputs, 1), integers(node, "ends", inputs, 2)
    axes, steps = integers(node, "axes", inputs, 3), integers(node, "steps", inputs, 4)
    if starts is None or ends is None:
        raise ValueError("Slice needs starts and ends")
    axes = list(range(len(starts))) if axes is None else axes
    found = {}
    for i, start, end, step in zip(axes, starts, ends, steps or [1] * len(axes), strict=True):
        # Counting down, an end before the first entry means "to the very first".
        stop = None if step < 0 and end < -(2**31) else end
        found[i % rank] = slice(start, stop, step)
    return found


def _slice(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    a = inputs[0]
    cuts = slices(node, inputs, a.ndim)
    for i, cut in list(cuts.items()):
        if cut.step < 0:  # a start before the first entry is the first
            before = cut.stop is not None and cut.stop < -a.shape[i]
            cuts[i] = slice(max(cut.start, -a.shape[i]), None if before else cut.stop, cut.step)
    return [a[tuple(cuts.get(i, slice(None)) for i in range(a.ndim))]]


def _gather(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    a = inputs[0]
    taken = np.take(a, inputs[1].astype(np.int64), axis=integer(node, "axis", 0))
    return [np.asarray(taken, dtype=a.dtype)]


def _split(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    a, along = inputs[0], integer(node, "axis", 0)
    sizes = integers(node, "split", inputs, 1)
    if sizes is None:
        parts = len(node.outputs)
        each = math.ceil(a.shape[along] / parts)
        sizes = [each] * (parts - 1) + [a.shape[along] - each * (parts - 1)]
    if sum(sizes) != a.shape[along] or min(sizes) < 0:
        return ()
    return list(np.split(a, np.cumsum(sizes)[:-1], axis=along))


def _expand(_: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    a, shape = inputs
    target = np.broadcast_shapes(a.shape, tuple(int(n) for n in shape))
    return [np.broadcast_to(a, target)]


def _filled(node: ir.Node) -> Array:
    value = node.attributes.get("value")
    if value is None:
        return np.zeros((), np.float32)
    return array(value.as_tensor(), f"the fill of {node.outputs[0].name!r}").reshape(())


def _constant_of_shape(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    return [np.broadcast_to(_filled(node), tuple(int(n) for n in inputs[0]))]


def _tile(_: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    return [np.tile(inputs[0], tuple(int(n) for n in inputs[1]))]


def _concat(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    return [np.concatenate(inputs, axis=integer(node, "axis", 0))]


def _dequantize(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    x, scale, zero = (*inputs, None)[:3]
    if integer(node, "block_size", 0):
        return ()
    if scale.ndim == 1 and scale.size > 1:
        shape = [1] * x.ndim
        shape[integer(node, "axis", 1)] = scale.size
        scale = scale.reshape(shape)
        zero = None if zero is None else zero.reshape(shape)
    shifted = x.astype(np.int32) - (0 if zero is None else zero.astype(np.int32))
    return [(shifted * scale).astype(scale.dtype)]


_ELEMENTWISE: dict[str, Rule] = {
    "Identity": lambda _, inputs: [inputs[0]],
    "Cast": _cast,
    "Neg": lambda _, inputs: [-inputs[0]],
    "Add": _arithmetic(np.add, _plus),
    "Sub": _arithmetic(np.subtract, _minus),
    "Mul": _arithmetic(np.multiply, _times),
    "Div": _arithmetic(_divide, _over),
    "Equal": _arithmetic(np.equal, _equal),
    "Where": _where,
}

_MOVES: dict[str, Rule] = {
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Slice": _slice,
    "Gather": _gather,
    "Split": _split,
    "Concat": _concat,
}

RULES: dict[str, Rule] = {
    **_ELEMENTWISE,
    **_MOVES,
    "Constant": _constant,
    "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
    "Tile": _tile,
    "DequantizeLinear": _dequantize,
}

MOVES = frozenset(_MOVES) | {"Identity", "Cast", "Expand", "Dropout"}
"""Operators whose output holds entries of their input, moved or repeated."""


def move(node: ir.Node, inputs: Sequence[Array | None]) -> Sequence[Array]:
    """Apply one of ``MOVES`` to arrays; nothing where its settings are not known."""
    try:
        if node.op_type in {"Identity", "Cast", "Dropout"}:
            return [array_] if (array_ := inputs[0]) is not None else ()
        if _result_elements(node, inputs) > MAX_ELEMENTS:
            return ()
        return RULES[node.op_type](node, inputs)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError):
        return ()


def _partly(node: ir.Node, inputs: Sequence[Content | None]) -> Spread | None:
    """Return what survives when an input is unknown: a shape that only the run decides."""
    if node.op_type == "ConstantOfShape":
        return Spread(_filled(node))
    if node.op_type == "Expand" and inputs[0] is not None:
        known = inputs[0]
        return Spread(known.core if isinstance(known, Spread) else known)
    uniform = _uniform(inputs[0]) if inputs else None
    if node.op_type in {"Reshape", "Slice", "Gather", "Tile"} and uniform is not None:
        return Spread(uniform)
    return None


def _symbolic_shape(node: ir.Node, inputs: Sequence[Content | None]) -> bool:
    """Whether the result's own shape depends on sizes that only the run decides."""
    if node.op_type not in {"Expand", "ConstantOfShape", "Reshape", "Tile"}:
        return False
    last = inputs[-1]
    return isinstance(last, np.ndarray) and is_symbolic(last)


def _uniform(known: Content | None) -> Array | None:
    """Return the one number that every entry equals, as a scalar."""
    core = known.core if isinstance(known, Spread) else known
    if core is None or is_symbolic(core) or core.size == 0:
        return None
    first = core.reshape(-1)[0]
    return np.asarray(first) if core.size == 1 or bool((core == first).all()) else None


def _spread(node: ir.Node, inputs: Sequence[Content | None], rule: Rule) -> Sequence[Content]:
    """Evaluate a node on the cores of broadcast values."""
    op, first = node.op_type, inputs[0]
    if op == "ConstantOfShape":
        shape = inputs[0]
        return [Spread(_filled(node), len(shape) if isinstance(shape, np.ndarray) else None)]
    if op == "Expand":
        shape = inputs[1]
        core = first.core if isinstance(first, Spread) else first
        rank = first.rank if isinstance(first, Spread) else None if core is None else core.ndim
        if core is None or not isinstance(shape, np.ndarray) or rank is None:
            return [] if core is None else [Spread(core)]
        return [Spread(core, max(rank, shape.size))]
    cores = [known.core if isinstance(known, Spread) else known for known in inputs]
    if op in _ELEMENTWISE:
        ranks = [k.rank if isinstance(k, Spread) else k.ndim for k in inputs if k is not None]
        rank = None if None in ranks else max(r for r in ranks if r is not None)
        return [Spread(core, rank) for core in rule(node, cores)]
    uniform = [_uniform(known) for known in (inputs if op == "Concat" else [first])]
    if all(u is not None and u == uniform[0] for u in uniform) and uniform[0] is not None:
        return [Spread(uniform[0])] * len(node.outputs)
    aligned = first.aligned() if isinstance(first, Spread) else None
    if aligned is None or op not in {
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "Slice",
        "Gather",
        "Split",
    }:
        return []
    return [Spread(core, core.ndim) for core in _moved(node, aligned, cores, rule)]


def _moved(
    node: ir.Node, core: Array, inputs: Sequence[Array | None], rule: Rule
) -> Sequence[Array]:
    """Move the axes of a core; along an axis of length 1 every entry is the same."""
    if node.op_type == "Slice":
        cuts = slices(node, inputs, core.ndim)
        kept = {i: cut for i, cut in cuts.items() if core.shape[i] != 1}
        return [core[tuple(kept.get(i, slice(None)) for i in range(core.ndim))]]
    along = integer(node, "axis", 0)
    if node.op_type == "Split" and core.shape[along] == 1:
        return [core] * len(node.outputs)
    if node.op_type == "Gather" and core.shape[along] == 1:
        index = inputs[1]
        if index is None or index.size != 1:
            return []
        return [np.take(core, np.zeros(index.shape, np.int64), axis=along)]
    return rule(node, [core, *inputs[1:]])


class Folding:
    """Evaluates one node after another until ``MAX_ELEMENTS`` have been computed."""

    def __init__(self) -> None:
        """Start with the whole limit."""
        self._elements = 0

    def evaluate(self, node: ir.Node, inputs: Sequence[Content | None]) -> Sequence[Content]:
        """Return what a node of ``RULES`` gives for what is known of its inputs.

        Raises:
            ValueError, TypeError, IndexError, KeyError, OverflowError, ZeroDivisionError:
                The node breaks its operator's rules.
        """
        rule = RULES[node.op_type]
        if any(k is None and v is not None for k, v in zip(inputs, node.inputs, strict=True)):
            return [s] if (s := _partly(node, inputs)) is not None else ()
        if any(isinstance(known, Spread) for known in inputs) or _symbolic_shape(node, inputs):
            return _spread(node, inputs, rule)
        arrays = [known for known in inputs if not isinstance(known, Spread)]
        elements = _result_elements(node, arrays)
        if self._elements + elements > MAX_ELEMENTS:
            return ()
        self._elements += elements
        return rule(node, arrays)
