"""Unrolled recurrences: the same weights used once per step, along a chain.

An export that froze the time axis writes the step out T times. The products with one
stored matrix that need one another in a chain mark the steps. A cell may multiply by
several matrices, and layers that feed one another may all be unrolled: of the chains that
share their steps, the one that says most of the graph with the least state is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import onnx_ir as ir

from rnnaudit.cells.recognise import recognise
from rnnaudit.findings import finding
from rnnaudit.loaders.interface import brief
from rnnaudit.loaders.onnx.alignment import (
    PRODUCTS,
    Aligned,
    Chain,
    Entry,
    Row,
    align,
    anchors,
    is_chain,
)
from rnnaudit.loaders.onnx.apart import Ports, settled
from rnnaudit.loaders.onnx.bodies import STANDARD, Carried, Entering, trace
from rnnaudit.loaders.onnx.initial import initial_state
from rnnaudit.loaders.onnx.nodes import Read
from rnnaudit.loaders.onnx.refusal import MALFORMED, Refused
from rnnaudit.loaders.onnx.shapes import filled, for_one, shape_of
from rnnaudit.loaders.onnx.steps import Pair, placed
from rnnaudit.loaders.onnx.values import Knowledge
from rnnaudit.loaders.onnx.wiring import Wiring
from rnnaudit.model import Reading, Recurrence, TracedCell
from rnnaudit.results import UNROLLED, Skipped

SHORTEST = 4
"""Products with one matrix below which nothing is called a recurrence."""

MOST = 64
"""Chains that are followed."""

LONGEST = 20_000_000
"""Nodes that are looked at to find them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A recurrence, and the products of all chains that its steps hold."""

    read: Read
    products: frozenset[ir.Node]
    cell: TracedCell
    steps: int

    def rank(self) -> tuple[int, bool, int]:
        """Most products a step come first, then cells that have a name, then the least state."""
        whole = round(len(self.products) / self.steps)  # a first step may lack some
        return -whole, recognise(self.cell) is None, self.cell.state_size


def read_unrolled(graph: ir.Graph, wiring: Wiring, opset: int) -> tuple[list[Read], list[Skipped]]:
    """Read every chain of steps that share their weights."""
    chains = _chains(graph, wiring.known)
    marked = {node for chain in chains for node in chain.products}
    found: list[_Found] = []
    refused: list[tuple[Chain, str]] = []
    tried: set[Row] = set()
    for chain in chains:
        try:
            anchor = anchors(graph, chain, wiring.known)
            if anchor not in tried:
                tried.add(anchor)
                found.append(_read(chain, anchor, marked, wiring, graph, opset=opset))
        except Refused as error:
            refused.append((chain, str(error)))
        except MALFORMED as error:
            refused.append((chain, f"an operator's rules are broken ({brief(error)})"))
    found.sort(key=_Found.rank)
    claimed: set[ir.Node] = set()
    reads = []
    for one in found:
        if not claimed & one.products:
            claimed |= one.products
            reads.append(one.read)
    skipped = [
        Skipped(chain.name, f"{UNROLLED}{len(chain.products)} steps: {reason}")
        for chain, reason in refused
        if not claimed & {*chain.products}
    ]
    return reads, skipped


def _chains(graph: ir.Graph, known: Knowledge) -> list[Chain]:
    """Find stored matrices whose products need one another, first step first."""
    products: dict[object, list[tuple[ir.Node, int]]] = {}
    names: dict[object, str] = {}
    keys: dict[ir.Value, object] = {}
    for node, weight, operand in _products(graph, known):
        if weight not in keys:
            stored = known.constant(weight)
            assert stored is not None
            content = hashlib.sha256(stored.tobytes()).hexdigest()
            keys[weight] = (node.op_type, operand, stored.shape, str(stored.dtype), content)
        key = keys[weight]
        names.setdefault(key, _root(weight).name or "step")
        products.setdefault(key, []).append((node, operand))
    often = [key for key, uses in products.items() if len(uses) >= SHORTEST]
    chains = (
        Chain(names[key], tuple(node for node, _ in products[key]), products[key][0][1])
        for key in often[: max(MOST, LONGEST // max(1, len(graph)))]
        if is_chain(graph, [node for node, _ in products[key]])
    )
    return [*islice(chains, MOST)]


def _products(graph: ir.Graph, known: Knowledge) -> Iterator[tuple[ir.Node, ir.Value, int]]:
    """Yield products with a stored matrix: the node, the matrix, which input is the other."""
    for node in graph:
        if node.op_type not in PRODUCTS or node.domain not in STANDARD or len(node.inputs) < 2:
            continue
        for side in (1, 0):
            weight, other = node.inputs[side], node.inputs[1 - side]
            stored = None if weight is None or other is None else known.constant(weight)
            if weight is not None and stored is not None and stored.ndim > 1:
                yield node, weight, 1 - side


def _root(value: ir.Value) -> ir.Value:
    """Return what a constant is made of, where it is one stored value that is moved."""
    for _ in range(8):
        node = value.producer()
        if node is None or not node.inputs or node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value


def _read(
    chain: Chain, anchor: Row, marked: set[ir.Node], wiring: Wiring, graph: ir.Graph, *, opset: int
) -> _Found:
    """Take the second step as the step that all are, once all were compared."""
    known, name = wiring.known, chain.name
    found = align(graph, chain, anchor, known)
    at = 1 - found.start  # where the second step's values stand in a row

    def ports(lengths: Sequence[int] = ()) -> Ports:
        return (
            [
                Carried(
                    row[at],
                    row[at + 1],
                    for_one(known, row[at], row[at + 1], row[0], lengths=lengths),
                )
                for row in found.states
            ],
            [
                *(
                    Entering(
                        e.row[at],
                        _shape(e, at, known, lengths),
                        e.whole.dtype,
                        0 if e.axis else len(e.kept),
                    )
                    for e in found.entries
                ),
                *(
                    Entering(row[at], for_one(known, row[at], lengths=lengths), row[at].dtype)
                    for row in found.held
                ),
            ],
        )

    def make(given: Ports) -> TracedCell:
        return trace(*given, known, graph, opset=opset)

    (carried, entering), cell, joint = settled(ports, make)
    starts = [(row[0], part.shape) for row, part in zip(found.states, carried, strict=True)]
    state, findings = initial_state(starts, wiring, name)
    whole = " and ".join(dict.fromkeys(repr(e.whole.name) for e in found.entries))
    note = finding(
        "RA126",
        name,
        f"{UNROLLED}{len(chain.products)} steps that share their weights, over {whole}: the "
        "export froze the time axis, and the file is feed-forward already",
    )
    recurrence = Recurrence(name, 0, cell, state, found.entries[0].reverse)
    pairs = [Pair(part.before, part.after, graph, "") for part in carried]
    reads = _readings(found, entering, known, joint=joint)
    read = placed(recurrence, reads, pairs, (note, *findings))
    return _Found(read, frozenset(found.nodes & marked), cell, len(chain.products))


def _shape(entry: Entry, at: int, known: Knowledge, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return what one step reads of a sequence."""
    sizes = shape_of(known, entry.whole)
    if sizes is None:
        return for_one(known, entry.row[at], lengths=lengths)
    return filled([*sizes[: entry.axis], *entry.kept, *sizes[entry.axis + 1 :]], lengths)


def _readings(
    found: Aligned, entering: Sequence[Entering], known: Knowledge, *, joint: bool
) -> tuple[Reading, ...]:
    """Say along which axes values are read; the first that is left is that of sequences."""
    reads = []
    for entry in found.entries:
        sizes = shape_of(known, entry.whole)
        alone = joint or (sizes is not None and len(sizes) < 3)
        batch = None if alone else int(entry.axis == 0)
        reads.append(Reading(entry.whole.name or "", entry.axis, batch))
    for row, part in zip(found.held, entering[len(found.entries) :], strict=True):
        batch = 0 if len(part.shape) > 1 and not joint else None
        reads.append(Reading(row[0].name or "", None, batch))
    return tuple(reads)
