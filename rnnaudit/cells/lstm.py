"""LSTM cells with everything ONNX and PyTorch can add: peepholes, coupling, clip, projection.

With a = W x + U h + b, every derivative is four products and two diagonals:
δc' = F δc + D_i U_i δh + D_f U_f δh + D_g U_g δh,  δh' = R (B δc' + O U_o δh), where
D_i = g i' (or (g − c) i' when f = 1 − i), D_f = c f', D_g = i g', F = f + D_f p_f + D_i p_i,
O = tanh(c') o', B = o tanh'(c') + O p_o.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.cells.activations import clipped_complement, clipped_slope, clipped_value
from rnnaudit.cells.interface import drive, gate_values, linearize, next_state
from rnnaudit.model import LSTMCell


@dataclass(frozen=True, slots=True, eq=False)
class _Gates:
    """Values of one step; ``a_*`` are pre-activations with their peephole terms."""

    a_i: Tensor
    a_f: Tensor
    a_g: Tensor
    a_o: Tensor
    i: Tensor
    f: Tensor
    g: Tensor
    o: Tensor
    c: Tensor
    c_next: Tensor


def _gates(cell: LSTMCell, s: Tensor, z: Tensor) -> _Gates:
    h, c = s[..., : cell.hidden_size], s[..., cell.hidden_size :]
    a_i, a_f, a_g, a_o = (z + h @ cell.U.mT).chunk(4, dim=-1)
    if cell.peephole is not None:
        p_i, p_f, p_o = cell.peephole
        a_i, a_f = a_i + p_i * c, a_f + p_f * c
    i = clipped_value(cell.gate, a_i, cell.clip)
    if cell.input_forget:
        f = clipped_complement(cell.gate, a_i, cell.clip)
    else:
        f = clipped_value(cell.gate, a_f, cell.clip)
    g = clipped_value(cell.candidate, a_g, cell.clip)
    c_next = f * c + i * g
    if cell.peephole is not None:
        a_o = a_o + p_o * c_next
    o = clipped_value(cell.gate, a_o, cell.clip)
    return _Gates(a_i, a_f, a_g, a_o, i, f, g, o, c, c_next)


def _squash_clip(cell: LSTMCell) -> float | None:
    return cell.clip if cell.clip_output else None


@drive.register(LSTMCell)
def _(cell: LSTMCell, x: Tensor) -> Tensor:
    return x @ cell.W.mT + cell.b


@gate_values.register(LSTMCell)
def _(cell: LSTMCell, s: Tensor, z: Tensor) -> Mapping[str, Tensor]:
    gates = _gates(cell, s, z)
    return {"forget f": gates.f, "input i": gates.i, "output o": gates.o}


@next_state.register(LSTMCell)
def _(cell: LSTMCell, s: Tensor, z: Tensor) -> Tensor:
    gates = _gates(cell, s, z)
    h = gates.o * clipped_value(cell.squash, gates.c_next, _squash_clip(cell))
    if cell.projection is not None:
        h = h @ cell.projection.mT
    return torch.cat([h, gates.c_next], dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class _LSTM:
    """Weights, and the diagonals of the derivative, each [..., H]."""

    U: Tensor  # [4H, P], gates i, f, g, o
    R: Tensor | None  # [P, H]
    D_i: Tensor
    D_f: Tensor
    D_g: Tensor
    F: Tensor
    B: Tensor
    O: Tensor  # noqa: E741

    @property
    def _H(self) -> int:
        return int(self.U.shape[0]) // 4

    @property
    def _diagonals(self) -> tuple[Tensor, ...]:
        return self.D_i, self.D_f, self.D_g, self.F, self.B, self.O

    def jvp(self, V: Tensor) -> Tensor:
        P = self.U.shape[1]
        D_i, D_f, D_g, F, B, O = (d.unsqueeze(-2) for d in self._diagonals)  # noqa: E741
        a_i, a_f, a_g, a_o = (V[..., :P] @ self.U.mT).chunk(4, dim=-1)
        dc = F * V[..., P:] + D_i * a_i + D_f * a_f + D_g * a_g
        dh = B * dc + O * a_o
        if self.R is not None:
            dh = dh @ self.R.mT
        return torch.cat([dh, dc], dim=-1)

    def vjp(self, V: Tensor) -> Tensor:
        P = self.U.shape[1]
        D_i, D_f, D_g, F, B, O = (d.unsqueeze(-2) for d in self._diagonals)  # noqa: E741
        dh = V[..., :P] if self.R is None else V[..., :P] @ self.R
        dc = V[..., P:] + B * dh
        da = torch.cat([D_i * dc, D_f * dc, D_g * dc, O * dh], dim=-1)
        return torch.cat([da @ self.U, F * dc], dim=-1)

    def matrix(self) -> Tensor:
        P, H = self.U.shape[1], self._H
        U_i, U_f, U_g, U_o = self.U.chunk(4)
        D_i, D_f, D_g, F, B, O = (d.unsqueeze(-1) for d in self._diagonals)  # noqa: E741
        J = self.F.new_empty(*self.F.shape[:-1], P + H, P + H)
        h_by_h, h_by_c = J[..., :P, :P], J[..., :P, P:]
        c_by_h, c_by_c = J[..., P:, :P], J[..., P:, P:]
        torch.mul(D_i, U_i, out=c_by_h).addcmul_(D_f, U_f).addcmul_(D_g, U_g)
        c_by_c.zero_().diagonal(dim1=-2, dim2=-1).copy_(self.F)
        if self.R is None:
            torch.mul(B, c_by_h, out=h_by_h).addcmul_(O, U_o)
            h_by_c.zero_().diagonal(dim1=-2, dim2=-1).copy_(self.B * self.F)
        else:
            h_by_h.copy_(self.R @ (B * c_by_h).addcmul_(O, U_o))
            torch.mul(self.R, (B * F).mT, out=h_by_c)
        return J


@linearize.register(LSTMCell)
def _(cell: LSTMCell, s: Tensor, z: Tensor) -> _LSTM:
    gates = _gates(cell, s, z)
    slope_i = clipped_slope(cell.gate, gates.a_i, cell.clip)
    if cell.input_forget:
        D_i, D_f = (gates.g - gates.c) * slope_i, torch.zeros_like(slope_i)
    else:
        D_i = gates.g * slope_i
        D_f = gates.c * clipped_slope(cell.gate, gates.a_f, cell.clip)
    D_g = gates.i * clipped_slope(cell.candidate, gates.a_g, cell.clip)
    squashed = clipped_value(cell.squash, gates.c_next, _squash_clip(cell))
    O = squashed * clipped_slope(cell.gate, gates.a_o, cell.clip)  # noqa: E741
    B = gates.o * clipped_slope(cell.squash, gates.c_next, _squash_clip(cell))
    F = gates.f
    if cell.peephole is not None:
        p_i, p_f, p_o = cell.peephole
        F = F + D_f * p_f + D_i * p_i
        B = B + O * p_o
    return _LSTM(cell.U, cell.projection, D_i, D_f, D_g, F, B, O)
