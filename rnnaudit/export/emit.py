"""Writing nodes: every value gets a readable name, every constant is stored once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
from torch import Tensor

OLDEST_OPSET = 11  # Slice, Clip and Gemm have their present form from here on
INT64_MAX = np.iinfo(np.int64).max


class Emitter:
    """Nodes and initializers under one prefix, in one floating-point type and one opset.

    Nodes and constants are collected, not yet in a graph: whoever builds or edits the
    graph takes ``nodes`` and ``initializers`` over.
    """

    def __init__(self, prefix: str, dtype: ir.DataType, opset: int) -> None:
        """Start with no nodes; names begin with ``prefix/``."""
        self.dtype = dtype
        self.opset = opset
        self._scope = [prefix]
        self._tape = ir.tape.Tape()
        self._integers: dict[tuple[int, ...], ir.Value] = {}
        self._indices: dict[int, ir.Value] = {}
        self._root = prefix

    @property
    def nodes(self) -> Sequence[ir.Node]:
        """Every node so far, in an order in which it can run."""
        return self._tape.nodes

    @property
    def initializers(self) -> Sequence[ir.Value]:
        """Every constant so far."""
        return self._tape.initializers

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put ``name/`` before the names of what is written inside."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    def named(self, name: str) -> str:
        """Return the full name of a value that is called ``name`` here."""
        return "/".join([*self._scope, name])

    def op(self, op_type: str, *inputs: ir.Value | None, name: str, **attributes: Any) -> ir.Value:
        """Add a node with one output; node and output are called ``name``."""
        full = self.named(name)
        return self._tape.op(op_type, inputs, attributes, name=full, output=ir.Value(name=full))

    def several(
        self, op_type: str, *inputs: ir.Value | None, names: Sequence[str], **attributes: Any
    ) -> Sequence[ir.Value]:
        """Add a node with an output for each of ``names``; it is called after the first."""
        outputs = [ir.Value(name=self.named(name)) for name in names]
        name = outputs[0].name
        return self._tape.op_multi_out(op_type, inputs, attributes, outputs=outputs, name=name)

    def split(self, value: ir.Value, names: Sequence[str], width: int) -> Sequence[ir.Value]:
        """Cut the last axis of rows [M, len(names) · width] into equal parts."""
        sizes = [width] * len(names)
        outputs = [ir.Value(name=self.named(name)) for name in names]
        inputs, attributes = [value], {"axis": 1}
        if self.opset >= 13:
            inputs.append(self.integers(*sizes))
        else:
            attributes["split"] = sizes  # type: ignore[assignment]
        name = self.named("split_" + "".join(names))
        return self._tape.op_multi_out("Split", inputs, attributes, outputs=outputs, name=name)

    def integers(self, *numbers: int) -> ir.Value:
        """Return the int64 vector of these numbers, stored once."""
        if numbers not in self._integers:
            name = "_".join("end" if n == INT64_MAX else str(n) for n in numbers)
            tensor = ir.tensor(np.array(numbers, np.int64), name=f"{self._root}/int_{name}")
            self._integers[numbers] = self._tape.initializer(tensor)
        return self._integers[numbers]

    def index(self, number: int) -> ir.Value:
        """Return an int64 number without axes, stored once."""
        if number not in self._indices:
            tensor = ir.tensor(np.array(number, np.int64), name=f"{self._root}/index_{number}")
            self._indices[number] = self._tape.initializer(tensor)
        return self._indices[number]

    def constant(self, value: Tensor | float, name: str) -> ir.Value:
        """Store a float64 matrix or number in the graph's own type, under ``name``."""
        array = np.asarray(value, np.float64).astype(self.dtype.numpy())
        tensor = ir.tensor(np.ascontiguousarray(array), self.dtype, name=self.named(name))
        return self._tape.initializer(tensor)

    def slice(self, value: ir.Value, start: ir.Value, end: ir.Value, *, name: str) -> ir.Value:
        """Take rows from ``start`` up to ``end`` along the first axis."""
        return self.op("Slice", value, start, end, self.integers(0), name=name)
