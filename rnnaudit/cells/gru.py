"""GRU cells in both reset conventions, which are different networks.

With q = U_n h + c_n and slopes written r', z', n':
reset after  δh' = z δh + (h − n) z' U_z δh + (1 − z) n' (q r' U_r δh + r U_n δh)
reset before δh' = z δh + (h − n) z' U_z δh + (1 − z) n' U_n (h r' U_r δh + r δh).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.cells.activations import clipped_complement, clipped_slope, clipped_value
from rnnaudit.cells.interface import drive, gate_values, linearize, next_state
from rnnaudit.model import GRUCell


@dataclass(frozen=True, slots=True, eq=False)
class _Gates:
    """Values of one step: pre-activations a, gates r, z, 1 − z, candidate n, recurrent part q."""

    a_r: Tensor
    a_z: Tensor
    a_n: Tensor
    r: Tensor
    z: Tensor
    rest: Tensor
    n: Tensor
    q: Tensor


def _gates(cell: GRUCell, s: Tensor, drive_: Tensor) -> _Gates:
    H = cell.hidden_size
    x_r, x_z, x_n = drive_.chunk(3, dim=-1)
    U = cell.U if cell.reset_after else cell.U[: 2 * H]
    u = s @ U.mT + cell.b_recurrent[: len(U)]
    a_r, a_z = x_r + u[..., :H], x_z + u[..., H : 2 * H]
    r = clipped_value(cell.gate, a_r, cell.clip)
    z = clipped_value(cell.gate, a_z, cell.clip)
    rest = clipped_complement(cell.gate, a_z, cell.clip)
    if cell.reset_after:
        q = u[..., 2 * H :]
        a_n = x_n + r * q
    else:
        q = (r * s) @ cell.U[2 * H :].mT + cell.b_recurrent[2 * H :]
        a_n = x_n + q
    n = clipped_value(cell.candidate, a_n, cell.clip)
    return _Gates(a_r, a_z, a_n, r, z, rest, n, q)


@drive.register(GRUCell)
def _(cell: GRUCell, x: Tensor) -> Tensor:
    return x @ cell.W.mT + cell.b_input


@gate_values.register(GRUCell)
def _(cell: GRUCell, s: Tensor, z: Tensor) -> Mapping[str, Tensor]:
    gates = _gates(cell, s, z)
    return {"update z": gates.z, "reset r": gates.r}


@next_state.register(GRUCell)
def _(cell: GRUCell, s: Tensor, z: Tensor) -> Tensor:
    gates = _gates(cell, s, z)
    return gates.rest * gates.n + gates.z * s


@dataclass(frozen=True, slots=True, eq=False)
class _GRU:
    """Diagonals of the derivative, each [..., H]."""

    U: Tensor  # [3H, H], gates r, z, n
    keep: Tensor  # z
    D_z: Tensor  # (h − n) z'
    D_n: Tensor  # (1 − z) n'
    D_r: Tensor  # q r' (reset after) or h r' (reset before)
    r: Tensor
    reset_after: bool

    @property
    def _H(self) -> int:
        return int(self.U.shape[1])

    @property
    def _diagonals(self) -> tuple[Tensor, ...]:
        return self.keep, self.D_z, self.D_n, self.D_r, self.r

    def jvp(self, V: Tensor) -> Tensor:
        keep, D_z, D_n, D_r, r = (d.unsqueeze(-2) for d in self._diagonals)
        if self.reset_after:
            a_r, a_z, a_n = (V @ self.U.mT).chunk(3, dim=-1)
            inner = D_r * a_r + r * a_n
        else:
            a_r, a_z = (V @ self.U[: 2 * self._H].mT).chunk(2, dim=-1)
            inner = (D_r * a_r + r * V) @ self.U[2 * self._H :].mT
        return keep * V + D_z * a_z + D_n * inner

    def vjp(self, V: Tensor) -> Tensor:
        keep, D_z, D_n, D_r, r = (d.unsqueeze(-2) for d in self._diagonals)
        through = keep * V
        if self.reset_after:
            inner = D_n * V
            da = torch.cat([D_r * inner, D_z * V, r * inner], dim=-1)
        else:
            inner = (D_n * V) @ self.U[2 * self._H :]
            da = torch.cat([D_r * inner, D_z * V], dim=-1)
            through = through + r * inner
        return through + da @ self.U[: da.shape[-1]]

    def matrix(self) -> Tensor:
        U_r, U_z, U_n = self.U.chunk(3)
        _, D_z, D_n, D_r, r = (d.unsqueeze(-1) for d in self._diagonals)
        J = D_z * U_z
        if self.reset_after:
            J.addcmul_(D_n * D_r, U_r).addcmul_(D_n * r, U_n)
        else:
            inner = D_r * U_r
            inner.diagonal(dim1=-2, dim2=-1).add_(self.r)
            J.addcmul_(D_n, U_n @ inner)
        J.diagonal(dim1=-2, dim2=-1).add_(self.keep)
        return J


@linearize.register(GRUCell)
def _(cell: GRUCell, s: Tensor, z: Tensor) -> _GRU:
    gates = _gates(cell, s, z)
    slope_r = clipped_slope(cell.gate, gates.a_r, cell.clip)
    slope_z = clipped_slope(cell.gate, gates.a_z, cell.clip)
    slope_n = clipped_slope(cell.candidate, gates.a_n, cell.clip)
    return _GRU(
        cell.U,
        keep=gates.z,
        D_z=(s - gates.n) * slope_z,
        D_n=gates.rest * slope_n,
        D_r=(gates.q if cell.reset_after else s) * slope_r,
        r=gates.r,
        reset_after=cell.reset_after,
    )
