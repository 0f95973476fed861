"""One step per call: a graph that is given its state, and gives the next, as operators.

Nothing marks a state but wiring: a graph input and a graph output of one type and shape,
where the output is computed from the input with at most one product with weights on the
way (h to h' of a cell has one, what a gate carries over has none; a network from x to y
has more), and something else is read too. States that need one another are one state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import onnx_ir as ir

from rnnaudit.cells.operators import OPERATORS
from rnnaudit.findings import finding
from rnnaudit.loaders.interface import brief
from rnnaudit.loaders.onnx.apart import Ports, settled
from rnnaudit.loaders.onnx.axes import Atom, Layout, axis
from rnnaudit.loaders.onnx.bodies import STANDARD, Carried, Entering, captured, trace
from rnnaudit.loaders.onnx.contents import MOVES
from rnnaudit.loaders.onnx.inferred import Sizes
from rnnaudit.loaders.onnx.initial import initial_state
from rnnaudit.loaders.onnx.nodes import Read, plain_name
from rnnaudit.loaders.onnx.refusal import MALFORMED, Refused
from rnnaudit.loaders.onnx.shapes import for_one, shape_of
from rnnaudit.loaders.onnx.values import Knowledge
from rnnaudit.loaders.onnx.wiring import Wiring
from rnnaudit.model import Layer, Reading, Recurrence, Site, TracedCell
from rnnaudit.results import Finding, Skipped

_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"})
_RECURRENT = frozenset({"LSTM", "GRU", "RNN", "Loop", "Scan", "If"})
_MOST = 64
"""Graph inputs that may be states."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A state at the graph's edge: what it is before a step and after it, and where."""

    before: ir.Value
    after: ir.Value
    graph: ir.Graph
    scope: str


def read_steps(
    graph: ir.Graph, wiring: Wiring, taken: set[str], opset: int
) -> tuple[list[Read], list[Skipped], list[Finding]]:
    """Read every state that the caller carries from call to call.

    Args:
        graph: The model's graph.
        wiring: What its values are.
        taken: Graph inputs that are the states of recurrences already read.
        opset: The opset that the model imports.
    """
    reads, skipped, findings = [], [], []
    for group in _groups(_pairs(graph, wiring.known, taken)):
        name = ", ".join(pair.before.name or "" for pair in group)
        where = f"{group[0].scope}/{name}" if group[0].scope else name
        inside = {node.op_type for node in _between(group)}
        if inside <= MOVES:
            text = f"{name} holds values of past calls, which are moved along and not computed with"
            findings.append(finding("RA124", where, text))
        elif not inside & _RECURRENT:
            try:
                reads.append(_read(group, wiring, where, opset))
            except Refused as refused:
                skipped.append(Skipped(where, f"a state between calls: {refused}"))
            except MALFORMED as error:
                reason = f"a state between calls: an operator's rules are broken ({brief(error)})"
                skipped.append(Skipped(where, reason))
    return reads, skipped, findings


# --- which inputs are states ------------------------------------------------------------------


def _pairs(graph: ir.Graph, known: Knowledge, taken: set[str]) -> list[Pair]:
    """Pair inputs with outputs: fewest products on the way first, then the likest names."""
    inputs = [v for v in graph.inputs if not v.is_initializer() and _floats(v)]
    if len(inputs) < 2 or len(inputs) > _MOST:
        return []
    reach = {before: _products(before) for before in inputs}
    likely: list[tuple[int, float, int, ir.Value, list[Pair]]] = []
    for output in graph.outputs:
        landings = list(_landings(output, graph, ""))
        for before in inputs:
            if before.name in taken or not _alike(shape_of(known, before), shape_of(known, output)):
                continue
            pairs = [
                Pair(before, after, inner, scope)
                for after, inner, scope in landings
                if reach[before].get(after, 2) <= 1
                and after is not before
                and any(after in reach[other] for other in inputs if other is not before)
            ]
            if pairs:
                fewest = min(reach[before][pair.after] for pair in pairs)
                likeness = _similar(str(before.name), str(output.name))
                likely.append((fewest, -likeness, len(likely), output, pairs))
    found: list[Pair] = []
    used: set[ir.Value] = set()
    for _, _, _, output, pairs in sorted(likely, key=lambda entry: entry[:3]):
        if not {output, pairs[0].before} & used:
            used |= {output, pairs[0].before}
            found += pairs
    found.sort(key=lambda pair: inputs.index(pair.before))
    return found if len({pair.before for pair in found}) < len(inputs) else []


