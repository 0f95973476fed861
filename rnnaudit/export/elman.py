"""Elman cells: a Gemm whose third input is the drive, and the activation."""

from __future__ import annotations

import onnx_ir as ir

from rnnaudit.export.emit import Emitter
from rnnaudit.export.interface import Function, Rows, steps
from rnnaudit.model import ElmanCell


@steps.register(ElmanCell)
class _Elman:
    def __init__(self, cell: ElmanCell, emit: Emitter) -> None:
        self.widths = (cell.hidden_size,)
        self._emit = emit
        self._U = emit.constant(cell.U.mT, "U")
        self._W = emit.constant(cell.W.mT, "W")
        self._b = emit.constant(cell.b, "b")
        self._activation = Function(emit, cell.activation, cell.clip, "activation")

    def drive(self, x: ir.Value) -> Rows:
        return (self._emit.op("Gemm", x, self._U, self._b, name="drive"),)

    def advance(self, s: Rows, z: Rows) -> Rows:
        a = self._emit.op("Gemm", *s, self._W, *z, name="a")
        return (self._activation(a, "h"),)
