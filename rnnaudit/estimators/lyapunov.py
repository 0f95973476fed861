"""Lyapunov exponents by QR on tangent vectors of the joint state (Benettin et al., 1980).

Tangents follow the exact derivative: finite perturbations would hit the rounding floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.model import Recurrence
from rnnaudit.results import LyapunovExponent

_ENOUGH = 8  # sequences from which their means alone give the error bar
_BLOCKS = 10  # blocks of each sequence where there are fewer


@dataclass(frozen=True, slots=True)
class Spectrum:
    """The largest exponents, in nats per step and descending, with standard errors.

    An exponent is None where tangents vanish exactly (its exponent is −∞).
    """

    values: tuple[float | None, ...]
    stderrs: tuple[float | None, ...]
    steps: int


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
    found = spectrum(recurrence, x, count=1, transient=transient, seed=seed)
    value, stderr = found.values[0], found.stderrs[0]
    if value is None or stderr is None:
        return None
    return LyapunovExponent(value, stderr, found.steps)


def spectrum(
    recurrence: Recurrence,
    x: Tensor,
    *,
    count: int = 10,
    transient: int | None = None,
    seed: int = 0,
) -> Spectrum:
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
    V = torch.randn(N, count, cell.state_size, generator=rng, dtype=torch.float64)
    V = torch.linalg.qr(V.mT).Q.mT
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


def _summary(growth: Tensor) -> Spectrum:
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
    return Spectrum(tuple(values), tuple(stderrs), steps * N)
