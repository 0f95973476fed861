"""Where an initial state comes from, by wiring: through moves, branches and packed caches.

Streaming exports keep the states of many layers in one graph input, cut a layer's part out
of it, and write the new state into a copy for the next layer to read from. Which entries a
layer then reads is decided by index, so each entry of the input is given a number, and the
numbers are moved as the graph moves the entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from rnnaudit.loaders.onnx.contents import MOVES, move
from rnnaudit.loaders.onnx.reading import Array
from rnnaudit.loaders.onnx.refusal import MALFORMED
from rnnaudit.loaders.onnx.values import Knowledge

MAX_ENTRIES = 2**24
"""Entries that are followed one by one, over the whole file."""

_STANDARD = {"", "ai.onnx"}
_COMPUTED = -1


class Wiring:
    """What the initial states of one file are made of."""

    def __init__(self, known: Knowledge) -> None:
        """Follow values with what is known of constants and sizes."""
        self.known = known
        self._numbers: dict[ir.Value, Array | None] = {}
        self._owners: list[tuple[int, ir.Value]] = []
        self._next = 0
        self._left = MAX_ENTRIES

    def roots(self, value: ir.Value) -> list[ir.Value]:
        """Return what a value's entries are made of: graph inputs, or values that are computed.

        Operators that move or repeat entries are followed, and both branches of an If.
        """
        found = _follow(value)
        if all(root.producer() is None for root in found):
            return found
        return self._by_entry(value) or found

    def _by_entry(self, value: ir.Value) -> list[ir.Value]:
        """Follow entries one by one; nothing where one is computed or a shape is not known."""
        for at in _upstream(value):
            if at not in self._numbers:
                self._number(at)
        entries = self._numbers.get(value)
        if entries is None or entries.size == 0 or (entries == _COMPUTED).any():
            return []
        starts = np.array([start for start, _ in self._owners])
        which = np.unique(np.searchsorted(starts, entries.ravel(), side="right") - 1)
        return [self._owners[i][1] for i in which]

    def _number(self, value: ir.Value) -> None:
        """Number the entries of an input, or move those of a node's inputs as it moves them."""
        node = value.producer()
        if node is None:
            sizes = [n for n in value.shape or () if isinstance(n, int)]
            count = math.prod(sizes)
            if value.shape is None or len(sizes) != len(value.shape) or count > self._left:
                return
            self._owners.append((self._next, value))
            numbers = np.arange(self._next, self._next + count).reshape(sizes)
            self._next += count
            self._keep(value, numbers)
            return
        sources = [self._numbers.get(v) for v in _sources(node)]
        if not _moves(node) or any(source is None for source in sources):
            return
        for out, result in zip(node.outputs, self._moved(node), strict=False):
            self._keep(out, result)

    def _keep(self, value: ir.Value, numbers: Array) -> None:
        if numbers.size <= self._left:
            self._left -= numbers.size
            self._numbers[value] = numbers

    def _moved(self, node: ir.Node) -> Sequence[Array]:
        if node.op_type == "ScatterND":
            try:
                return self._scattered(node)
            except MALFORMED:
                return ()
        inputs = [
            None if v is None else self._numbers.get(v, self.known.constant(v)) for v in node.inputs
        ]
        return move(node, inputs)

    def _scattered(self, node: ir.Node) -> Sequence[Array]:
        """Mark the entries that are written over; what is written there is computed."""
        data, places, _ = node.inputs
        before = None if data is None else self._numbers.get(data)
        where = self.known.constant(places)
        reduction = node.attributes.get("reduction")
        if before is None or where is None or (reduction and reduction.as_string() != "none"):
            return ()
        after = before.copy()
        after[tuple(np.moveaxis(where.astype(np.int64), -1, 0))] = _COMPUTED
        return [after]


def _follow(value: ir.Value) -> list[ir.Value]:
    found: dict[ir.Value, None] = {}
    seen: set[ir.Value] = set()
    waiting = [value]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        producer = at.producer()
        if producer is None or producer.domain not in _STANDARD:
            found[at] = None
        elif producer.op_type == "If":
            waiting.extend(_branch_outputs(producer, at))
        elif producer.op_type in MOVES:
            waiting.extend(_sources(producer))
        else:
            found[at] = None
    return list(found)


def _sources(node: ir.Node) -> list[ir.Value]:
    inputs = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return [value for value in inputs if value is not None]


def _branch_outputs(node: ir.Node, value: ir.Value) -> list[ir.Value]:
    """Return what either branch of an If gives for one of its outputs."""
    index = list(node.outputs).index(value)
    branches = (a.as_graph() for a in node.attributes.values() if a.type.name == "GRAPH")
    return [branch.outputs[index] for branch in branches if index < len(branch.outputs)]


def _upstream(value: ir.Value) -> list[ir.Value]:
    """Return the values that this one is moved from, sources before what they feed."""
    order: dict[ir.Value, None] = {}
    waiting: list[tuple[ir.Value, bool]] = [(value, False)]
    entered: set[ir.Value] = set()
    while waiting:
        at, ready = waiting.pop()
        if ready:
            order[at] = None
            continue
        if at in entered:
            continue
        entered.add(at)
        waiting.append((at, True))
        producer = at.producer()
        if producer is not None and producer.domain in _STANDARD and _moves(producer):
            waiting.extend((source, False) for source in _sources(producer))
    return list(order)


def _moves(node: ir.Node) -> bool:
    return node.op_type in MOVES or node.op_type == "ScatterND"
