"""The circle criterion for a loop: one metric and one multiplier per channel.

For w = diag(d) v with d in [lo, hi] and any T ≥ 0, (w − lo v)ᵀT(w − hi v) ≤ 0. Hence

    M = diag(λ²P, 0) − [A B]ᵀP[A B] + form of (w − lo v)ᵀT(w − hi v) ≻ 0,  v = C δ + D w,

proves ‖δ'‖_P ≤ λ‖δ‖_P. The search writes d = mid + rad·p with |p| ≤ 1, finds multipliers
that make the scaled 2-norm of the closed loop small with a diagonal metric, and then takes
the full metric that the bounded real lemma gives for those multipliers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.certificates.intervals import Interval
from rnnaudit.certificates.loops import Loop
from rnnaudit.norms import UNIT, binary_scale, product_error, proves_positive_definite

_LOST = 1e-200


def proves_loop_rate(loop: Loop, sector: Interval, P: Tensor, T: Tensor, rate: float) -> bool:
    """Prove ‖δ'‖_P ≤ rate ‖δ‖_P for all multipliers in the sector, and P ≻ 0."""
    S, m = P.shape[0], T.shape[0]
    if not (sector.finite and bool(torch.isfinite(P).all()) and bool((T >= 0).all())):
        return False
    if not torch.equal(P, P.mT) or not rate > 0 or not bool(torch.isfinite(T).all()):
        return False
    G, Q = torch.cat([loop.A, loop.B], 1), torch.cat([loop.C, loop.D], 1)
    # `error` bounds |fl(M) − M| entrywise; each `size` is the sum of the sizes of a term's
    # summands. Chains of single products and sums add at most 16u of those sizes.
    PG = P @ G
    moved = G.mT @ PG
    moved_size = G.mT.abs() @ (P.abs() @ G.abs())
    error = product_error(G.mT, PG) + G.mT.abs() @ product_error(P, G) * 1.01
    # The interval ends are floats; T·lo·hi and T·(lo + hi) round twice each.
    square = T * sector.lo * sector.hi
    quadratic = Q.mT @ (square[:, None] * Q)
    square_size = T * sector.lo.abs() * sector.hi.abs()
    quadratic_size = Q.mT.abs() @ (square_size[:, None] * Q.abs())
    error = error + product_error(Q.mT.abs(), square_size[:, None] * Q.abs())
    cross = (T * (sector.lo + sector.hi))[:, None] * Q
    cross_size = (T * (sector.lo.abs() + sector.hi.abs()))[:, None] * Q.abs()
    M = quadratic - moved
    M[:S, :S] += (rate * rate) * P
    M[S:, :] -= cross / 2
    M[:, S:] -= cross.mT / 2
    M[S:, S:] += torch.diag(T)
    size = moved_size + quadratic_size
    size[:S, :S] += (rate * rate) * P.abs()
    size[S:, :] += cross_size
    size[:, S:] += cross_size.mT
    size[S:, S:] += torch.diag(T)
    M = (M + M.mT) / 2
    error = (error + error.mT) / 2 + 32 * UNIT * (size + size.mT)
    s = binary_scale(M)
    slack = 1.01 * float(torch.linalg.matrix_norm(s[:, None] * error * s)) + (S + m) * _LOST
    if not proves_positive_definite(s[:, None] * M * s, slack):
        return False
    s = binary_scale(P)
    return proves_positive_definite(s[:, None] * P * s, S * _LOST)


@dataclass(frozen=True, slots=True, eq=False)
class Closed:
    """The loop closed at the middle of its sector: δ' = A δ + B p, q = C δ + D p, |p| ≤ |q|."""

    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    rad: Tensor


def close(loop: Loop, sector: Interval) -> Closed:
    """Put the middle of every multiplier into the matrices and its radius into B and D."""
    mid, rad = (sector.lo + sector.hi) / 2, (sector.hi - sector.lo) / 2
    m = mid.shape[0]
    eye = torch.eye(m, dtype=mid.dtype)
    N = torch.linalg.solve_triangular(eye - loop.D * mid, eye, upper=False, unitriangular=True)
    C, D = N @ loop.C, N @ loop.D
    through = loop.B * mid
    return Closed(loop.A + through @ C, (loop.B + through @ D) * rad, C, D * rad, rad)


