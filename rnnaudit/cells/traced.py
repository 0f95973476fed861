"""Traced cells: the graph's own step, evaluated for many states at once, and autodiff."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.cells.interface import drive, linearize, next_state
from rnnaudit.cells.operators import Value, apply
from rnnaudit.model import Port, TracedCell


@drive.register(TracedCell)
def _(cell: TracedCell, x: Tensor) -> Tensor:
    return x


@next_state.register(TracedCell)
def _(cell: TracedCell, s: Tensor, z: Tensor) -> Tensor:
    batch = torch.broadcast_shapes(s.shape[:-1], z.shape[:-1])
    s = s.expand(*batch, s.shape[-1]).reshape(-1, s.shape[-1])
    z = z.expand(*batch, z.shape[-1]).reshape(-1, z.shape[-1])
    values = evaluate(cell, s, z)
    rows = len(s)
    parts = [values[name] for name in cell.next_states]
    flat = [
        part.tensor.reshape(rows, -1)
        if part.batched
        else part.tensor.reshape(1, -1).expand(rows, -1)
        for part in parts
    ]
    return torch.cat(flat, dim=-1).reshape(*batch, -1)


def evaluate(cell: TracedCell, s: Tensor, x: Tensor) -> dict[str, Value]:
    """Run the operators on states s [N, S] and inputs x [N, I]; return every value by name."""
    values = {name: Value(tensor, False) for name, tensor in cell.constants.items()}
    for ports, given in ((cell.states, s), (cell.inputs, x)):
        widths = [port.size for port in ports]
        for port, part in zip(ports, given.split(widths, dim=-1), strict=True):
            values[port.name] = _entering(port, part)
    for operation in cell.operations:
        inputs = [values[name] if name else None for name in operation.inputs]
        results = apply(operation.op, operation.attributes, inputs, len(operation.outputs))
        values.update(zip(operation.outputs, results, strict=False))
    return values


def _entering(port: Port, part: Tensor) -> Value:
    shaped = Value(part.reshape(len(part), *port.shape), True)
    if port.kind == "bool":
        return Value(shaped.tensor > 0.5, True)
    return Value(shaped.tensor.round().long(), True) if port.kind == "int" else shaped


@dataclass(frozen=True, slots=True, eq=False)
class _Traced:
    """The derivative at states s [..., S] under inputs z [..., I], by automatic differentiation."""

    cell: TracedCell
    s: Tensor
    z: Tensor

    def _spread(self, V: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return each state once for each of its vectors, and the step from there."""
        z = self.z.unsqueeze(-2)
        return self.s.unsqueeze(-2).expand_as(V).contiguous(), lambda s: next_state(self.cell, s, z)

    def jvp(self, V: Tensor) -> Tensor:
        s, step = self._spread(V)
        tangent: Tensor = torch.func.jvp(step, (s,), (V.contiguous(),))[1]
        return tangent

    def vjp(self, V: Tensor) -> Tensor:
        s, step = self._spread(V)
        pulled: Tensor = torch.func.vjp(step, s)[1](V)[0]
        return pulled

    def matrix(self) -> Tensor:
        S = self.s.shape[-1]
        return self.vjp(torch.eye(S, dtype=self.s.dtype).expand(*self.s.shape[:-1], S, S))


@linearize.register(TracedCell)
def _(cell: TracedCell, s: Tensor, z: Tensor) -> _Traced:
    batch = torch.broadcast_shapes(s.shape[:-1], z.shape[:-1])
    return _Traced(cell, s.expand(*batch, -1), z.expand(*batch, -1))
