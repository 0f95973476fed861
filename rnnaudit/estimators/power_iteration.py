"""Spectral norms of many Jacobians at once, without forming them; every value errs low.

Block iteration on JᵀJ: the Ritz vectors X, their residuals and the last step's direction
span the next basis (Knyazev, 2001). It stops on ‖JᵀJv − σ²v‖ ≤ tol·σ², and rows that have
converged leave the batch. Whatever the step, ‖Jv‖ for a unit v is at most ‖J‖₂.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.estimators.states import Samples, sample
from rnnaudit.model import Cell, Recurrence
from rnnaudit.results import LowerBound

BLOCK = 2
"""Ritz vectors per Jacobian: a second one keeps close singular values from stalling the first."""

DENSE = 512
"""State dimension up to which √eigvalsh(JJᵀ) is faster than iterating to the residual."""

DOWN = 1 - 1e-9
"""Found norms are multiplied by this: more than rounding adds in products of 10⁶ terms."""

MOST_STEPS = 300
"""Where the residual does not fall below its bound, steps end here."""

_FLOPS = 4e9  # of one iteration over all samples


class Operator(Protocol):
    """A batch of M linear maps, applied to rows V [M, m, S]."""

    def jvp(self, V: Tensor) -> Tensor:
        """Apply J to each row."""
        ...

    def vjp(self, V: Tensor) -> Tensor:
        """Apply Jᵀ to each row."""
        ...


def orthonormal(V: Tensor) -> Tensor:
    """Orthonormalise the rows of V [..., m, S], m ≤ S."""
    Q: Tensor = torch.linalg.qr(V.mT).Q
    return Q.mT


def _ritz(V: Tensor, image: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return σ² [M], the top Ritz vectors, their images, and the mixing [M, q, count].

    Where images are beyond float64, σ² is 0: nothing was found.
    """
    gram = image @ image.mT
    held = gram.isfinite().all(-1).all(-1)
    square, mix = torch.linalg.eigh(torch.where(held[:, None, None], gram, 0.0))
    mix = mix[..., -count:].flip(-1)
    return square[..., -1], mix.mT @ V, mix.mT @ image, mix


