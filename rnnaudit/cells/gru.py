"""GRU cells in both reset conventions, which are different networks.

With q = U_n h + c_n and slopes written r', z', n':
reset after  δh' = z δh + (h − n) z' U_z δh + (1 − z) n' (q r' U_r δh + r U_n δh)
reset before δh' = z δh + (h − n) z' U_z δh + (1 − z) n' U_n (h r' U_r δh + r δh).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rnnaudit.cells.activations import clipped_complement, clipped_slope, clipped_value
from rnnaudit.cells.interface import advance, drive, linearize
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
    x_r, x_z, x_n = drive_.split(H, dim=-1)
    if cell.reset_after:
        u_r, u_z, q = (s @ cell.U.mT + cell.b_recurrent).split(H, dim=-1)
    else:
        u_r, u_z = (s @ cell.U[: 2 * H].mT + cell.b_recurrent[: 2 * H]).split(H, dim=-1)
        q = u_r  # replaced below, once r is known
    a_r, a_z = x_r + u_r, x_z + u_z
    r = clipped_value(cell.gate, a_r, cell.clip)
    z = clipped_value(cell.gate, a_z, cell.clip)
    rest = clipped_complement(cell.gate, a_z, cell.clip)
    if cell.reset_after:
        a_n = x_n + r * q
    else:
        q = (r * s) @ cell.U[2 * H :].mT + cell.b_recurrent[2 * H :]
        a_n = x_n + q
    n = clipped_value(cell.candidate, a_n, cell.clip)
    return _Gates(a_r, a_z, a_n, r, z, rest, n, q)


@drive.register(GRUCell)
def _(cell: GRUCell, x: Tensor) -> Tensor:
    return x @ cell.W.mT + cell.b_input


@advance.register(GRUCell)
def _(cell: GRUCell, s: Tensor, z: Tensor) -> Tensor:
    gates = _gates(cell, s, z)
    return gates.rest * gates.n + gates.z * s


@dataclass(frozen=True, slots=True, eq=False)
class _GRU:
    """Diagonals of the derivative, each [..., H]: keep δh + D_z U_z δh + D_n (…)."""

    U_r: Tensor
    U_z: Tensor
    U_n: Tensor
    keep: Tensor  # z
    D_z: Tensor  # (h − n) z'
    D_n: Tensor  # (1 − z) n'
    inner_r: Tensor  # q r' (reset after) or h r' (reset before)
    r: Tensor
    reset_after: bool

    def jvp(self, V: Tensor) -> Tensor:
        keep, D_z, D_n, inner, r = (
            d.unsqueeze(-2) for d in (self.keep, self.D_z, self.D_n, self.inner_r, self.r)
        )
        reset = inner * (V @ self.U_r.mT)
        if self.reset_after:
            candidate = reset + r * (V @ self.U_n.mT)
        else:
            candidate = (reset + r * V) @ self.U_n.mT
        return keep * V + D_z * (V @ self.U_z.mT) + D_n * candidate

    def vjp(self, V: Tensor) -> Tensor:
        keep, D_z, D_n, inner, r = (
            d.unsqueeze(-2) for d in (self.keep, self.D_z, self.D_n, self.inner_r, self.r)
        )
        candidate = D_n * V
        if self.reset_after:
            through = (inner * candidate) @ self.U_r + (r * candidate) @ self.U_n
        else:
            back = candidate @ self.U_n
            through = (inner * back) @ self.U_r + r * back
        return keep * V + (D_z * V) @ self.U_z + through

    def matrix(self) -> Tensor:
        J = self.D_z.unsqueeze(-1) * self.U_z
        if self.reset_after:
            J.addcmul_((self.D_n * self.inner_r).unsqueeze(-1), self.U_r)
            J.addcmul_((self.D_n * self.r).unsqueeze(-1), self.U_n)
        else:
            middle = self.inner_r.unsqueeze(-1) * self.U_r
            middle.diagonal(dim1=-2, dim2=-1).add_(self.r)
            J += self.D_n.unsqueeze(-1) * (self.U_n @ middle)
        J.diagonal(dim1=-2, dim2=-1).add_(self.keep)
        return J


@linearize.register(GRUCell)
def _(cell: GRUCell, s: Tensor, z: Tensor) -> _GRU:
    gates = _gates(cell, s, z)
    slope_r = clipped_slope(cell.gate, gates.a_r, cell.clip)
    slope_z = clipped_slope(cell.gate, gates.a_z, cell.clip)
    slope_n = clipped_slope(cell.candidate, gates.a_n, cell.clip)
    U_r, U_z, U_n = cell.U.split(cell.hidden_size)
    return _GRU(
        U_r,
        U_z,
        U_n,
        keep=gates.z,
        D_z=(s - gates.n) * slope_z,
        D_n=gates.rest * slope_n,
        inner_r=(gates.q if cell.reset_after else s) * slope_r,
        r=gates.r,
        reset_after=cell.reset_after,
    )