def _balanced(S: Tensor) -> Tensor:
    """Return levels that even out row and column sums of e^{2l_i} S_ij e^{−2l_j}."""
    level = S.new_zeros(S.shape[0])
    for _ in range(40):
        up, down = (2 * level).exp(), (-2 * level).exp()
        row, column = up * (S @ down), down * (up @ S)
        step = 0.125 * (column.clamp(min=1e-200) / row.clamp(min=1e-200)).log()
        level = level + step.clamp(-1, 1)
        level = (level - level.mean()).clamp(-20, 20)
    return level


def find_multipliers(
    closed: Closed, rate: float, *, steps: int, seed: int, start: Tensor | None = None
) -> tuple[Tensor, float]:
    """Search for scalings that make the 2-norm of the closed loop small, metric diagonal.

    Returns log √ of the weights of (δ, p) [S + m] and the norm that they reach, from below.
    """
    G = torch.cat(
        [
            torch.cat([closed.A / rate, closed.B], 1),
            torch.cat([closed.C / rate, closed.D], 1),
        ]
    )
    size, Gt = G.shape[0], G.mT.contiguous()
    level = _balanced(G.square()) if start is None else start.clone()
    pace = 0.15 if start is None else 0.05
    rng = torch.Generator().manual_seed(seed)
    X = torch.randn(size, min(4, size), dtype=G.dtype, generator=rng)
    mean, square, best, reached = torch.zeros_like(level), 0.0, level, float("inf")
    for step in range(steps):
        e = level.exp()[:, None]
        for _ in range(2 if step else 12):
            X = torch.linalg.qr(Gt @ (e.square() * (G @ (X / e))) / e)[0]
        left, value, right = torch.linalg.svd(e * (G @ (X / e)), full_matrices=False)
        X = X @ right.mT
        top = float(value[0])
        if not top > 0:
            return level, top
        if top < reached and step > 1:
            best, reached = level, top
        weight = ((value - top) * (60 / top)).exp()
        weight = weight / weight.sum() * value
        gradient = ((left.square() - X.square()) * weight).sum(1)
        gradient = gradient - gradient.mean()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * float(gradient.square().mean())
        scale = (square / (1 - 0.99 ** (step + 1))) ** 0.5 + 1e-12 * top
        level = level - pace * (1 - step / steps) * mean / (1 - 0.9 ** (step + 1)) / scale
    return best, reached


def find_loop_metric(closed: Closed, T: Tensor, rate: float) -> Tensor | None:
    """Iterate the Riccati equation of the bounded real lemma upward; None where it breaks down.

    T [m] are multipliers in the scaling |p| ≤ |q|, and A is divided by the rate. With
    R = T − DᵀTD, Ā = A + BR⁻¹DᵀTC and G = BR⁻¹Bᵀ the iteration is P ← Q̄ + Āᵀ(P⁻¹ − G)⁻¹Ā.
    """
    A, B, C, D = closed.A / rate, closed.B, closed.C / rate, closed.D
    TC = T[:, None] * C
    Q = C.mT @ TC
    Q = Q + torch.diag(1e-4 * Q.diagonal() + 1e-6 * Q.diagonal().mean() + 1e-30)
    # A margin in the multipliers' block too, so that the proof survives rounding.
    L, info = torch.linalg.cholesky_ex(torch.diag((1 - 1e-6) * T) - D.mT @ (T[:, None] * D))
    if int(info) != 0:
        return None
    half = torch.linalg.solve_triangular(L, torch.cat([B.mT, D.mT @ TC], 1), upper=False)
    Bh, Xh = half.split(A.shape[0], dim=1)
    A, Q, G = A + Bh.mT @ Xh, Q + Xh.mT @ Xh, Bh.mT @ Bh
    eye = torch.eye(A.shape[0], dtype=A.dtype)
    P: Tensor = Q
    for _ in range(200):
        root, info = torch.linalg.cholesky_ex(P)
        room, singular = torch.linalg.cholesky_ex(eye - root.mT @ G @ root)
        if int(info) != 0 or int(singular) != 0:
            return None
        K = torch.linalg.solve_triangular(room, root.mT @ A, upper=False)
        after = Q + K.mT @ K
        change = after - P
        P = (after + after.mT) / 2
        if not bool(torch.isfinite(P).all()):
            return None
        if bool((change.abs().sum(1) <= 2e-5 * Q.diagonal()).all()):
            return P
    return None
