"""The numerical radius of a diagonally scaled matrix, from above, and its minimum over scalings.

w(A) = max_θ λ_max(H(θ)), H(θ) = (e^{iθ}A + e^{−iθ}Aᵀ)/2. For real A half a turn is enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.norms import UNIT, gamma, proves_positive_definite, up


def numerical_radius_above(A: Tensor, angles: int = 16) -> float:
    """Bound w(A) of a real matrix [n, n] from above by the polygon of ``angles`` + 1 directions.

    w(A) ≤ max_k λ_max(H(πk/N)) / cos(π/2N). Each λ_max is bounded with proof: the real form
    of t I − H, [[Re, −Im], [Im, Re]], is shown positive definite.
    """
    n = A.shape[0]
    symmetric, skew = (A + A.mT) / 2, (A - A.mT) / 2
    size = float(torch.linalg.matrix_norm(A)) * (1 + gamma(n * n + 4))
    if n == 0 or size == 0:
        return 0.0
    eye = torch.eye(2 * n, dtype=A.dtype)
    worst = 0.0
    for k in range(angles + 1):
        theta = math.pi * k / angles
        # e^{iθ}A + e^{−iθ}Aᵀ = 2(cos θ · sym + i sin θ · skew). The angle rounds, cos and sin
        # round, and so do the entries: an error of at most 8u‖A‖_F in the 2-norm, and a
        # direction that is off by 4u, which the 1e-12 below covers.
        re, im = math.cos(theta) * symmetric, math.sin(theta) * skew
        H = torch.cat([torch.cat([re, -im], 1), torch.cat([im, re], 1)])
        H = (H + H.mT) / 2
        top = float(torch.linalg.eigvalsh(H)[-1])
        margin = 1e-11
        bound = size
        while margin < 1:
            t = top + margin * size
            if proves_positive_definite((t * eye - H) / size, 32 * UNIT * n):
                bound = t
                break
            margin *= 8
        worst = max(worst, bound)
    return up(worst / math.cos(math.pi / 2 / angles) * (1 + 1e-12), 2)


@dataclass(slots=True, eq=False)
class _Rays:
    """Warm-started top eigenvectors X [n, N, b] of H(θ) for N angles at once.

    Ritz values come from below, so they may guide a search and prove nothing.
    """

    phase: Tensor
    X: Tensor
    low: Tensor | None = None
    top: float = 0.0

    @classmethod
    def start(cls, n: int, rng: torch.Generator, angles: int, block: int) -> _Rays:
        theta = torch.arange(angles, dtype=torch.float64) * (math.pi / (angles - 1))
        phase = torch.polar(torch.ones_like(theta), theta)[None, :, None]
        X = torch.randn(n, angles, block, 2, dtype=torch.float64, generator=rng)
        return cls(phase, torch.view_as_complex(X))

    def improve(self, A: Tensor, degree: int) -> tuple[Tensor, Tensor]:
        """Filter and rotate the block for A; return Ritz values [N, b] and ∂/∂log D [n, N, b]."""
        n, angles, block = self.X.shape
        At = A.mT.contiguous()

        def times(M: Tensor, X: Tensor) -> Tensor:
            flat = torch.view_as_real(X.contiguous()).reshape(n, -1)
            return torch.view_as_complex((M @ flat).reshape(n, angles, block, 2))

        def hermitian(X: Tensor) -> Tensor:
            return (self.phase * times(A, X) + self.phase.conj() * times(At, X)) / 2

        X = self.X
        if block < n:
            # Chebyshev polynomials damp [−top, low] and raise what lies above.
            if self.low is None:
                size = float(torch.linalg.matrix_norm(A)) + 1e-300
                top, low = size / 2, X.real.new_zeros(angles)
            else:
                top, low = self.top, self.low
            middle = ((low - top) / 2)[None, :, None]
            half = ((low + top) / 2).clamp(min=1e-3 * top)[None, :, None]
            before, X = X, (hermitian(X) - middle * X) / half
            for _ in range(degree - 1):
                before, X = X, 2 * (hermitian(X) - middle * X) / half - before
        X = X / torch.linalg.vector_norm(X, dim=0, keepdim=True).clamp(min=1e-300)
        X = torch.linalg.qr(X.permute(1, 0, 2))[0].permute(1, 0, 2)
        AX, AtX = times(A, X), times(At, X)
        inner = torch.einsum("nka,nkb->kab", X.conj(), self.phase * AX + self.phase.conj() * AtX)
        ritz, V = torch.linalg.eigh((inner + inner.mH) / 4)
        X, AX, AtX = (torch.einsum("nka,kab->nkb", Z, V) for Z in (X, AX, AtX))
        self.X, self.low, self.top = X, ritz[:, 0], max(float(ritz[:, -1].max()), 1e-300)
        # ∂λ/∂log D_i = Re(e^{iθ}(v̄_i (Av)_i − (v̄ᵀA)_i v_i)), and (v̄ᵀA)_i is conj((Aᵀv)_i).
        return ritz, (self.phase * (X.conj() * AX - AtX.conj() * X)).real


def balance(W: Tensor, sweeps: int = 30) -> Tensor:
    """Return log D [n] that evens out row and column norms of D W D⁻¹ (Osborne, 1960)."""
    S = W.square()
    d = W.new_zeros(W.shape[0])
    for _ in range(sweeps):
        scaled = (2 * (d[:, None] - d)).exp() * S
        row, column = scaled.sum(1), scaled.sum(0)
        d = d + 0.25 * 0.5 * (column.clamp(min=1e-300) / row.clamp(min=1e-300)).log().clamp(-8, 8)
        d = (d - d.mean()).clamp(-15, 15)
    return d


def minimise_radius(
    W: Tensor,
    *,
    iterations: int,
    seed: int = 0,
    deadline: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> tuple[Tensor, float]:
    """Search for a diagonal D [n] that makes w(D W D⁻¹) small; any D is a valid one.

    The number beside it is about the radius that it reaches, from below: a guide, no bound.
    W is finite. The search sees W over its largest entry, since w is linear in scale.

    Gradient steps on a log-sum-exp of the top Ritz values over 16 angles, each step scaled
    as in Adam (Kingma & Ba, 2015) by one running mean for all coordinates.
    """
    n = W.shape[0]
    largest = float(W.abs().max()) if n else 0.0
    if largest == 0:
        return torch.ones_like(W[:, 0]), 0.0
    W = W / largest
    rng = torch.Generator().manual_seed(seed)
    rays = _Rays.start(n, rng, 16, min(6, n))
    d = balance(W)
    mean, square = torch.zeros_like(d), W.new_zeros(())
    best, best_top = d, math.inf
    for step in range(iterations):
        A = (d[:, None] - d).exp() * W
        ritz, slope = rays.improve(A, 12 if step == 0 else 6)
        top = float(ritz.max())
        if not math.isfinite(top) or top <= 0:
            break
        if top <= best_top or step < 5:
            best, best_top = d, top
        if deadline is not None and time.monotonic() > deadline:
            break
        sharp = 80 * (1 + 3 * step / iterations)
        weight = ((ritz - top) * (sharp / top)).exp()
        gradient = (slope * (weight / weight.sum())).sum((1, 2))
        gradient = gradient - gradient.mean()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient.square().mean()
        rate = 0.04 * (1 - step / iterations)
        scale = (square / (1 - 0.99 ** (step + 1))).sqrt() + 1e-12 * top
        d = d - rate * mean / (1 - 0.9 ** (step + 1)) / scale
        d = d - d.mean()
        if progress is not None:
            progress((step + 1) / iterations)
    return best.exp(), best_top * largest