def screen(operator: Operator, V: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Take a few steps of plain block iteration from V [M, m, S]: σ from below [M], and V."""
    V = orthonormal(V)
    for _ in range(steps):
        V = orthonormal(operator.vjp(operator.jvp(V)))
    square, X, _, _ = _ritz(V, operator.jvp(V), V.shape[-2])
    return square.clamp(min=0).sqrt(), X


def converge(
    select: Callable[[Tensor], Operator], V: Tensor, *, tol: float = 1e-7, most: int = MOST_STEPS
) -> Tensor:
    """Iterate from V [M, m, S] (3m ≤ S) to the residual; return σ [M], from below.

    Args:
        select: Returns the operator of the given rows of the batch.
        V: Starting blocks.
        tol: Bound on ‖JᵀJv − σ²v‖ / σ².
        most: Steps after which the Ritz value is taken as it is, still a lower bound.
    """
    sigma = V.new_zeros(len(V))
    rows = torch.arange(len(V))
    operator = select(rows)
    X = orthonormal(V)
    m = X.shape[-2]
    square, X, image, _ = _ritz(X, operator.jvp(X), m)
    P = torch.zeros_like(X)
    for _ in range(most):
        theta = image.square().sum(-1, keepdim=True)
        R = operator.vjp(image) - theta * X
        sigma[rows] = square.clamp(min=0).sqrt()
        going = R[:, 0].norm(dim=-1) > tol * square
        if not bool(going.any()):
            break
        if not bool(going.all()):
            rows, X, R, P = rows[going], X[going], R[going], P[going]
            operator = select(rows)
        V = orthonormal(torch.cat([X, R, P], dim=-2))
        square, X, image, mix = _ritz(V, operator.jvp(V), m)
        P = mix[:, m:].mT @ V[:, m:]
    return sigma


def dense_norms(J: Tensor) -> Tensor:
    """Return ‖J‖₂ [M] of explicit J [M, S, S]: √eigvalsh(JJᵀ), half the cost of svdvals.

    J is scaled by its largest entry, so that squares stay finite. Where J is not, nothing
    is found and the norm is 0.
    """
    size = J.abs().amax((-2, -1), keepdim=True)
    J = torch.where(size.isfinite(), J, 0.0) / torch.where(size > 0, size, 1.0)
    squares: Tensor = torch.linalg.eigvalsh(J @ J.mT)
    found = squares[..., -1].clamp(min=0).sqrt() * size[..., 0, 0]
    return found.nan_to_num(nan=0.0)


def spectral_norms(cell: Cell, s: Tensor, x: Tensor, *, seed: int = 0) -> Tensor:
    """Return ‖∂s'/∂s‖₂ [M] at states s [M, S] and inputs x [M, I], each from below.

    Up to a state dimension of ``DENSE`` by eigenvalues of JJᵀ, in chunks of 256 MiB;
    beyond, matrix-free to the residual from a seeded random block.
    """
    z = cells.drive(cell, x)
    S = cell.state_size
    if S <= DENSE:
        chunk = max(1, (1 << 28) // (24 * S * S))
        parts = zip(s.split(chunk), z.split(chunk), strict=True)
        return torch.cat([dense_norms(cells.linearize(cell, *part).matrix()) for part in parts])
    rng = torch.Generator().manual_seed(seed)
    V = torch.randn(len(s), BLOCK, S, generator=rng, dtype=torch.float64)
    return converge(lambda rows: cells.linearize(cell, s[rows], z[rows]), V)


def norm_below(cell: Cell, s: Tensor, x: Tensor, *, seed: int = 0) -> LowerBound:
    """Return the largest ‖∂s'/∂s‖₂ found at states s [M, S] under inputs x [M, I].

    All are screened by a few block iterations, and the most promising brought to the
    residual (or, up to ``DENSE``, computed in full), from several seeded starts.
    """
    value, _ = _largest(cell, s, x, seed)
    return LowerBound(value, "2", f"block power iteration on {len(s):,} sampled Jacobians")


def _largest(cell: Cell, s: Tensor, x: Tensor, seed: int) -> tuple[float, int]:
    """Return the largest norm, rounded down, and the sample that has it."""
    S = cell.state_size
    few = 32 if S <= DENSE // 2 else 8
    if len(s) > few and S > 3 * BLOCK:
        rng = torch.Generator().manual_seed(seed)
        found = []
        rows = max(1, (1 << 20) // (S * BLOCK))
        for part, inputs in zip(s.split(rows), x.split(rows), strict=True):
            V = torch.randn(len(part), BLOCK, S, generator=rng, dtype=torch.float64)
            found.append(screen(cells.linearize(cell, part, cells.drive(cell, inputs)), V, 5)[0])
        best = torch.cat(found).topk(few).indices
    else:
        best = torch.arange(len(s))
    norms = spectral_norms(cell, s[best], x[best], seed=seed)
    if S > DENSE:
        norms = torch.maximum(norms, spectral_norms(cell, s[best], x[best], seed=seed + 1))
    top = int(norms.argmax())
    return float(norms[top]) * DOWN, int(best[top])


def lambda_below(recurrence: Recurrence, x: Tensor, *, seed: int = 0) -> LowerBound:
    """Return the largest one-step norm found on trajectories of x [N, T, I] and its reorderings.

    It bounds λ from below in the 2-norm (on the joint (h, c) of an LSTM) over the states
    that such inputs reach; in another norm λ may be smaller.
    """
    count = int(min(2048, max(64, _FLOPS / (8 * BLOCK * cells.multiplications(recurrence.cell)))))
    samples = sample(recurrence, x, count=count, seed=seed)
    value, at = _largest(recurrence.cell, samples.s, samples.x, seed)
    return LowerBound(value, "2", _method(samples, at))


def _method(samples: Samples, at: int) -> str:
    counts = f"{samples.on_trajectories:,} on trajectories"
    counts += f", {samples.reordered:,} on reordered inputs"
    where = "on a trajectory" if at < samples.on_trajectories else "on reordered inputs"
    total = len(samples.s)
    return f"block power iteration on {total:,} sampled Jacobians ({counts}; found {where})"
