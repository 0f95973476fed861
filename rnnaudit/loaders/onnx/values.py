"""What is known of a graph's values without running it: constants, sizes, axes.

One forward pass keeps three facts. *Contents*: an array, whose entries may be symbolic
sizes (``Size``), or a ``Spread``, a known core broadcast to a shape that only the input
decides (the zeros of a dynamic batch). *Layouts*: which axes of an earlier value make up
each axis of a later one, as products of named atoms in row-major order, so that squeezes,
transposes and reshapes between two recurrent nodes are proved to keep time, batch and
features apart. Only the operators listed here are evaluated, each within a size limit.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from rnnaudit.loaders.onnx.reading import Array, array

MAX_ELEMENTS = 2**27
"""Elements of all constants that are computed while a file is read."""

_fresh = itertools.count()


@dataclass(frozen=True, slots=True)
class Size:
    """factor × the product of named axes; names that begin with ``?`` stand for any integer."""

    factor: int
    axes: tuple[str, ...]

    @staticmethod
    def unknown() -> Size:
        """Return a number of which nothing is known."""
        return Size(1, (f"?{next(_fresh)}",))

    @property
    def is_axis(self) -> bool:
        """Whether this is the length of something, so not negative."""
        return self.factor >= 0 and not any(name.startswith("?") for name in self.axes)


@dataclass(frozen=True, slots=True)
class Atom:
    """One axis that is never split; ``size`` None where the input decides it."""

    name: str
    size: int | None = None


Axis = tuple[Atom, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How a value is a rearrangement of ``origin``: the atoms of each axis."""

    origin: ir.Value
    axes: tuple[Axis, ...]

    def sizes(self) -> list[Size | int]:
        """Return the length of each axis."""
        return [length(axis) for axis in self.axes]


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


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """``source``, rearranged to have ``features`` last, times A plus b; ``units`` is its axis."""

    source: ir.Value
    features: Axis
    units: Axis
    name: str
    A: Array
    b: Array


Content = Array | Spread


def axis(*atoms: Atom) -> Axis:
    """Make an axis of atoms; those of length 1 do not count."""
    return tuple(atom for atom in atoms if atom.size != 1)


def length(axis_: Axis) -> Size | int:
    """Return an axis's length, a number where every atom has one."""
    factor = math.prod(atom.size for atom in axis_ if atom.size is not None)
    names = tuple(sorted(atom.name for atom in axis_ if atom.size is None))
    return Size(factor, names) if names else factor


class Knowledge:
    """The facts of one file, gathered node by node in graph order."""

    def __init__(self) -> None:
        """Know nothing."""
        self._contents: dict[ir.Value, Content | None] = {}
        self._layouts: dict[ir.Value, Layout | None] = {}
        self.linear: dict[ir.Value, Linear] = {}
        self.recurrent: set[ir.Value] = set()
        self._elements = 0

    def content(self, value: ir.Value | None) -> Content | None:
        """Return what is known of a value's entries."""
        if value is None:
            return None
        if value not in self._contents:
            stored = value.const_value if value.is_initializer() else None
            if stored is None or stored.dtype == ir.DataType.STRING:
                return None
            self._contents[value] = array(stored, f"initializer {value.name!r}")
        return self._contents[value]

    def constant(self, value: ir.Value | None) -> Array | None:
        """Return a value's entries where every one is a known number."""
        known = self.content(value)
        return known if isinstance(known, np.ndarray) and not _symbolic(known) else None

    def layout(self, value: ir.Value | None, rank: int | None = None) -> Layout | None:
        """Return a value's axes; those of an untracked value of known rank stand for themselves."""
        if value is None:
            return None
        known = self._layouts.get(value)
        if known is None:
            shape = [None] * (rank or 0) if value.shape is None else [*value.shape]
            if value.shape is None and rank is None:
                return None
            atoms = (
                Atom(f"{value.name}:{i}", d if isinstance(d, int) else None)
                for i, d in enumerate(shape)
            )
            known = Layout(value, tuple(axis(atom) for atom in atoms))
            self._layouts[value] = known
        return known if rank is None or len(known.axes) == rank else None

    def track(self, value: ir.Value, layout: Layout) -> None:
        """Keep a layout that follows from what an operator does."""
        self._layouts[value] = layout

    def visit(self, node: ir.Node) -> None:
        """Learn what a node's outputs are; nothing from a node that breaks its operator's rules."""
        if node.domain not in {"", "ai.onnx"} or not node.outputs:
            return
        try:
            with np.errstate(all="ignore"):
                self._learn(node)
        except (ValueError, TypeError, IndexError, KeyError, OverflowError, ZeroDivisionError):
            return

    def _learn(self, node: ir.Node) -> None:
        for value, known in zip(node.outputs, self._evaluate(node), strict=False):
            self._contents[value] = known
        if node.op_type in _LAYOUTS:
            before = self.layout(node.inputs[0])
            axes = None if before is None else _LAYOUTS[node.op_type](self, node, before)
            if before is not None and axes is not None:
                self.track(node.outputs[0], Layout(before.origin, axes))
        elif node.op_type in _LINEAR:
            _LINEAR[node.op_type](self, node)

    def _evaluate(self, node: ir.Node) -> Sequence[Content]:
        if node.op_type == "Shape":
            return self._shape(node)
        rule = _RULES.get(node.op_type)
        if rule is None:
            return ()
        inputs = [self.content(value) for value in node.inputs]
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

    def _shape(self, node: ir.Node) -> Sequence[Array]:
        known = self.content(node.inputs[0])
        layout = None if known is not None else self.layout(node.inputs[0])
        if isinstance(known, np.ndarray):
            sizes: list[Size | int] = list(known.shape)
        elif layout is not None:
            sizes = layout.sizes()
        else:
            return ()
        start, end = _int(node, "start", 0), _int(node, "end", len(sizes))
        return [_integers(sizes[start:end])]


