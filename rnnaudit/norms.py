"""Matrix norms with the side on which they err in their name.

What decides is one fact: a symmetric matrix that float64 could factor is positive
definite, up to a residual that is computed and bounded. The bound on the residual uses
only the standard model of a dot product (any order of summation, with or without fused
multiply-add): |fl(xᵀy) − xᵀy| ≤ γ_n |x|ᵀ|y| plus what underflow can lose (Higham, 2002, §3.1).
How LAPACK found the factor is therefore irrelevant.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rnnaudit.errors import UnsupportedModelError

UNIT = 2.0**-53
"""Unit roundoff u of float64."""

TINY = 2.0**-1000
"""Exceeds whatever underflow can lose in one product, flushed to zero or not, by 2²²."""


def gamma(n: int) -> float:
    """Return an upper bound on γ_n = n u / (1 − n u), itself rounded up."""
    return n * UNIT * (1 + 1e-9) if n < 2**20 else n * UNIT * 1.001


def up(value: float, steps: int = 1) -> float:
    """Return ``value`` moved ``steps`` floats towards +∞."""
    for _ in range(steps):
        value = math.nextafter(value, math.inf)
    return value


def proves_positive_definite(M: Tensor, error: float = 0.0) -> bool:
    """Prove that every symmetric matrix within ``error`` of M [n, n] (in ‖·‖₂) is positive definite.

    True is a proof; False says nothing. Entries should be near 1 in size: the method is
    that of Rump (2006) with the residual computed instead of bounded beforehand.
    """
    n = M.shape[0]
    if n == 0:
        return True
    if not bool(torch.isfinite(M).all()) or not math.isfinite(error) or not torch.equal(M, M.mT):
        return False
    # Any factor will do: shift by what the residual is expected to be, then measure it.
    trace = float(M.diagonal().clamp(min=0).sum())
    shift = 4 * gamma(n + 3) * trace + 2 * error + n * n * TINY
    L, info = torch.linalg.cholesky_ex(M - shift * torch.eye(n, dtype=M.dtype))
    if int(info) != 0 or not bool(torch.isfinite(L).all()):
        return False
    L = L.tril()
    # M = L Lᵀ + E, so λ_min(M) ≥ λ_min(E), and E is near shift·I. With S the computed
    # M − L Lᵀ (n products and one more sum): |E − S| ≤ γ_{n+1}(|L||L|ᵀ + |M|) + (n+1) TINY
    # entrywise, hence in ‖·‖₂ by the Frobenius norm of the right side. That sum is of
    # nonnegative numbers, so its own rounding is covered by the factor 1.01.
    S = M - L @ L.mT
    size = float(L.square().sum()) + float(torch.linalg.matrix_norm(M))
    slack = 1.01 * gamma(n + 2) * size + (n + 1) * (n + 1) * TINY
    # E = d I + (S − d I) + (E − S) for any d; take d the smallest diagonal of S.
    least = float(S.diagonal().min())
    rest = S - least * torch.eye(n, dtype=M.dtype)
    # 1.01 covers the rounding of the norm, u·(1 + …) that of S − d I.
    spread = 1.01 * float(torch.linalg.matrix_norm(rest)) + 4 * UNIT * n * abs(least)
    return least * 0.99 > spread + slack + error


def spectral_norm_above(A: Tensor) -> float:
    """Bound ‖A‖₂ of a finite float64 matrix [m, n] from above.

    The bound is proved: v²I − AᵀA is shown positive definite. It exceeds the norm by a
    relative 1e-10 or so, and is infinite where the norm itself overflows.

    Raises:
        UnsupportedModelError: A holds NaN or infinity.
    """
    if not bool(torch.isfinite(A).all()):
        raise UnsupportedModelError(
            "a norm needs finite weights, got NaN or infinity", help="repair the stored weights"
        )
    if A.numel() == 0:
        return 0.0
    largest = float(A.abs().max())
    if largest == 0:
        return 0.0
    # Scaling by a power of two is exact but for underflow: entries below 2⁻¹⁰²² after it
    # lose at most TINY each, which `lost` restores in the Frobenius norm.
    exponent = math.frexp(largest)[1]
    half = exponent // 2
    B = A * math.ldexp(1.0, -half) * math.ldexp(1.0, half - exponent)
    B = B if B.shape[0] >= B.shape[1] else B.mT.contiguous()
    m, n = B.shape
    lost = m * n * TINY
    G = B.mT @ B
    G = (G + G.mT) / 2
    square = float(B.square().sum()) * (1 + gamma(m * n + 2))  # ‖B‖_F² from above
    # ‖fl(BᵀB) − BᵀB‖₂ ≤ γ_m ‖|B|ᵀ|B|‖₂ ≤ γ_m ‖B‖_F²; +2 for the symmetrisation.
    error = gamma(m + 2) * square + (m + 2) * n * TINY
    eye = torch.eye(n, dtype=B.dtype)
    top = max(float(torch.linalg.eigvalsh(G)[-1]), square / n / 2)
    bound = square  # ‖B‖₂ ≤ ‖B‖_F needs no proof
    margin = 4 * (n + m + 8) * n * UNIT
    for _ in range(20):
        candidate = top * (1 + margin)
        if candidate >= square:
            break
        # Rounding of candidate·I − G on the diagonal: one sum each, ≤ u (candidate + |G_ii|).
        if proves_positive_definite(candidate * eye - G, error + 2 * UNIT * (candidate + square)):
            bound = candidate
            break
        margin *= 4
    # sqrt and sum each round once: three steps up cover them.
    root = up(math.sqrt(bound), 3) + lost
    try:
        return up(math.ldexp(up(root), exponent))
    except OverflowError:
        return math.inf
