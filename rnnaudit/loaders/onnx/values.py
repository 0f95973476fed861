"""What is known of a graph's values without running it: constants, sizes, axes.

One forward pass keeps three facts. *Contents*: an array, whose entries may be symbolic
sizes (``Size``), or a ``Spread``, a known core broadcast to a shape that only the input
decides (the zeros of a dynamic batch). *Layouts*: which axes of an earlier value make up
each axis of a later one, as products of named atoms in row-major order, so that squeezes,
transposes and reshapes between two recurrent nodes are proved to keep time, batch and
features apart. Only the operators listed here are evaluated, each within a size limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from rnnaudit.loaders.onnx.affine import LINEAR, Linear
from rnnaudit.loaders.onnx.axes import Atom, Layout, Size, axis
from rnnaudit.loaders.onnx.contents import RULES, Content, Folding, integer, is_symbolic
from rnnaudit.loaders.onnx.layouts import LAYOUTS
from rnnaudit.loaders.onnx.reading import Array, array

_BROKEN = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
"""What evaluating a node that breaks its operator's rules leads to."""


class Knowledge:
    """The facts of one file, gathered node by node in graph order."""

    def __init__(self) -> None:
        """Know nothing."""
        self._contents: dict[ir.Value, Content] = {}
        self._layouts: dict[ir.Value, Layout] = {}
        self.linear: dict[ir.Value, Linear] = {}
        self.recurrent: set[ir.Value] = set()
        self._folding = Folding()

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
        return known if isinstance(known, np.ndarray) and not is_symbolic(known) else None

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

    def alias(self, value: ir.Value, source: ir.Value) -> None:
        """Let a value inside a body be what it always is outside."""
        content, layout = self.content(source), self._layouts.get(source)
        if content is not None:
            self._contents[value] = content
        if layout is not None:
            self._layouts[value] = layout

    def assume(self, value: ir.Value, entries: Array) -> None:
        """Let a value be what only the run decides; the caller tells the user."""
        self._contents[value] = entries

    def forget(self, value: ir.Value) -> None:
        """Take back what was assumed."""
        self._contents.pop(value, None)

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
        except _BROKEN:
            return

    def _learn(self, node: ir.Node) -> None:
        for value, known in zip(node.outputs, self._evaluate(node), strict=False):
            self._contents[value] = known
        if node.op_type in LAYOUTS:
            before = self.layout(node.inputs[0])
            axes = None if before is None else LAYOUTS[node.op_type](self, node, before)
            if before is not None and axes is not None:
                self.track(node.outputs[0], Layout(before.origin, axes))
        elif node.op_type in LINEAR:
            LINEAR[node.op_type](self, node)

    def _evaluate(self, node: ir.Node) -> Sequence[Content]:
        if node.op_type == "Shape":
            return self._shape(node)
        if node.op_type not in RULES:
            return ()
        return self._folding.evaluate(node, [self.content(value) for value in node.inputs])

    def _shape(self, node: ir.Node) -> Sequence[Array]:
        known = self.content(node.inputs[0])
        layout = None if known is not None else self.layout(node.inputs[0])
        if isinstance(known, np.ndarray):
            sizes: list[Size | int] = list(known.shape)
        elif layout is not None:
            sizes = layout.sizes()
        else:
            return ()
        start, end = integer(node, "start", 0), integer(node, "end", len(sizes))
        return [_integers(sizes[start:end])]


def _integers(entries: Sequence[Any]) -> Array:
    if all(isinstance(e, int) for e in entries):
        return np.array(entries, dtype=np.int64)
    symbolic = np.empty(len(entries), dtype=object)
    symbolic[:] = entries
    return symbolic
