"""Steps that were written out one after another, laid side by side.

A *row* holds the values that play one part in all steps, in the order of the steps. Rows
are followed backwards from a product with shared weights: to constants that all steps
share, to entries of one sequence, to what every step reads, and to what the step before
handed on, which is state. Which of these a value is follows from which states it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from rnnaudit.loaders.onnx.bodies import MAX_OPERATIONS, STANDARD, captured
from rnnaudit.loaders.onnx.contents import MOVES, integer, integers
from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.loaders.onnx.shapes import shape_of
from rnnaudit.loaders.onnx.values import Knowledge

MAX_ROWS = 2_000_000
"""Values that are compared, over all rows."""

_FAR = 2**31 - 2
"""An end of a Slice that means the whole axis, where its length is not known."""

PRODUCTS = frozenset({"MatMul", "Gemm"})

_AFFINE = PRODUCTS | {"Add", "Sub", "Mul", "Div", "Neg"}

Row = tuple[ir.Value, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Products with one matrix, each computed from the one before: one in every step."""

    name: str
    products: tuple[ir.Node, ...]
    operand: int
    """Which input of the products is not the matrix."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What each step reads one entry of: ``row`` holds them, ``whole`` is the sequence."""

    row: Row
    whole: ir.Value
    axis: int
    first: int
    reverse: bool
    kept: tuple[int, ...]
    """The axes that stand in an entry where that of time stood."""


@dataclass(slots=True, eq=False)
class Aligned:
    """What steps are made of: the states that they hand on, first that which is multiplied.

    Rows begin with step ``start``, 0 or 1, where they have a value for it.
    """

    start: int
    states: list[Row] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    held: list[Row] = field(default_factory=list)
    nodes: set[ir.Node] = field(default_factory=set)


def depth(
    graph: ir.Graph, marks: dict[ir.Node, int], given: dict[ir.Value, int]
) -> dict[ir.Value, int]:
    """Say of each value the last of the marked nodes or values that it needs."""
    found: dict[ir.Value, int] = {}
    for node in graph:
        last = marks.get(node, -1)
        for value in captured(node):
            last = max(last, found.get(value, -1), given.get(value, -1))
        if last >= 0:
            found.update(dict.fromkeys(node.outputs, last))
    return found


def is_chain(graph: ir.Graph, products: Sequence[ir.Node]) -> bool:
    """Whether each product is computed from the one before it."""
    found: dict[ir.Value, int] = {}
    marks = {node: i for i, node in enumerate(products)}
    for node in graph:
        last = max((found.get(value, -1) for value in captured(node)), default=-1)
        if node in marks:
            if last != marks[node] - 1:
                return False
            last += 1
        if last >= 0:
            found.update(dict.fromkeys(node.outputs, last))
    return True


def anchors(graph: ir.Graph, chain: Chain, known: Knowledge) -> Row:
    """Return what each step's product needs of the step before it, behind what moves or scales it.

    Raises:
        Refused: No one value is that.
    """
    needs = depth(graph, {node: i for i, node in enumerate(chain.products)}, {})
    row = _inputs(chain.products, chain.operand)
    for _ in range(MAX_OPERATIONS):
        nodes = [value.producer() for value in row]
        later = [node for node in nodes[1:] if node is not None]
        if len(later) < len(nodes) - 1 or not all(
            _carries(n, known) and n.op_type not in PRODUCTS for n in later
        ):
            break
        if any(_differ(a, b) for a, b in pairwise(later)):
            break
        moved = [
            i
            for i, each in enumerate(zip(*(node.inputs for node in later), strict=True))
            if all(v is not None and needs.get(v, -1) == k for k, v in enumerate(each))
        ]
        if len(moved) != 1:
            break
        before = nodes[0]
        alike = before is not None and not _differ(before, later[0])
        first = before.inputs[moved[0]] if before is not None and alike else row[0]
        row = (first or row[0], *_inputs(later, moved[0]))
    if any(needs.get(value, -1) != k for k, value in enumerate(row[1:])):
        raise Refused("its steps are not computed from one another in one way")
    return row


