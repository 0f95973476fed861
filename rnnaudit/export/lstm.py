"""LSTM cells: one Gemm for the gates, one for the candidate; peepholes, coupling, projection."""

from __future__ import annotations

import onnx_ir as ir
import torch

from rnnaudit.export.emit import Emitter
from rnnaudit.export.interface import Function, Rows, steps
from rnnaudit.model import LSTMCell


@steps.register(LSTMCell)
class _LSTM:
    def __init__(self, cell: LSTMCell, emit: Emitter) -> None:
        self.widths = (cell.hidden_size, cell.cell_size)
        self._emit = emit
        self._coupled = cell.input_forget
        # A coupled forget gate is 1 − i: its own weights are never read.
        self._gates = ["i", "o"] if cell.input_forget else ["i", "f", "o"]
        of = dict(zip("ifgo", torch.arange(4 * cell.cell_size).split(cell.cell_size), strict=True))
        gates, candidate = torch.cat([of[name] for name in self._gates]), of["g"]
        blocks = ((gates, "".join(self._gates)), (candidate, "g"))
        self._W = [emit.constant(cell.W[rows].mT, f"W_{name}") for rows, name in blocks]
        self._U = [emit.constant(cell.U[rows].mT, f"U_{name}") for rows, name in blocks]
        self._b = [emit.constant(cell.b[rows], f"b_{name}") for rows, name in blocks]
        self._peephole = (
            None
            if cell.peephole is None
            else {
                name: emit.constant(p, f"p_{name}")
                for name, p in zip("ifo", cell.peephole, strict=True)
                if name in self._gates
            }
        )
        self._R = None if cell.projection is None else emit.constant(cell.projection.mT, "R")
        self._one = emit.constant(1.0, "one") if cell.input_forget else None
        self._gate = Function(emit, cell.gate, cell.clip, "gate")
        self._candidate = Function(emit, cell.candidate, cell.clip, "candidate")
        self._squash = Function(
            emit, cell.squash, cell.clip if cell.clip_output else None, "squash"
        )

    def drive(self, x: ir.Value) -> Rows:
        names = ("drive_" + "".join(self._gates), "drive_g")
        return tuple(
            self._emit.op("Gemm", x, W, b, name=name)
            for W, b, name in zip(self._W, self._b, names, strict=True)
        )

    def _look(self, gate: str, a: ir.Value, c: ir.Value) -> ir.Value:
        """Write a gate that looks through its peephole at c: σ(a + p c)."""
        assert self._peephole is not None
        seen = self._emit.op("Mul", c, self._peephole[gate], name=f"p_{gate}_c")
        return self._gate(self._emit.op("Add", a, seen, name=f"a_{gate}_p"), gate)

    def advance(self, s: Rows, z: Rows) -> Rows:
        emit, (h, c), (U, U_g) = self._emit, s, self._U
        joined, width = "".join(self._gates), self.widths[1]
        a = emit.op("Gemm", h, U, z[0], name=f"a_{joined}")
        g = self._candidate(emit.op("Gemm", h, U_g, z[1], name="a_g"), "g")
        if self._peephole is None:
            parts = emit.split(self._gate(a, joined), self._gates, width)
            gates = dict(zip(self._gates, parts, strict=True))
        else:
            parts = emit.split(a, [f"a_{name}" for name in self._gates], width)
            before = dict(zip(self._gates, parts, strict=True))
            gates = {n: self._look(n, a, c) for n, a in before.items() if n != "o"}
        forget = emit.op("Sub", self._one, gates["i"], name="f") if self._coupled else gates["f"]
        c_next = emit.op(
            "Add",
            emit.op("Mul", forget, c, name="fc"),
            emit.op("Mul", gates["i"], g, name="ig"),
            name="c",
        )
        # The output gate looks at the new cell state.
        out = gates["o"] if self._peephole is None else self._look("o", before["o"], c_next)
        h_cell = "h" if self._R is None else "h_cell"
        h_next = emit.op("Mul", out, self._squash(c_next, "squashed"), name=h_cell)
        if self._R is not None:
            h_next = emit.op("MatMul", h_next, self._R, name="h")
        return h_next, c_next
