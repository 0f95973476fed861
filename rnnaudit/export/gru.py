"""GRU cells: one Gemm for both gates, one for the candidate, and h' = n + z (h − n)."""

from __future__ import annotations

import onnx_ir as ir

from rnnaudit.export.emit import Emitter
from rnnaudit.export.interface import Function, Rows, steps
from rnnaudit.model import GRUCell


@steps.register(GRUCell)
class _GRU:
    def __init__(self, cell: GRUCell, emit: Emitter) -> None:
        H = cell.hidden_size
        self.widths = (H,)
        self._emit = emit
        self._reset_after = cell.reset_after
        gates, candidate = slice(0, 2 * H), slice(2 * H, 3 * H)
        merged = cell.b_input + cell.b_recurrent
        b_n = cell.b_input if cell.reset_after else merged
        self._W = [
            emit.constant(cell.W[rows].mT, f"W_{name}")
            for rows, name in ((gates, "rz"), (candidate, "n"))
        ]
        self._b = [emit.constant(merged[gates], "b_rz"), emit.constant(b_n[candidate], "b_n")]
        self._U_rz = emit.constant(cell.U[gates].mT, "U_rz")
        self._U_n = emit.constant(cell.U[candidate].mT, "U_n")
        if cell.reset_after:  # this bias is inside the reset gate's product
            self._c_n = emit.constant(cell.b_recurrent[candidate], "c_n")
        self._gate = Function(emit, cell.gate, cell.clip, "gate")
        self._candidate = Function(emit, cell.candidate, cell.clip, "candidate")

    def drive(self, x: ir.Value) -> Rows:
        names = ("drive_rz", "drive_n")
        return tuple(
            self._emit.op("Gemm", x, W, b, name=name)
            for W, b, name in zip(self._W, self._b, names, strict=True)
        )

    def advance(self, s: Rows, z: Rows) -> Rows:
        emit, (h,), (z_rz, z_n) = self._emit, s, z
        gates = self._gate(emit.op("Gemm", h, self._U_rz, z_rz, name="a_rz"), "rz")
        r, update = emit.split(gates, ["r", "z"], self.widths[0])
        if self._reset_after:
            q = emit.op("Gemm", h, self._U_n, self._c_n, name="q")
            a_n = emit.op("Add", z_n, emit.op("Mul", r, q, name="rq"), name="a_n")
        else:
            a_n = emit.op("Gemm", emit.op("Mul", r, h, name="rh"), self._U_n, z_n, name="a_n")
        n = self._candidate(a_n, "n")
        kept = emit.op("Mul", update, emit.op("Sub", h, n, name="h_n"), name="kept")
        return (emit.op("Add", n, kept, name="h"),)
