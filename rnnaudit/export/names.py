"""Names in a graph: what is written anew must not be called as something there already is."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import onnx_ir as ir


def taken(graph: ir.Graph) -> frozenset[str]:
    """Return the names of all values of a graph, those of its bodies included."""
    inner = [body for body in graph.subgraphs() if isinstance(body, ir.Graph)]
    values = itertools.chain(
        (v for node in graph.all_nodes() for v in node.outputs),
        (v for part in (graph, *inner) for v in (*part.inputs, *part.initializers.values())),
    )
    return frozenset(v.name for v in values if v.name)


def unused(wanted: str, names: Collection[str]) -> str:
    """Return ``wanted``, or a name like it that is none of ``names``."""
    numbered = (f"{wanted}_{i}" for i in itertools.count(2))
    return next(name for name in itertools.chain([wanted], numbered) if name not in names)