def _integers(entries: Sequence[Any]) -> Array:
    if all(isinstance(e, int) for e in entries):
        return np.array(entries, dtype=np.int64)
    symbolic = np.empty(len(entries), dtype=object)
    symbolic[:] = entries
    return symbolic


def _int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else int(attribute.as_int())


def _ints(node: ir.Node, name: str, inputs: Sequence[Array | None], index: int) -> list[int] | None:
    """Return a list that is an attribute in older opsets and an input in newer ones."""
    attribute = node.attributes.get(name)
    if attribute is not None:
        return [int(i) for i in attribute.as_ints()]
    stored = inputs[index] if index < len(inputs) else None
    return None if stored is None else [int(i) for i in np.atleast_1d(stored)]


# --- contents -------------------------------------------------------------------------------

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
        rows = max(1, shapes[0][_int(node, "axis", 0)])
        return math.prod(shapes[0]) // rows * math.prod(shapes[1])
    if node.op_type in {"Add", "Sub", "Mul", "Div", "Where", "Equal"}:
        return math.prod(np.broadcast_shapes(*shapes))
    return largest


def _arithmetic(exact: Callable[[Any, Any], Any], symbolic: Callable[[Any, Any], Any]) -> Rule:
    def rule(_: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
        a, b = inputs
        if _symbolic(a, b):
            return [np.asarray(np.frompyfunc(symbolic, 2, 1)(a, b), dtype=object)]
        return [np.asarray(exact(a, b))]

    return rule


def _symbolic(*arrays: Array) -> bool:
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
    if _symbolic(*inputs):
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
    if _symbolic(a):
        return [a]
    return [a.astype(ir.DataType(node.attributes["to"].as_int()).numpy())]


def _axes_of(a: Array, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(i % a.ndim for i in axes)


def _squeeze(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    axes = _ints(node, "axes", inputs, 1)
    a = inputs[0]
    return [a.squeeze(None if axes is None else _axes_of(a, axes))]


def _unsqueeze(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    axes = _ints(node, "axes", inputs, 1)
    return [np.expand_dims(inputs[0], tuple(axes or ()))]


def _transpose(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    perm = node.attributes.get("perm")
    return [inputs[0].transpose(None if perm is None else [int(i) for i in perm.as_ints()])]


def _reshape(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    a, shape = inputs[0], _ints(node, "shape", inputs, 1)
    if shape is None:
        return ()
    if not _int(node, "allowzero", 0):
        shape = [a.shape[i] if n == 0 else n for i, n in enumerate(shape)]
    return [a.reshape(shape)]


def _flatten(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    a, cut = inputs[0], _int(node, "axis", 1)
    cut = cut if cut >= 0 else cut + a.ndim
    return [a.reshape(math.prod(a.shape[:cut]), math.prod(a.shape[cut:]))]


def _slices(node: ir.Node, inputs: Sequence[Any], rank: int) -> dict[int, slice]:
    starts, ends = _ints(node, "starts", inputs, 1), _ints(node, "ends", inputs, 2)
    axes, steps = _ints(node, "axes", inputs, 3), _ints(node, "steps", inputs, 4)
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
    cuts = _slices(node, inputs, a.ndim)
    for i, cut in list(cuts.items()):
        if cut.step < 0 and cut.stop is not None and cut.stop < -a.shape[i]:
            cuts[i] = slice(cut.start, None, cut.step)
    return [a[tuple(cuts.get(i, slice(None)) for i in range(a.ndim))]]


def _gather(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    a = inputs[0]
    taken = np.take(a, inputs[1].astype(np.int64), axis=_int(node, "axis", 0))
    return [np.asarray(taken, dtype=a.dtype)]


def _split(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    a, along = inputs[0], _int(node, "axis", 0)
    sizes = _ints(node, "split", inputs, 1)
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
    return [np.concatenate(inputs, axis=_int(node, "axis", 0))]


def _dequantize(node: ir.Node, inputs: Sequence[Any]) -> Sequence[Array]:
    x, scale, zero = (*inputs, None)[:3]
    if _int(node, "block_size", 0):
        return ()
    if scale.ndim == 1 and scale.size > 1:
        shape = [1] * x.ndim
        shape[_int(node, "axis", 1)] = scale.size
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

_RULES: dict[str, Rule] = {
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
        return _RULES[node.op_type](node, inputs)
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
    return isinstance(last, np.ndarray) and _symbolic(last)


def _uniform(known: Content | None) -> Array | None:
    """Return the one number that every entry equals, as a scalar."""
    core = known.core if isinstance(known, Spread) else known
    if core is None or _symbolic(core) or core.size == 0:
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
        cuts = _slices(node, inputs, core.ndim)
        kept = {i: cut for i, cut in cuts.items() if core.shape[i] != 1}
        return [core[tuple(kept.get(i, slice(None)) for i in range(core.ndim))]]
    along = _int(node, "axis", 0)
    if node.op_type == "Split" and core.shape[along] == 1:
        return [core] * len(node.outputs)
    if node.op_type == "Gather" and core.shape[along] == 1:
        index = inputs[1]
        if index is None or index.size != 1:
            return []
        return [np.take(core, np.zeros(index.shape, np.int64), axis=along)]
    return rule(node, [core, *inputs[1:]])


# --- layouts --------------------------------------------------------------------------------


def _keep_axes(_: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    return before.axes


def _dropout_axes(known: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    """Dropout passes its input on, unless it was exported in training mode."""
    training = node.inputs[2] if len(node.inputs) > 2 else None
    if training is not None:
        mode = known.constant(training)
        if mode is None or bool(mode.any()):
            return None
    return before.axes


def _squeeze_axes(known: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    given = [known.constant(value) for value in node.inputs]
    axes = _ints(node, "axes", given, 1)
    rank = len(before.axes)
    if axes is None:
        if len(node.inputs) > 1 or any(not isinstance(n, int) for n in before.sizes()):
            return None  # which axes have length 1 is only known when it runs
        axes = [i for i, n in enumerate(before.sizes()) if n == 1]
    dropped = {i % rank for i in axes}
    if any(before.axes[i] for i in dropped):
        return None
    return tuple(a for i, a in enumerate(before.axes) if i not in dropped)


def _unsqueeze_axes(known: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    axes = _ints(node, "axes", [known.constant(value) for value in node.inputs], 1)
    if axes is None:
        return None
    rank = len(before.axes) + len(axes)
    new = {i % rank for i in axes}
    rest = iter(before.axes)
    return tuple(() if i in new else next(rest) for i in range(rank))


def _transpose_axes(_: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    perm = node.attributes.get("perm")
    order = [int(i) for i in perm.as_ints()] if perm else list(range(len(before.axes)))[::-1]
    if sorted(order) != list(range(len(before.axes))):
        return None
    return tuple(before.axes[i] for i in order)


def _flatten_axes(_: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    cut = _int(node, "axis", 1) % (len(before.axes) + 1)
    sides = before.axes[:cut], before.axes[cut:]
    return tuple(tuple(itertools.chain.from_iterable(side)) for side in sides)


def _reshape_axes(known: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    """Deal the atoms out again in row-major order, so that every axis gets its length."""
    target = known.content(node.inputs[1]) if len(node.inputs) > 1 else None
    if not isinstance(target, np.ndarray) or target.ndim != 1:
        return None
    wanted: list[Size | int | None] = []
    for i, entry in enumerate(target.tolist()):
        if entry == 0 and not _int(node, "allowzero", 0):
            if i >= len(before.axes):
                return None
            wanted.append(length(before.axes[i]))
        elif entry == -1 or (isinstance(entry, Size) and not entry.is_axis):
            wanted.append(None)
        else:
            wanted.append(entry)
    if wanted.count(None) > 1:
        return None
    atoms = list(itertools.chain.from_iterable(before.axes))
    cut = wanted.index(None) if None in wanted else len(wanted)
    front = [_take(atoms, size, 0) for size in wanted[:cut]]
    back = [_take(atoms, size, -1) for size in wanted[:cut:-1]][::-1]
    if None in front or None in back:
        return None
    middle = [tuple(atoms)] if cut < len(wanted) else []
    if not middle and atoms:
        return None
    return tuple(a for a in [*front, *middle, *back] if a is not None)


def _take(atoms: list[Atom], size: Size | int | None, end: int) -> Axis | None:
    """Take atoms from one end until their product is ``size``; None where none is."""
    taken: list[Atom] = []
    while size is not None and length(tuple(taken)) != size:
        if not atoms or (isinstance(size, int) and atoms[end].size is None):
            return None
        taken.append(atoms.pop(end))
    return tuple(taken[::-1] if end else taken)


_LAYOUTS: dict[str, Callable[[Knowledge, ir.Node, Layout], tuple[Axis, ...] | None]] = {
    "Identity": _keep_axes,
    "Dropout": _dropout_axes,
    "Squeeze": _squeeze_axes,
    "Unsqueeze": _unsqueeze_axes,
    "Transpose": _transpose_axes,
    "Flatten": _flatten_axes,
    "Reshape": _reshape_axes,
}


# --- linear maps after a recurrence -----------------------------------------------------------


def _matmul(known: Knowledge, node: ir.Node) -> None:
    before = known.layout(node.inputs[0])
    if before is None or before.origin not in known.recurrent or len(before.axes) < 2:
        return
    weight = known.constant(node.inputs[1])
    if weight is None or weight.ndim != 2 or length(before.axes[-1]) != weight.shape[0]:
        return
    _remember(known, node, before, weight.T, np.zeros(weight.shape[1], weight.dtype))


def _gemm(known: Knowledge, node: ir.Node) -> None:
    before = known.layout(node.inputs[0])
    if before is None or before.origin not in known.recurrent or len(before.axes) != 2:
        return
    weight = known.constant(node.inputs[1])
    if weight is None or weight.ndim != 2 or _int(node, "transA", 0):
        return
    A = (weight if _int(node, "transB", 0) else weight.T).astype(np.float64)
    b = np.zeros(A.shape[0])
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        stored = known.constant(node.inputs[2])
        if (
            stored is None
            or stored.size not in {1, A.shape[0]}
            or stored.shape[:-1] not in {(), (1,)}
        ):
            return
        b = b + _scale(node, "beta") * stored.astype(np.float64).reshape(-1)
    if length(before.axes[-1]) == A.shape[1]:
        _remember(known, node, before, _scale(node, "alpha") * A, b)


def _scale(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return 1.0 if attribute is None else float(attribute.as_float())


def _remember(known: Knowledge, node: ir.Node, before: Layout, A: Array, b: Array) -> None:
    out = node.outputs[0]
    unit = Atom(f"{out.name}:units", A.shape[0])
    known.track(out, Layout(out, (*before.axes[:-1], axis(unit))))
    name = node.name or out.name or node.op_type
    known.linear[out] = Linear(before.origin, before.axes[-1], axis(unit), name, A, b)


def _add(known: Knowledge, node: ir.Node) -> None:
    for value, other in (node.inputs, node.inputs[::-1]):
        before = known.layout(value)
        if before is None or before.origin not in known.linear:
            continue
        linear, shift = known.linear[before.origin], known.constant(other)
        if shift is None or not before.axes or before.axes[-1] != linear.units:
            continue
        if math.prod(shift.shape[:-1]) != 1 or shift.ndim > len(before.axes):
            continue
        if shift.size not in {1, linear.A.shape[0]}:
            continue
        b = linear.b.astype(np.float64) + shift.astype(np.float64).reshape(-1)
        out = node.outputs[0]
        known.track(out, Layout(out, before.axes))
        known.linear[out] = dataclasses.replace(linear, b=b)
        return


_LINEAR: dict[str, Callable[[Knowledge, ir.Node], None]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Add": _add,
}
