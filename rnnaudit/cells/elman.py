"""Elman cells: J = Σ W with Σ the diagonal of slopes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rnnaudit.cells.activations import clipped_slope, clipped_value
from rnnaudit.cells.interface import drive, linearize, next_state
from rnnaudit.model import ElmanCell


@drive.register(ElmanCell)
def _(cell: ElmanCell, x: Tensor) -> Tensor:
    return x @ cell.U.mT + cell.b


@next_state.register(ElmanCell)
def _(cell: ElmanCell, s: Tensor, z: Tensor) -> Tensor:
    return clipped_value(cell.activation, z + s @ cell.W.mT, cell.clip)


@dataclass(frozen=True, slots=True, eq=False)
class _Elman:
    W: Tensor
    slope: Tensor  # [..., H]

    def jvp(self, V: Tensor) -> Tensor:
        return self.slope.unsqueeze(-2) * (V @ self.W.mT)

    def vjp(self, V: Tensor) -> Tensor:
        return (V * self.slope.unsqueeze(-2)) @ self.W

    def matrix(self) -> Tensor:
        return self.slope.unsqueeze(-1) * self.W


@linearize.register(ElmanCell)
def _(cell: ElmanCell, s: Tensor, z: Tensor) -> _Elman:
    return _Elman(cell.W, clipped_slope(cell.activation, z + s @ cell.W.mT, cell.clip))
