"""What a graph carries from one call to the next: inputs that hold its state, and their sequels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rnnaudit.loaders.onnx.contents import MOVES
from rnnaudit.model import Layer, Model

if TYPE_CHECKING:
    import onnx_ir as ir

_KINDS = ("LSTM", "GRU", "RNN")
_MOVES = MOVES | {"ScatterND", "ScatterElements", "If"}
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_DIRECTIONS = frozenset({"in", "out", "input", "output", "next", "new", "prev", "past", "n", "o"})


def carried(model: Model) -> Mapping[str, str]:
    """Return the graph input of each state with the output that holds the next one.

    A recurrence's state is followed from its last step through operators that only move
    entries; other caches are told by a common name and shape. What has no sequel is left out.
    """
    if model.graph is None:
        return {}
    graph = model.graph.graph
    layers = [layer for stack in model.stacks for layer in stack.layers]
    found: dict[str, str] = {}
    for value in graph.inputs:
        sequels = [out for out in graph.outputs if _alike(value, out)]
        reached = {out for layer in layers for out in _sequels(graph, layer, value)}
        named = [out for out in sequels if _stem(out.name) == _stem(value.name)]
        chosen = [out for out in sequels if out in reached] or named
        if len(chosen) > 1:
            chosen = [out for out in chosen if out in named]
        if len(chosen) == 1 and value.name and chosen[0].name:
            found[value.name] = chosen[0].name
    return found


def _stem(name: str | None) -> tuple[str, ...]:
    """Return the words of a name that do not say whether it goes in or out."""
    words = (word.lower() for word in _WORDS.findall(name or ""))
    return tuple(word for word in words if word not in _DIRECTIONS)


def _alike(value: ir.Value, other: ir.Value) -> bool:
    if value.dtype != other.dtype or value.shape is None or other.shape is None:
        return False
    sizes = zip(value.shape, other.shape, strict=False)
    fixed = all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))
    return len(value.shape) == len(other.shape) and fixed


def _sequels(graph: ir.Graph, layer: Layer, state: ir.Value) -> set[ir.Value]:
    """Return the graph outputs that a layer's last state moves to, if it starts from ``state``."""
    if layer.site is None or layer.recurrences[0].initial.source != "graph input":
        return set()
    if layer.site.reads:
        named = {v.name: v for n in graph.all_nodes() for v in (*n.inputs, *n.outputs) if v}
        pairs = [(named.get(before), named.get(after)) for before, after in layer.site.carries]
    else:
        wanted = layer.site.node
        node = next(n for n in graph.all_nodes() if n.name == wanted and n.op_type in _KINDS)
        pairs = list(zip(node.inputs[5:7], node.outputs[1:3], strict=False))
    return {
        out
        for start, end in pairs
        if start is not None and end is not None and state in set(_sources(start))
        for out in _ends(end)
    }


def _sources(value: ir.Value) -> Iterator[ir.Value]:
    waiting, seen = [value], set()
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        node = at.producer()
        if node is None:
            yield at
        elif node.op_type in _MOVES:
            inputs = node.inputs if node.op_type == "Concat" else node.inputs[:1]
            waiting += [v for v in inputs if v is not None]


def _ends(value: ir.Value) -> Iterator[ir.Value]:
    waiting, seen = [value], set()
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        if at.is_graph_output():
            yield at
        waiting += [out for node, _ in at.uses() if node.op_type in _MOVES for out in node.outputs]