def _inputs(nodes: Sequence[ir.Node], index: int) -> Row:
    found = [node.inputs[index] for node in nodes]
    if any(value is None for value in found):
        raise Refused("a product lacks an input")
    return tuple(value for value in found if value is not None)


def align(graph: ir.Graph, chain: Chain, anchor: Row, known: Knowledge) -> Aligned:
    """Compare all steps; the first may be written otherwise, for it starts from no other.

    Raises:
        Refused: The steps differ.
    """
    level = depth(graph, {}, {value: i for i, value in enumerate(anchor)})
    try:
        return _Alignment(chain, anchor, known, level, 0).found()
    except Refused:
        return _Alignment(chain, anchor, known, level, 1).found()


class _Alignment:
    """The rows of one chain of steps, from step ``start`` on."""

    def __init__(
        self, chain: Chain, anchor: Row, known: Knowledge, level: dict[ir.Value, int], start: int
    ) -> None:
        self.chain, self.known, self.level, self.start = chain, known, level, start
        self.anchor = anchor[start:]
        self.aligned = Aligned(start)
        self._inner: dict[ir.Value, Row] = {}  # by their value in step 1
        self._ends: dict[ir.Value, Row] = {}
        self._waiting: list[Row] = []
        self._cost = 0

    def found(self) -> Aligned:
        """Follow every row, until what each step hands on is known and how it is made."""
        self._waiting.append(tuple(n.outputs[0] for n in self.chain.products[self.start :]))
        while self._waiting:
            self._follow(self._waiting.pop())
        states = self.aligned.states
        first = [row for row in states if row[self._one] is self.anchor[self._one]]
        self.aligned.states = [*first, *(row for row in states if row not in first)]
        offsets = {(entry.first, entry.reverse) for entry in self.aligned.entries}
        if not offsets:
            raise Refused("its steps read no sequence")
        if len(offsets) > 1:
            raise Refused("its steps read entries of different times")
        return self.aligned

    @property
    def _one(self) -> int:
        """Where the value of step 1 stands in a row."""
        return 1 - self.start

    def _follow(self, row: Row) -> None:
        if len(row) < self._one + 2:
            raise Refused("its steps are too few to be told from one another")
        key = row[self._one]
        before = self._inner.get(key, self._ends.get(key))
        if before is not None:
            if any(not self._meet(a, b) for a, b in zip(row, before, strict=False)):
                raise Refused(f"its steps differ in how {key.name!r} is used")
            return
        self._cost += len(row)
        if self._cost > MAX_ROWS:
            raise Refused(f"its steps hold more than {MAX_ROWS:,} values")
        if self._constant(row) or self._kept(row) or self._state(row) or self._entry(row):
            self._ends[key] = row
            return
        nodes = self._alike(row)
        self._inner[key] = row
        self.aligned.nodes.update(nodes)
        for i, value in enumerate(nodes[0].inputs):
            if value is not None:
                self._waiting.append(_inputs(nodes, i))

    def _meet(self, a: ir.Value, b: ir.Value) -> bool:
        """Whether two values are one, or one constant that is stored twice."""
        one, other = self.known.constant(a), self.known.constant(b)
        return a is b or (one is not None and other is not None and np.array_equal(one, other))

    # --- where a row ends -------------------------------------------------------------------

    def _constant(self, row: Row) -> bool:
        if all(value is row[0] for value in row):
            return self.known.constant(row[0]) is not None
        stored = [self.known.constant(value) for value in row]
        if any(array is None for array in stored[self._one :]):
            return False
        same = all(
            a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a, b)
            for a, b in pairwise(stored)
        )
        if not same:
            raise Refused(f"its steps differ in the constant {row[self._one].name!r}")
        return True

    def _kept(self, row: Row) -> bool:
        """Whether every step reads the same value."""
        if any(value is not row[0] for value in row):
            return False
        self.aligned.held.append(row)
        return True

    def _state(self, row: Row) -> bool:
        """Whether the step before handed these values on: then what it hands on next is too."""
        levels = [self.level.get(value, -1) for value in row[self._one :]]
        if levels == [*range(len(levels))]:  # what step k reads needs the state before k − 1
            if row[self._one] is not self.anchor[self._one] and self._moved(row):
                return False
            self._waiting.append(row[1:])
        elif all(level == -1 for level in levels):
            after = self._inner.get(row[self._one + 1])
            if after is None or any(a is not b for a, b in zip(row[1:], after, strict=False)):
                return False
        elif levels == [*range(1, len(levels) + 1)]:
            return False
        else:
            raise Refused(f"its steps differ in which states {row[self._one].name!r} needs")
        self.aligned.states.append(row)
        return True

    def _moved(self, row: Row) -> bool:
        """Whether values are moved or scaled from others, which the step before handed on."""
        nodes = [value.producer() for value in row[self._one :]]
        return all(node is not None and _carries(node, self.known) for node in nodes) and all(
            not _differ(a, b) for a, b in pairwise(nodes) if a is not None and b is not None
        )

    def _entry(self, row: Row) -> bool:
        """Whether values are entries of one sequence, each next to the one before."""
        if self.level.get(row[self._one], -1) >= 0:
            return False
        cuts = [_cut(value, self.known) for value in row]
        first = cuts[0]
        if first is None:
            return False
        places: list[int] = []
        for cut in cuts:
            if cut is None or cut.whole is not first.whole or cut.axis != first.axis:
                return False
            places.append(cut.place)
        paces = {b - a for a, b in pairwise(places)}
        if paces == {0}:
            return False
        around = min(places) < 0 <= max(places)  # from the last entry on to the first
        if len(paces) > 1 or not paces <= {1, -1} or around:
            raise Refused(f"it reads {first.whole.name!r} in an order that is not followed")
        (pace,) = paces
        start = places[0] - pace * self.start
        self.aligned.entries.append(
            Entry(row, first.whole, first.axis, start, pace < 0, first.kept)
        )
        return True

    def _alike(self, row: Row) -> list[ir.Node]:
        """Return the nodes that make values, which must be alike in all steps."""
        for a, b in pairwise(row):
            one, other = a.producer(), b.producer()
            if (
                one is None
                or other is None
                or _differ(one, other)
                or [*one.outputs].index(a) != [*other.outputs].index(b)
            ):
                raise Refused(f"its steps differ in how {a.name!r} is made")
        if len(self.aligned.nodes) > MAX_OPERATIONS * len(row):
            raise Refused(f"the step has more than {MAX_OPERATIONS} operators")
        return [node for value in row if (node := value.producer()) is not None]


