"""Where a layer is plugged into a graph: the node that goes, what it reads, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from rnnaudit.errors import UnsupportedModelError
from rnnaudit.model import Layer, Site, TracedCell

_KINDS = frozenset({"LSTM", "GRU", "RNN"})


@dataclass(frozen=True, slots=True, eq=False)
class Socket:
    """A node that a truncated form can replace.

    Attributes:
        node: The recurrent node, or the Loop or Scan whose step is a known cell.
        x: What it reads.
        outputs: Every step and the final parts of the state, None where the node has no such.
        time: The axis of time of the first output.
        directed: Whether the outputs have an axis of directions.
    """

    node: ir.Node
    x: ir.Value
    outputs: tuple[ir.Value | None, ...]
    time: int
    directed: bool

    @property
    def rank(self) -> int:
        """How many axes the output over time has."""
        return 3 + self.directed

    @property
    def dtype(self) -> ir.DataType:
        """The type in which the node computes: that of its input, its weights or its outputs."""
        weights = self.node.inputs[1:3] if self.directed else ()
        for value in (self.x, *weights, *self.outputs):
            if value is not None and value.dtype is not None:
                return value.dtype
        return ir.DataType.FLOAT


def obstacle(layer: Layer) -> str:
    """Say why no form can stand where a layer stood; empty where one can."""
    site = layer.site
    if any(isinstance(r.cell, TracedCell) for r in layer.recurrences):
        return "its step is made of operators that are no LSTM, GRU or Elman cell"
    if site is None or not site.reads:
        return ""
    return (
        "its step is written out, without a node to replace"
        if site.outlets is None
        else (site.outlets.obstacle)
    )


def socket(graph: ir.Graph, site: Site) -> Socket:
    """Find the node of a site, which may sit in a branch of an If.

    Raises:
        UnsupportedModelError: The recurrence was read from operators that no node holds.
    """
    values = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
    for node in graph.all_nodes():
        if node.name == site.node and not site.reads and node.op_type in _KINDS:
            assert node.inputs[0] is not None
            return Socket(node, node.inputs[0], tuple(node.outputs), site.layout, directed=True)
        values |= {v.name: v for v in node.outputs}
        if node.name == site.node and site.outlets is not None:
            wanted = (site.outlets.steps, *site.outlets.finals)
            given = {v.name: v for v in node.outputs}
            outputs = tuple(given.get(name) if name else None for name in wanted)
            return Socket(node, values[site.x], outputs, site.outlets.time, directed=False)
    raise UnsupportedModelError(
        f"a layer to truncate must be one node, and {site.node} was read from other operators",
        help="export the model again with a recurrent layer of its framework",
    )
