"""Lyapunov exponents by QR on tangent vectors of the joint state (Benettin et al., 1980).

Tangents follow the exact derivative: finite perturbations would hit the rounding floor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.model import Recurrence
from rnnaudit.results import LyapunovExponent, LyapunovSpectrum

_ENOUGH = 8  # sequences from which their means alone give the error bar
_BLOCKS = 10  # blocks of each sequence where there are fewer


def lyapunov(
    recurrence: Recurrence, x: Tensor, *, transient: int | None = None, seed: int = 0
) -> LyapunovExponent | None:
    """Return the largest exponent on the trajectories of x [N, T, I].

    None where it is −∞ (the state forgets completely in finite time), or where no
    trajectory stays finite.

    Args:
        recurrence: The cell, its start and its direction.
        x: Inputs, aligned with time.
        transient: Steps dropped at the start of each sequence; a quarter by default.
        seed: For the first tangents.
    """
    return spectrum(recurrence, x, count=1, transient=transient, seed=seed).largest


def spectrum(
    recurrence: Recurrence,
    x: Tensor,
    *,
    count: int = 10,
    transient: int | None = None,
    seed: int = 0,
) -> LyapunovSpectrum:
    """Return the ``count`` largest exponents on the trajectories of x [N, T, I].

    The error bar is that of the sequences' means, or of ten blocks' means for each where
    there are fewer than eight sequences.
    """
    cell = recurrence.cell
    count = min(count, cell.state_size)
    x = cells.reads(recurrence, x)
    N, T, _ = x.shape
    dropped = T // 4 if transient is None else min(transient, T - 1)
    rng = torch.Generator().manual_seed(seed)
    # The first tangent is drawn first, so that Λ₁ does not depend on how many are asked for.
    V = torch.randn(count, N, cell.state_size, generator=rng, dtype=torch.float64)
    V = torch.linalg.qr(V.transpose(0, 1).mT).Q.mT
    s = recurrence.initial.value.expand(N, -1)
    growth = x.new_zeros(T - dropped, N, count)
    for t in range(T):
        z = cells.drive(cell, x[:, t])
        V = cells.linearize(cell, s, z).jvp(V)
        if count == 1:
            R = V.norm(dim=-1)
            V = V / R.clamp(min=1e-300).unsqueeze(-1)
        else:
            Q, triangle = torch.linalg.qr(V.mT)
            V, R = Q.mT, triangle.diagonal(dim1=-2, dim2=-1).abs()
        if t >= dropped:
            growth[t - dropped] = R.log()
        s = cells.advance(cell, s, z)
    growth = growth[:, s.isfinite().all(-1)]
    return _summary(growth)


def _summary(growth: Tensor) -> LyapunovSpectrum:
    """Average logarithms of growth [T', N, m] over steps and sequences."""
    steps, N, count = growth.shape
    if N >= _ENOUGH:
        means = growth.mean(0)
    else:
        blocks = growth.tensor_split(min(_BLOCKS, steps))
        means = torch.cat([block.mean(0) for block in blocks])
    values: list[float | None] = []
    stderrs: list[float | None] = []
    for i in range(count):
        value = float(growth[..., i].mean()) if N else math.nan
        known = math.isfinite(value)
        several = len(means) > 1
        values.append(value if known else None)
        spread = float(means[:, i].std()) / math.sqrt(len(means)) if known and several else 0.0
        stderrs.append(spread if known else None)
    return LyapunovSpectrum(tuple(values), tuple(stderrs), steps * N)
