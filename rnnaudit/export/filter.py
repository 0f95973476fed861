"""Linear cells as one causal convolution: a finite impulse response of k taps.

h_t = Σ_{j<m} A^j (B x_{t−j} + c) + A^m s_start with m = min(t, k). What does not depend on
the inputs, p_m = Σ_{j<m} A^j c + A^m s_start, is the sum of its differences over a channel
of ones, so that one Conv over the sequence with zeros before it is exact from the first step.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from rnnaudit.cells.activations import parameters
from rnnaudit.export.emit import INT64_MAX, Emitter
from rnnaudit.export.sequences import Sequences, States, Wanted, final_rows, half, largest
from rnnaudit.model import Cell, ElmanCell, Recurrence

MOST_TAPS = 2**24
"""Numbers that the taps of one recurrence may have: 64 MiB in float32."""


def linear_map(cell: Cell) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return A, B and c of a cell h' = A h + B x + c; None where the cell is not linear."""
    if not isinstance(cell, ElmanCell) or cell.clip is not None:
        return None
    if cell.activation.name != "affine":
        return None
    alpha, beta = parameters(cell.activation)
    return alpha * cell.W, alpha * cell.U, alpha * cell.b + beta


def taps(recurrence: Recurrence, depth: int) -> Tensor:
    """Return the taps [H, I, k], nearest input first, with a channel of ones where one is needed.

    Raises:
        ValueError: The cell is not linear.
    """
    found = linear_map(recurrence.cell)
    if found is None:
        raise ValueError(f"a linear cell was wanted, got {recurrence.label}")
    A, B, c = found
    s = recurrence.initial.value
    constant = bool(c.any()) or bool(s.any())
    # The ones' taps are p_1, then p_{m+1} − p_m = A^m (c + A s − s).
    columns = torch.cat([B, (c + A @ s - s).unsqueeze(1)], dim=1) if constant else B
    found_taps = []
    for _ in range(depth):
        found_taps.append(columns)
        columns = A @ columns
    result = torch.stack(found_taps, dim=-1)
    if constant:
        result[:, -1, 0] += s
    return result


def filtered(
    emit: Emitter, recurrence: Recurrence, x: Sequences, depth: int, *, wanted: Wanted
) -> States:
    """Write a linear recurrence in which every step sees its last ``depth`` inputs only."""
    weights, reverse = taps(recurrence, depth), recurrence.reverse
    source = emit.op("Transpose", x.x, name="x_channels", perm=[1, 2, 0])
    if weights.shape[1] > x.width:
        shape = emit.op("Concat", x.batch, emit.integers(1), x.steps, name="ones_shape", axis=0)
        ones = emit.op("Expand", emit.constant(torch.ones(1, 1, 1), "one"), shape, name="ones")
        source = emit.op("Concat", source, ones, name="x_and_ones", axis=1)

    def convolved(first: int, end: int, name: str) -> ir.Value:
        """Write the sum over the taps from ``first`` up to ``end``."""
        part = weights[..., first:end]
        kernel = emit.constant(part if reverse else part.flip(-1), f"{name}_taps")
        # Zeros stand before the sequence; the convolution reads from the oldest input on.
        pads = [0, end - 1] if reverse else [end - 1, 0]
        y = emit.op("Conv", source, kernel, name=name, pads=pads)
        if first == 0:
            return y
        start = emit.integers(first if reverse else 0)
        stop = emit.integers(INT64_MAX) if reverse else x.steps
        return emit.op("Slice", y, start, stop, emit.integers(2), name=f"{name}_in_time")

    gap = None
    if wanted.guard and depth > half(depth):
        rest = convolved(half(depth), depth, "older")
        gap = largest(emit, rest)
        y = emit.op("Add", convolved(0, half(depth), "recent"), rest, name="h_channels")
    else:
        y = convolved(0, depth, "h_channels")
        if wanted.guard:
            gap = emit.constant(torch.zeros(1), "gap")
    turned = emit.op("Transpose", y, name="h_steps", perm=[2, 0, 1])
    rows = emit.op("Reshape", turned, emit.integers(-1, recurrence.cell.hidden_size), name="h_rows")
    final = {
        part: final_rows(emit, rows, recurrence, x.batch, f"{'hc'[part]}_last")
        for part in wanted.parts
    }
    return States(rows, final, gap)