def _floats(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point() and bool(value.shape)


def _alike(a: Sizes | None, b: Sizes | None) -> bool:
    """Whether two shapes may be one: numbers that are told agree, and one is told at least."""
    if a is None or b is None or len(a) != len(b):
        return False
    told = [(n, m) for n, m in zip(a, b, strict=True) if n is not None and m is not None]
    return bool(told) and all(n == m for n, m in told)


def _similar(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower()).ratio()


def _landings(
    value: ir.Value, graph: ir.Graph, scope: str
) -> Iterator[tuple[ir.Value, ir.Graph, str]]:
    """Yield where a value is computed: in each branch, where an If gives it."""
    node = value.producer()
    if node is None or node.op_type != "If":
        yield value, graph, scope
        return
    index = list(node.outputs).index(value)
    for name in ("then", "else"):
        attribute = node.attributes.get(f"{name}_branch")
        if attribute is not None and attribute.type == ir.AttributeType.GRAPH:
            branch = attribute.as_graph()
            path = f"{scope}/{node.name}[{name}]".lstrip("/")
            if index < len(branch.outputs):
                yield from _landings(branch.outputs[index], branch, path)


def _products(start: ir.Value) -> dict[ir.Value, int]:
    """Count, for all that depends on a value, the fewest products with weights on the way."""
    fewest = {start: 0}
    waiting = deque([start])
    while waiting:
        value = waiting.popleft()
        for use in value.uses():
            node = use.node
            count = fewest[value] + (node.op_type in _PRODUCTS)
            for out in node.outputs:
                if count < fewest.get(out, count + 1):
                    fewest[out] = count
                    (waiting.append if node.op_type in _PRODUCTS else waiting.appendleft)(out)
    return fewest


def _groups(pairs: list[Pair]) -> list[list[Pair]]:
    """Join states that need one another; each group is of one graph."""
    reach = [_products(pair.before) for pair in pairs]
    groups: list[list[Pair]] = []
    for i, pair in enumerate(pairs):
        for group in groups:
            j = pairs.index(group[0])
            mutual = group[0].after in reach[i] and pair.after in reach[j]
            if mutual and pair.graph is group[0].graph:
                group.append(pair)
                break
        else:
            groups.append([pair])
    return groups


# --- what a step is ---------------------------------------------------------------------------


def _between(group: Sequence[Pair]) -> list[ir.Node]:
    """Return the nodes on the way from the states before a step to those after it."""
    depends: set[ir.Value] = set()
    for pair in group:
        depends |= set(_products(pair.before))
    nodes: dict[ir.Node, None] = {}
    waiting = [pair.after for pair in group]
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in nodes and node.graph is group[0].graph:
            nodes[node] = None
            waiting += [value for value in captured(node) if value in depends]
    return list(nodes)


def _read(group: list[Pair], wiring: Wiring, where: str, opset: int) -> Read:
    known = wiring.known
    between = _between(group)
    made = {out for node in between for out in node.outputs}
    befores = {pair.before for pair in group}
    edge = {
        value: None
        for node in reversed(between)
        for value in captured(node)
        if value not in made | befores and known.constant(value) is None
    }
    entrances = list(dict.fromkeys(entrance(value, known) for value in edge))

    def ports(lengths: Sequence[int] = ()) -> Ports:
        states = [for_one(known, p.before, p.after, lengths=lengths) for p in group]
        return (
            [Carried(p.before, p.after, n) for p, n in zip(group, states, strict=True)],
            [Entering(v, for_one(known, v, lengths=lengths), v.dtype) for v in entrances],
        )

    def make(given: Ports) -> TracedCell:
        return trace(*given, known, group[0].graph, opset=opset, outputs=len(group))

    (carried, entering), cell, joint = settled(ports, make)
    state, _ = initial_state([(c.before, c.shape) for c in carried], wiring, where)
    names = " and ".join(f"{p.before.name!r} → {p.after.name!r}" for p in group)
    note = finding(
        "RA130",
        where,
        f"state by wiring: {names} (one shape, and one is computed from the other with at most "
        "one product with weights on the way)",
    )
    reads = tuple(
        Reading(e.value.name or "", None, 0 if len(e.shape) > 1 and not joint else None)
        for e in entering
    )
    return placed(Recurrence(where, 0, cell, state), reads, group, (note,))


def placed(
    recurrence: Recurrence,
    reads: tuple[Reading, ...],
    pairs: Sequence[Pair],
    findings: tuple[Finding, ...],
) -> Read:
    """Make a layer of a step that no node of the graph stands for."""
    pair, name, cell = pairs[0], recurrence.name, recurrence.cell
    node = pair.after.producer()
    if node is None or not reads:
        raise Refused("its steps read nothing")
    node.name = node.name or f"{name}/step"
    time, batch, features = (axis(Atom(f"{name}:{what}")) for what in ("time", "batch", "features"))
    layer = Layer(
        (recurrence,),
        Site(
            node=node.name,
            x=reads[0].value,
            scope=pair.scope,
            reads=reads,
            carries=tuple((p.before.name or "", p.after.name or "") for p in pairs),
        ),
    )
    x = Layout(ir.Value(name=f"{name}:x"), (time, batch, features))
    units = axis(Atom(f"{name}:units", cell.hidden_size))
    kind = pair.before.dtype or ir.DataType.FLOAT
    return Read(layer, node, x, None, time, batch, units, plain_name(kind.name.lower()), findings)


def entrance(value: ir.Value, known: Knowledge) -> ir.Value:
    """Return what a layer reads where ``value`` is its input's part of the pre-activations."""
    at = value
    for _ in range(8):
        node = at.producer()
        if node is None or node.domain not in STANDARD or node.op_type not in OPERATORS:
            break
        dynamic = [v for v in node.inputs if v is not None and known.constant(v) is None]
        if len(dynamic) != 1:
            break
        at = dynamic[0]
        if node.op_type in {"MatMul", "Gemm"}:
            return at
    return value if shape_of(known, value) is not None else at
