"""How an index in a loop's body grows from step to step, and how far apart two of them are.

Whole numbers are followed as sums: of counters, of numbers that are the same at every step,
and of a constant. What wraps or rounds on the way, as a narrow type does, is not followed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import onnx_ir as ir

from rnnaudit.loaders.onnx.bodies import STANDARD, resolved
from rnnaudit.loaders.onnx.contents import integer
from rnnaudit.loaders.onnx.values import Knowledge

WIDE = frozenset(
    kind.value
    for kind in (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE)
)
"""Types in which the numbers of steps keep their order."""

DEEPEST = 200
"""Operators that are followed, one behind another."""

_MOVED = frozenset({"Identity", "Squeeze", "Unsqueeze", "Reshape"})

Terms = Mapping[ir.Value | None, int]
"""A sum: how often each value is in it, and under None its constant."""


def same_number(node: ir.Node) -> bool:
    """Whether a node of one input gives the number that it is given."""
    if node.domain not in STANDARD or not node.inputs or node.inputs[0] is None:
        return False
    return node.op_type in _MOVED or (node.op_type == "Cast" and integer(node, "to", 0) in WIDE)


class Indices:
    """Whole numbers in the body of one loop."""

    def __init__(
        self,
        body: ir.Graph,
        known: Knowledge,
        step: ir.Value | None,
        counters: Collection[ir.Value],
        sequels: Mapping[ir.Value, ir.Value],
    ) -> None:
        """Follow what is made in ``body`` of ``counters``.

        Args:
            body: The loop's body.
            known: The constants.
            step: The number of the step, which grows by 1; None where the body is given none.
            counters: All that follows from the number of the step and is carried or given.
            sequels: What becomes of a counter that is carried, by what it was; without those of
                types that wrap.
        """
        self._body, self._known, self._step = body, known, step
        self._counters, self._sequels = counters, sequels
        self._terms: dict[ir.Value, Terms | None] = {}

    def pace(self, counter: ir.Value) -> int | None:
        """Return by how much a counter grows with each step; None where that is unknown."""
        if counter not in self._sequels:
            return 1 if counter is self._step else None
        after = self._sum(self._sequels[counter])
        by = None if after is None else _less(after, {counter: 1})
        return None if by is None or by.keys() - {None} else by.get(None, 0)

    def slope(self, index: ir.Value) -> int | None:
        """Return by how much an index grows with each step; None where that is unknown."""
        found = self._sum(index)
        if found is None:
            return None
        slope = 0
        for value, times in found.items():
            pace = self.pace(value) if value in self._counters and value is not None else 0
            if pace is None:
                return None
            slope += times * pace
        return slope

    def apart(self, first: ir.Value, second: ir.Value) -> int | None:
        """Return how much larger the second index is at every step; None where that is unknown."""
        a, b = self._sum(first), self._sum(second)
        if a is None or b is None:
            return None
        left = _less(b, a)
        return None if left.keys() - {None} else left.get(None, 0)

    def _sum(self, value: ir.Value, depth: int = 0) -> Terms | None:
        value = resolved(value)
        if value not in self._terms:
            self._terms[value] = None  # a graph may bite its tail
            self._terms[value] = self._followed(value, depth)
        return self._terms[value]

    def _followed(self, value: ir.Value, depth: int) -> Terms | None:
        stored = self._known.constant(value)
        if stored is not None:
            whole = stored.size == 1 and stored.dtype.kind in "iu"
            return {None: int(stored.item())} if whole else None
        node = value.producer()
        if value in self._counters or node is None or node.graph is not self._body:
            return {value: 1}
        if depth > DEEPEST:
            return None
        if same_number(node):
            return None if node.inputs[0] is None else self._sum(node.inputs[0], depth + 1)
        if node.domain not in STANDARD or node.op_type not in {"Add", "Sub", "Neg"}:
            return None
        parts = [None if v is None else self._sum(v, depth + 1) for v in node.inputs]
        known = [part for part in parts if part is not None]
        if len(known) != len(parts) or len(parts) != 1 + (node.op_type != "Neg"):
            return None
        if node.op_type == "Add":
            return _less(known[0], _less({}, known[1]))
        return _less({}, known[0]) if node.op_type == "Neg" else _less(*known)


def _less(a: Terms, b: Terms) -> Terms:
    found = Counter(a)
    found.subtract(b)
    return {value: times for value, times in found.items() if times}