def _carries(node: ir.Node, known: Knowledge) -> bool:
    """Whether a node moves a value, or multiplies it by constants or adds them."""
    varying = [v for v in node.inputs if v is not None and known.constant(v) is None]
    return node.op_type in MOVES or (node.op_type in _AFFINE and len(varying) == 1)


def _differ(one: ir.Node, other: ir.Node) -> bool:
    """Whether two nodes are other operators, or the same with other settings."""
    return (
        (one.op_type, one.domain) != (other.op_type, other.domain)
        or [v is None for v in one.inputs] != [v is None for v in other.inputs]
        or len(one.outputs) != len(other.outputs)
        or {*one.attributes} != {*other.attributes}
        or any(not _same(a, other.attributes[name]) for name, a in one.attributes.items())
    )


def _same(a: ir.Attr, b: ir.Attr) -> bool:
    if a.type != b.type:
        return False
    if a.type == ir.AttributeType.TENSOR:
        left, right = a.as_tensor(), b.as_tensor()
        return left.dtype == right.dtype and np.array_equal(left.numpy(), right.numpy())
    return bool(a.value == b.value)


# --- entries of a sequence --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    whole: ir.Value
    axis: int
    place: int
    kept: tuple[int, ...]


def _cut(value: ir.Value, known: Knowledge) -> _Cut | None:
    """Return which one entry of another value this one is; None where it is none."""
    node = value.producer()
    if node is None or node.domain not in STANDARD or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type == "Gather":
        index = known.constant(node.inputs[1])
        if index is None or index.size != 1:
            return None
        return _placed(
            known, node.inputs[0], integer(node, "axis", 0), int(index.item()), index.shape
        )
    try:
        if node.op_type == "Slice":
            return _sliced(node, known)
        if node.op_type == "Split":
            return _split(value, node, known)
    except ValueError:  # where it is cut is not known
        return None
    return _taken(node, known) if node.op_type == "SequenceAt" else None


