"""Cells over time: trajectories of one cell, outputs of a layer and of a stack.

Sequences are batch first, x [N, T, I]. A reverse recurrence is run on the flipped
sequence, and its states are returned in the order of its own steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rnnaudit.cells.interface import advance, drive, output
from rnnaudit.model import Cell, Layer, Recurrence, Stack


def trajectory(cell: Cell, x: Tensor, start: Tensor) -> Tensor:
    """Return the states s_1 … s_T [N, T, S] that follow ``start`` ([S] or [N, S]) under x."""
    z = drive(cell, x)
    s = start.to(x).expand(x.shape[0], cell.state_size)
    states = x.new_empty(*x.shape[:2], cell.state_size)
    for t in range(x.shape[1]):
        s = advance(cell, s, z[:, t])
        states[:, t] = s
    return states


def reads(recurrence: Recurrence, x: Tensor) -> Tensor:
    """Return x [N, T, I] in the order in which the recurrence reads it."""
    return x.flip(1) if recurrence.reverse else x


def run(recurrence: Recurrence, x: Tensor) -> Tensor:
    """Return the outputs h [N, T, H] of a recurrence, aligned with x [N, T, I]."""
    states = trajectory(recurrence.cell, reads(recurrence, x), recurrence.initial.value)
    return reads(recurrence, output(recurrence.cell, states))


def truncated(recurrence: Recurrence, x: Tensor, depth: int, block: int = 1) -> Tensor:
    """Return the outputs [N, T, H] when each sees its last ``depth`` inputs only.

    ``depth`` Jacobi sweeps over the whole sequence: H⁽⁰⁾ = s_start, H⁽ʲ⁾_t = φ(H⁽ʲ⁻¹⁾_{t−1}, x_t),
    so that outputs with t ≤ depth are exact. With a ``block`` C above 1 the state is restarted
    once for every C outputs, depth − 1 steps before the first: they see up to C − 1 inputs more.
    """
    cell, T = recurrence.cell, x.shape[1]
    z = drive(cell, reads(recurrence, x))
    if block > 1:
        return reads(recurrence, output(cell, _restarted(recurrence, z, depth - 1, block)))
    states = recurrence.initial.value.to(x).repeat(x.shape[0], T + 1, 1)
    for j in range(min(depth, T)):  # H⁽ʲ⁾ is exact up to t = j, so only later steps change
        states[:, j + 1 :] = advance(cell, states[:, j:-1], z[:, j:])
    return reads(recurrence, output(cell, states[:, 1:]))


def _restarted(recurrence: Recurrence, z: Tensor, warm_up: int, block: int) -> Tensor:
    """Return the states [N, T, S] of blocks that each run ``warm_up`` steps before they count.

    The first block counts from its first step. z [N, T, …] is the drive.
    """
    cell, T = recurrence.cell, z.shape[1]
    start = recurrence.initial.value.to(z).expand(z.shape[0], cell.state_size)
    states = z.new_empty(z.shape[0], T, cell.state_size)
    for first in range(0, max(1, T - warm_up), block):
        s, counts = start, first + warm_up if first else 0
        for t in range(first, min(first + warm_up + block, T)):
            s = advance(cell, s, z[:, t])
            if t >= counts:
                states[:, t] = s
    return states


def run_layer(layer: Layer, x: Tensor) -> Tensor:
    """Return the outputs [N, T, F] of a layer, its directions side by side."""
    return torch.cat([run(r, x) for r in layer.recurrences], dim=-1)


def run_stack(
    stack: Stack,
    x: Tensor,
    depths: Mapping[str, int] | None = None,
    blocks: Mapping[str, int] | None = None,
) -> Tensor:
    """Return the outputs [N, T, O] of a stack, through its readout where it has one.

    Args:
        stack: The layers and the readout.
        x: Inputs [N, T, I].
        depths: Truncation depth by ``Recurrence.label``; a recurrence without one runs in full.
        blocks: Steps between restarts, as in ``truncated``, by the same labels; 1 without.
    """
    depths, blocks = depths or {}, blocks or {}
    for layer in stack.layers:
        x = torch.cat(
            [
                truncated(r, x, depths[r.label], blocks.get(r.label, 1))
                if r.label in depths
                else run(r, x)
                for r in layer.recurrences
            ],
            dim=-1,
        )
    return readout(stack, x)


def readout(stack: Stack, h: Tensor) -> Tensor:
    """Apply the stack's readout to the last layer's outputs h [..., F]; identity without one."""
    return h @ stack.readout.A.mT + stack.readout.b if stack.readout else h
