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


_LOST = 1e-200
"""Exceeds what underflow can lose when numbers are scaled by less than 10^±100."""


def gamma(n: int) -> float:
    """Return an upper bound on γ_n = n u / (1 − n u), itself rounded up."""
    return n * UNIT * (1 + 1e-9) if n < 2**20 else n * UNIT * 1.001


def up(value: float, steps: int = 1) -> float:
    """Return ``value`` moved ``steps`` floats towards +∞."""
    for _ in range(steps):
        value = math.nextafter(value, math.inf)
    return value


def proves_positive_definite(M: Tensor, error: float = 0.0) -> bool:
    """Prove that every symmetric matrix within ``error`` (in ‖·‖₂) of M [n, n] is ≻ 0.

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


def product_error(A: Tensor, B: Tensor) -> Tensor:
    """Bound |fl(A B) − A B| entrywise, for A [m, n] and B [n, k]."""
    n = A.shape[1]
    # fl(|A||B|) itself errs by γ_n; 1.01 covers it.
    return 1.01 * gamma(n + 1) * (A.abs() @ B.abs()) + n * TINY


def binary_scale(P: Tensor) -> Tensor:
    """Return powers of two s [n] that bring the diagonal of diag(s) P diag(s) into [1/2, 2).

    Diagonals beyond 10^±90 are left at that, so that scaling an entry by s is exact or
    loses less than ``_LOST`` to underflow.
    """
    exponent = torch.frexp(P.diagonal().clamp(min=1e-90, max=1e90))[1]
    scale: Tensor = torch.exp2(-(exponent.to(P.dtype) / 2).floor())
    return scale


def quotient_above(G: Tensor, P: Tensor, G_error: Tensor | None = None) -> float:
    """Bound from above the smallest t with G ⪯ t P, for symmetric G and P [n, n], G ⪰ 0.

    Args:
        G: The smaller form.
        P: Exactly symmetric and, if the answer is to be finite, positive definite.
        G_error: Entrywise bound on how far G is from the matrix that is meant.

    Returns:
        A proved t, or infinity where none was proved.
    """
    n = P.shape[0]
    if n == 0:
        return 0.0
    if not bool(torch.isfinite(P).all() and torch.isfinite(G).all()):
        return math.inf
    s = binary_scale(P)
    scaled_P, scaled_G = s[:, None] * P * s, s[:, None] * G * s
    lost = 0.0 if G_error is None else float(torch.linalg.matrix_norm(s[:, None] * G_error * s))
    L, info = torch.linalg.cholesky_ex(scaled_P)
    if int(info) != 0:
        return math.inf
    inner = torch.linalg.solve_triangular(L, scaled_G, upper=False)
    inner = torch.linalg.solve_triangular(L, inner.mT, upper=False)
    inner = (inner + inner.mT) / 2
    if not bool(torch.isfinite(inner).all()):
        return math.inf
    guess = float(torch.linalg.eigvalsh(inner)[-1])
    size_P, size_G = (float(torch.linalg.matrix_norm(M)) for M in (scaled_P, scaled_G))
    guess = max(guess, 1e-12 * size_G / size_P, 1e-280)
    for margin in (1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0, 1e3):
        t = guess * (1 + margin)
        # Entries of t P − G: one product and one sum, ≤ 2u (t|P| + |G|); scaling is exact.
        error = 1.01 * lost + 3 * UNIT * (t * size_P + size_G) + n * _LOST
        # Divide by t so that the entries are near 1; one more rounding each.
        if proves_positive_definite((t * scaled_P - scaled_G) / t, error / t + 2 * UNIT * n * n):
            return t
    return math.inf


def gram_above(A: Tensor, P: Tensor, roundings: int = 0) -> float:
    """Bound from above the smallest t with ‖A v‖₂² ≤ t vᵀP v for all v; A [m, n], P [n, n].

    ``roundings`` counts the relative errors u that the entries of A already carry.
    """
    G = A.mT @ A
    size = A.mT.abs() @ A.abs()
    error = product_error(A.mT, A) + (2 * UNIT * (1 + roundings)) * 1.01 * size
    return quotient_above((G + G.mT) / 2, P, error)


def eigenvalue_below(P: Tensor) -> float:
    """Bound λ_min of an exactly symmetric P [n, n] from below; 0 where nothing is proved."""
    if not bool(torch.isfinite(P).all()) or P.shape[0] == 0:
        return 0.0
    guess = float(torch.linalg.eigvalsh(P)[0])
    eye = torch.eye(P.shape[0], dtype=P.dtype)
    for part in (0.999, 0.9, 0.5, 0.1):
        low = part * guess
        # Only the diagonal of P − low·I rounds, once.
        error = UNIT * (float(P.diagonal().abs().max()) + abs(low))
        if low > 0 and proves_positive_definite(P - low * eye, 2 * error):
            return low
    return 0.0


def inverse_forms_above(P: Tensor, V: Tensor) -> Tensor:
    """Bound vᵀP⁻¹v from above for each row v of V [m, n]; infinite where P ≻ 0 is unproved.

    With y near P⁻¹v and r = v − P y, vᵀP⁻¹v = (v + r)ᵀy + rᵀP⁻¹r, and the last term is at
    most ‖r‖₂² / λ_min(P): however y was found, the sum is a bound.
    """
    n = P.shape[0]
    s = binary_scale(P)
    scaled = s[:, None] * P * s  # exact, and so is V s: vᵀP⁻¹v = (s v)ᵀ(s P s)⁻¹(s v)
    least = eigenvalue_below(scaled)
    if least == 0:
        return torch.full((V.shape[0],), math.inf, dtype=P.dtype)
    V = V * s
    Y = torch.cholesky_solve(V.mT, torch.linalg.cholesky(scaled)).mT
    R = V - Y @ scaled
    # |fl(R) − R| entrywise: the product's error and one sum.
    wrong = product_error(Y, scaled) + 2 * UNIT * (V.abs() + R.abs())
    size = ((V.abs() + R.abs() + wrong) * Y.abs()).sum(1)
    main = ((V + R) * Y).sum(1) + 1.01 * gamma(n + 4) * size + (wrong * Y.abs()).sum(1) * 1.01
    left = (torch.linalg.vector_norm(R, dim=1) + torch.linalg.vector_norm(wrong, dim=1)) * 1.01
    bound: Tensor = (main + left.square() / least * 1.01).abs() * (1 + 8 * UNIT) + n * _LOST
    return bound
