"""Unrolled recurrences: the same weights used once per step, along a chain.

An export that froze the time axis writes the step out T times. The products with one
stored matrix that need one another in a chain mark the steps; two neighbours are walked
side by side, backwards, so that what changes from one to the next is told from what is
the same: what a step hands on is state, an entry of one value is the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from rnnaudit.findings import finding
from rnnaudit.loaders.onnx.bodies import Carried, Entering, trace
from rnnaudit.loaders.onnx.contents import integer
from rnnaudit.loaders.onnx.initial import initial_state
from rnnaudit.loaders.onnx.nodes import Read
from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.loaders.onnx.shapes import for_one
from rnnaudit.loaders.onnx.steps import Pair, placed
from rnnaudit.loaders.onnx.values import Knowledge
from rnnaudit.loaders.onnx.wiring import Wiring
from rnnaudit.model import Reading, Recurrence
from rnnaudit.results import Skipped

SHORTEST = 4
"""Products with one matrix below which nothing is called a recurrence."""


def read_unrolled(graph: ir.Graph, wiring: Wiring, opset: int) -> tuple[list[Read], list[Skipped]]:
    """Read every chain of steps that share their weights."""
    reads, skipped = [], []
    claimed: set[ir.Node] = set()
    for weight, chain in _chains(graph):
        if claimed & set(chain):
            continue
        try:
            read, nodes = _read(chain, wiring, graph, opset, weight.name or "step")
        except Refused as refused:
            reason = f"unrolled to {len(chain)} steps: {refused}"
            skipped.append(Skipped(weight.name or "step", reason))
            continue
        claimed |= nodes
        reads.append(read)
    return reads, skipped


def _chains(graph: ir.Graph) -> Iterator[tuple[ir.Value, list[ir.Node]]]:
    """Yield stored matrices whose products need one another, first step first."""
    order = {node: i for i, node in enumerate(graph)}
    for weight in graph.initializers.values():
        products = sorted(
            {
                use.node
                for use in weight.uses()
                if use.node.op_type in {"MatMul", "Gemm"} and use.idx == 1 and use.node in order
            },
            key=order.__getitem__,
        )
        if len(products) >= SHORTEST and all(_needs(b, a) for a, b in pairwise(products)):
            yield weight, products


def _needs(later: ir.Node, earlier: ir.Node, most: int = 200) -> bool:
    """Whether a node is computed from another that is at most ``most`` nodes before it."""
    waiting, seen = [later], {later}
    while waiting and len(seen) < most:
        for value in waiting.pop(0).inputs:
            node = None if value is None else value.producer()
            if node is earlier:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return False


@dataclass(slots=True, eq=False)
class _Walk:
    """Two neighbouring steps, walked side by side."""

    known: Knowledge
    before: ir.Value
    entries: dict[ir.Value, tuple[ir.Value, int]] = field(default_factory=dict)
    nodes: set[ir.Node] = field(default_factory=set)
    done: set[ir.Value] = field(default_factory=set)

    def walk(self, here: ir.Value, there: ir.Value) -> None:
        """Follow two values that play one part, until they are state, input or constant."""
        waiting = [(here, there)]
        while waiting:
            a, b = waiting.pop()
            if a is self.before or a in self.done:
                continue
            if (stored := self.known.constant(a)) is not None:
                if not np.array_equal(stored, self.known.constant(b)):  # type: ignore[arg-type]
                    raise Refused(f"its steps differ in the constant {a.name!r}")
                continue
            self.done.add(a)
            one, other = a.producer(), b.producer()
            if a is b:
                raise Refused(f"every step reads {a.name!r}")
            if one is None or other is None or not _alike(one, other):
                raise Refused(f"its steps differ in how {a.name!r} is made")
            if self._entry(a, one, other):
                continue
            if other in self.nodes or b in self.done:
                raise Refused("a step hands on more than one value")
            self.nodes.add(one)
            waiting += [
                (x, y)
                for x, y in zip(one.inputs, other.inputs, strict=False)
                if x is not None and y is not None
            ]

    def _entry(self, a: ir.Value, one: ir.Node, other: ir.Node) -> bool:
        """Whether two values are entries of one sequence, and one follows the other."""
        if one.op_type != "Gather" or one.inputs[0] is not other.inputs[0]:
            return False
        whole, index, after = (
            one.inputs[0],
            *(self.known.constant(n.inputs[1]) for n in (one, other)),
        )
        if whole is None or index is None or after is None or index.size != 1:
            return False
        if int(after.reshape(-1)[0]) - int(index.reshape(-1)[0]) != 1:
            return False
        self.entries[a] = (whole, integer(one, "axis", 0))
        return True


def _read(
    chain: list[ir.Node], wiring: Wiring, graph: ir.Graph, opset: int, name: str
) -> tuple[Read, set[ir.Node]]:
    """Take the second step as the step that all are, once each was compared with the next."""
    known, given = wiring.known, [node.inputs[0] for node in chain]
    walks = []
    for before, after, later in zip(given[1:], given[2:], given[3:], strict=False):
        if before is None or after is None or later is None:
            raise Refused("a product lacks an input")
        walks.append(_Walk(known, before))
        walks[-1].walk(after, later)
    before, after, walk = given[1], given[2], walks[0]
    assert before is not None
    assert after is not None
    if not walk.entries:
        raise Refused("its steps read no sequence")
    entering = [Entering(value, for_one(known, value), value.dtype) for value in walk.entries]
    carried = [Carried(before, after, for_one(known, before, after))]
    cell = trace(carried, entering, known, graph, opset=opset)
    first = chain[0].inputs[0]
    state, findings = initial_state([(first, carried[0].shape)], wiring, name)
    whole = " and ".join(dict.fromkeys(repr(w.name) for w, _ in walk.entries.values()))
    note = finding(
        "RA126",
        name,
        f"unrolled to {len(chain)} steps that share their weights, over {whole}: the export froze "
        "the time axis, and the file is feed-forward already",
    )
    reads = tuple(
        Reading(w.name or "", axis, 1 - axis if axis < 2 else 0)
        for w, axis in walk.entries.values()
    )
    recurrence = Recurrence(name, 0, cell, state)
    read = placed(recurrence, reads, [Pair(before, after, graph, "")], (note, *findings))
    return read, {node for walk in walks for node in walk.nodes}


def _alike(one: ir.Node, other: ir.Node) -> bool:
    settings = [
        {name: a.value for name, a in n.attributes.items() if a.type != ir.AttributeType.TENSOR}
        for n in (one, other)
    ]
    return one.op_type == other.op_type and settings[0] == settings[1]
