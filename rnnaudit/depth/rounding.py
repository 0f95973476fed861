"""How far a truncated run is from the full one, and how far that says more than rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rnnaudit.model import Readout
from rnnaudit.results import Norm

MERGED = 1e-12
"""Two states that agree to this, relative to the largest |s| or 1, count as merged.

It is 10⁶ below the smallest ε that reports use and 10³ above float64's rounding of such states,
so a merged restart would have to be magnified a million times before it could matter.
"""

RESOLVED = 2.0**-43
"""An error is told apart from rounding where it exceeds this, relative to the largest |s| or 1."""


def floor_for(eps: float) -> float:
    """Return the difference of states that counts as merged where ε is asked: 10⁻⁶ ε or less."""
    return min(MERGED, 1e-6 * eps) if eps > RESOLVED else MERGED


def read(gap: Tensor, readout: Readout | None) -> Tensor:
    """Return the deviation of what is read from outputs that are off by ``gap`` [..., H]."""
    return gap if readout is None else gap @ readout.A.mT


def norm_of(gap: Tensor, norm: Norm) -> Tensor:
    """Return the norm over the last axis; what is not a number counts as infinite."""
    found = gap.abs().amax(-1) if norm == "max" else torch.linalg.vector_norm(gap, dim=-1)
    return found.nan_to_num(nan=math.inf, posinf=math.inf)


def resolutions(
    states: Tensor, units: int, readout: Readout | None, norm: Norm
) -> tuple[float, ...]:
    """Return for each of states [T, N, S] the smallest error that rounding cannot explain.

    0 where states are not finite: every error is infinite there.
    """
    largest = states.abs().amax((0, 2)).clamp(min=1).nan_to_num(nan=0.0, posinf=0.0)
    gain = states.new_ones(units) if readout is None else readout.A.abs().sum(1)
    spread = float(norm_of(gain, norm)) if len(gain) else 0.0
    return tuple((RESOLVED * largest * spread).tolist())