def _split(value: ir.Value, node: ir.Node, known: Knowledge) -> _Cut | None:
    """Return the entry that one output of a Split is, where each is one."""
    axis, whole = integer(node, "axis", 0), node.inputs[0]
    sizes = integers(node, "split", [known.constant(v) for v in node.inputs], 1)
    count = len(node.outputs)
    if sizes is None and whole is not None and _length(known, whole, axis) == count:
        sizes = [1] * count
    if sizes is None or whole is None or any(size != 1 for size in sizes):
        return None
    return _placed(known, whole, axis, [*node.outputs].index(value), (1,))


def _placed(
    known: Knowledge, whole: ir.Value, axis: int, place: int, kept: tuple[int, ...]
) -> _Cut:
    """Count axes and entries from the front where it is known how many there are."""
    sizes = shape_of(known, whole)
    axis = axis % len(sizes) if sizes else axis
    length = _length(known, whole, axis)
    return _Cut(whole, axis, place % length if length else place, kept)


def _length(known: Knowledge, whole: ir.Value, axis: int) -> int | None:
    sizes = shape_of(known, whole)
    return sizes[axis] if sizes and -len(sizes) <= axis < len(sizes) else None


def _sliced(node: ir.Node, known: Knowledge) -> _Cut | None:
    """Return the one entry that a Slice cuts out, the other axes left whole."""
    whole, given = node.inputs[0], [known.constant(v) for v in node.inputs]
    starts, ends, axes, steps = (
        integers(node, name, given, i + 1)
        for i, name in enumerate(("starts", "ends", "axes", "steps"))
    )
    if starts is None or ends is None or whole is None:
        return None
    cut: list[tuple[int, int]] = []
    single: list[tuple[int, int]] = []
    axes, steps = axes or [*range(len(starts))], steps or [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        length = _length(known, whole, axis)
        taken = _within(start, end, length) if step == 1 else None
        if taken is None:
            return None
        place, count = taken
        if count == length or (count is None and length is None):
            single += [(axis, place)] if length == 1 else []
        elif count == 1:
            cut.append((axis, place))
        else:
            return None
    chosen = cut or single
    return _placed(known, whole, *chosen[0], (1,)) if len(chosen) == 1 else None


def _within(start: int, end: int, length: int | None) -> tuple[int, int | None] | None:
    """Return the first entry that a Slice takes and how many; None for all of an unknown length.

    Nothing where neither one entry nor all are known to be taken.
    """
    if length is not None:
        low, high, _ = slice(start, end).indices(length)
        return low, max(0, high - low)
    if start == 0 and end >= _FAR:
        return 0, None
    one = end == start + 1 != 0 or (start == -1 and end >= _FAR)
    return (start, 1) if one else None


def _taken(node: ir.Node, known: Knowledge) -> _Cut | None:
    """Return the entry that is taken from a list of a sequence's entries."""
    listed, index = node.inputs[0], known.constant(node.inputs[1])
    split = None if listed is None else listed.producer()
    if split is None or split.op_type != "SplitToSequence" or index is None or index.size != 1:
        return None
    whole = split.inputs[0]
    size = known.constant(split.inputs[1]) if len(split.inputs) > 1 else None
    plain = len(split.inputs) < 2 or split.inputs[1] is None
    if whole is None or not (plain or (size is not None and size.ndim == 0 and size == 1)):
        return None
    kept = (1,) if not plain or integer(split, "keepdims", 1) else ()
    return _placed(known, whole, integer(split, "axis", 0), int(index.item()), kept)
