"""The checker's matrix inequalities: that P is a metric, that it contracts, and what follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rnnaudit.certificates.checker_intervals import (
    TINY,
    UNIT,
    Array,
    Box,
    CertificateError,
    above,
    growth,
    largest,
    length_above,
)
from rnnaudit.certificates.checker_systems import System

DEEPEST = 1_000_000
"""No depth beyond this is derived."""


def _positive(M: Array, error: float) -> bool:
    """Prove that every symmetric matrix within ``error`` of M in the 2-norm is ≻ 0.

    M = LLᵀ + E, so λ_min(M) ≥ λ_min(E), and E is computed with a bound on its rounding.
    """
    n = len(M)
    if not (np.isfinite(M).all() and math.isfinite(error) and (M == M.T).all()):
        return False
    shift = 5 * growth(n + 4) * float(np.trace(M)) + 2 * error
    try:
        L = np.tril(np.linalg.cholesky(M - shift * np.eye(n)))
    except np.linalg.LinAlgError:
        return False
    S = M - L @ L.T
    rounding = 1.02 * growth(n + 2) * float((L**2).sum() + np.linalg.norm(M)) + n * n * TINY
    middle = float(S.diagonal().min())
    spread = 1.02 * float(np.linalg.norm(S - middle * np.eye(n))) + 8 * UNIT * n * abs(middle)
    return bool(0.99 * middle > spread + rounding + error)


def binary_scale(M: Array) -> Array:
    """Return powers of two that bring the diagonal of M near 1; scaling by them is exact."""
    exponent = np.frexp(np.clip(np.diagonal(M), 1e-90, 1e90))[1]
    scale: Array = np.exp2(-np.floor(exponent / 2))
    return scale


def proves_form(M: Array, error: Array) -> bool:
    """Prove M ≻ 0 for every symmetric matrix that is within ``error`` of M entrywise."""
    s = binary_scale(M)
    slack = 1.02 * float(np.linalg.norm(s[:, None] * error * s)) + len(M) * 1e-200
    return _positive(s[:, None] * M * s, slack)


@dataclass(frozen=True, slots=True, eq=False)
class Gauge:
    """A norm in which a recurrence contracts: what composition needs of it.

    ``radius`` bounds the norm of s − s_start, ``units`` [H] bound |h_i| per unit of the norm,
    and ``measure`` bounds the norm over a box |δ| ≤ r.
    """

    rate: float
    radius: float
    units: Array
    measure: Callable[[Array], float]


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """‖δ'‖_P ≤ rate ‖δ‖_P, proved on construction from multipliers T in ``sector``.

    ``r`` bounds |s − s_start|, ``first`` |φ(s_start, x) − s_start|, per state; the output is
    the first ``outputs`` units. ``last`` is W where the step is δ' = diag(d) W δ.
    """

    P: Array
    T: Array
    rate: float
    sector: Box
    r: Array
    first: Array
    outputs: int
    last: Array | None
    _constants: list[tuple[Array | None, str, float]] = field(default_factory=list)

    def prove(self, system: System) -> None:
        """Check the matrix inequality of the circle criterion, and that P is a metric.

        Raises:
            CertificateError: One of them fails.
        """
        P, T, (lo, hi) = self.P, self.T, self.sector
        S = len(P)
        if not bool((P == P.T).all() and np.isfinite(P).all() and np.isfinite(T).all()):
            raise CertificateError("the metric must be symmetric and finite")
        if not proves_form(P, np.zeros_like(P)):
            raise CertificateError("the metric is not positive definite")
        if not bool((T >= 0).all() and np.isfinite(lo).all() and np.isfinite(hi).all()):
            raise CertificateError("multipliers must be finite and not negative")
        G, Q = np.concatenate([system.A, system.B], 1), np.concatenate([system.C, system.D], 1)
        absG, absQ = np.abs(G), np.abs(Q)
        M = Q.T @ ((T * lo * hi)[:, None] * Q) - G.T @ (P @ G)
        size = absQ.T @ ((T * np.abs(lo) * np.abs(hi))[:, None] * absQ)
        size += absG.T @ (np.abs(P) @ absG)
        cross = (T * (lo + hi))[:, None] * Q / 2
        cross_size = (T * (np.abs(lo) + np.abs(hi)))[:, None] * absQ
        M[:S, :S] += self.rate**2 * P
        M[S:] -= cross
        M[:, S:] -= cross.T
        M[S:, S:] += np.diag(T)
        size[:S, :S] += self.rate**2 * np.abs(P)
        size[S:] += cross_size
        size[:, S:] += cross_size.T
        size[S:, S:] += np.diag(T)
        # Two products of at most S + m terms each, and fewer than twenty single roundings.
        error = 1.02 * growth(2 * (S + len(T)) + 24) * (size + size.T) + TINY
        if not proves_form((M + M.T) / 2, error):
            raise CertificateError(f"the metric does not prove the rate {self.rate:.6g}")

    def gauge(self) -> Gauge:
        """Return the norm itself."""
        units = self._forms(np.eye(len(self.P))[: self.outputs])
        return Gauge(self.rate, self._start(), units, self._radius)

    def depth(self, eps: float, norm: str, A: Array | None, through: Array | None) -> int | None:
        """Return the smallest depth that is proved for ε of the output A h; None without one.

        ``through`` [O, H] reads no less than A in every unit that A reads.
        """
        with np.errstate(all="ignore"):
            later = self._constant(norm, A, through)
        if not math.isfinite(later):
            return None
        begin = self.r[: self.outputs] if A is None else above(np.abs(A), self.r[: self.outputs])
        k = 0 if length_above(begin, norm) <= eps else 1
        if k == 0 and later * self.rate <= eps:
            return 0
        if later == 0:
            return 1
        apart = math.log(eps) - math.log(later)  # the quotient may underflow
        k = max(1, math.floor(apart / math.log(self.rate)) - 1)
        while k < DEEPEST:
            # A power below the smallest float is not zero.
            power = self.rate**k * (1 + 1e-14) + 5e-324
            if later * power * (1 + 1e-14) + 5e-324 <= eps:
                return k
            k += 1
        return None

    def _start(self) -> float:
        return min(self._radius(self.r), self._radius(self.first) / (1 - self.rate)) * (1 + 1e-15)

    def _constant(self, norm: str, A: Array | None, through: Array | None) -> float:
        """Bound the output's error at k ≥ 1 per λᵏ; worked out once for each readout."""
        for known, of, value in self._constants:
            if known is A and of == norm:
                return value
        if not len(self.P) or (A is not None and not A.size):
            return 0.0
        unit = self._largest(A, through) if norm == "max" else self._length(A)
        self._constants.append((A, norm, unit * self._start() * (1 + 1e-14)))
        return self._constants[-1][2]

    def _largest(self, A: Array | None, through: Array | None) -> float:
        """Bound the largest unit of A h per ‖δ‖_P at k ≥ 1."""
        H = self.outputs
        rows = np.zeros((H if A is None else len(A), len(self.P)))
        rows[:, :H] = np.eye(H) if A is None else A
        bound = self._forms(rows)
        if self.last is None:
            return float(bound.max())
        lo, hi = self.sector
        # One step before the end: δ_k = diag(d) W δ_{k−1}.
        slope = largest((lo, hi))
        unit = slope * self._forms(self.last) / self.rate * (1 + 1e-14)
        zeroable = bool(((lo <= 0) & (hi >= 0)).all())
        if zeroable:
            # The last step may zero the slopes of all other units.
            unit = np.minimum(unit, (1 + 1e-14) / np.sqrt(np.diagonal(self.P)))
        if A is None:
            return float(np.minimum(bound, unit).max())
        bound = np.minimum(bound, above(np.abs(A), unit))
        if through is not None:
            # Zeroing every slope that works against a row u of A leaves uᵀδ ≤ vᵀδ, where v
            # reads at least as much as u, in u's direction.
            reads = np.where(A == 0, True, np.sign(A) * through >= np.abs(A))
            if not (zeroable and bool(reads.all())):
                raise CertificateError("what is read through free slopes must exceed the readout")
            bound = np.minimum(bound, self._forms(through))
        return float(bound.max())

    def _radius(self, r: Array) -> float:
        """Bound √(δᵀPδ) over |δ| ≤ r, by rᵀ|P|r or by a diagonal form above P."""
        if not np.isfinite(r).all():
            return math.inf
        plain = float(r @ (np.abs(self.P) @ r)) * (1 + 2 * growth(2 * len(r) + 4))
        weights = self.T if self.last is not None else np.diagonal(self.P)
        scaled = self._spread(weights) * float((weights * r * r).sum())
        scaled *= 1 + 2 * growth(len(r) + 6)
        return math.sqrt(min(plain, scaled) + TINY) * (1 + 1e-14)

    def _spread(self, weights: Array) -> float:
        """Bound the smallest t with P ⪯ t diag(weights)."""
        if not bool((weights > 0).all()):
            return math.inf
        root = np.sqrt(weights)
        guess = float(np.linalg.eigvalsh(self.P / root[:, None] / root)[-1])
        for margin in (1e-9, 1e-6, 1e-3):
            t = guess * (1 + margin)
            D = np.diag(t * weights)
            if proves_form(D - self.P, 4 * UNIT * (D + np.abs(self.P))):
                return t
        return math.inf

    def _forms(self, V: Array) -> Array:
        """Bound √(vᵀP⁻¹v) for every row v of V, of width S or less."""
        s = binary_scale(self.P)
        scaled = s[:, None] * self.P * s
        X = np.linalg.inv(scaled)
        # P⁻¹ = X + P⁻¹E with E = I − P X, so ‖P⁻¹ − X‖ ≤ ‖X‖ ‖E‖ / (1 − ‖E‖).
        E = np.eye(len(X)) - scaled @ X
        rounding = growth(len(X) + 2) * float(np.linalg.norm(np.abs(scaled) @ np.abs(X)) + len(X))
        off = 1.02 * (float(np.linalg.norm(E)) + rounding)
        if not off < 0.5:
            return np.full(len(V), np.inf)
        wrong = 1.02 * float(np.linalg.norm(X)) * off / (1 - off)
        V = V * s[: V.shape[1]]
        X = X[: V.shape[1], : V.shape[1]]
        exact = ((V @ X) * V).sum(1)
        size = ((np.abs(V) @ np.abs(X)) * np.abs(V)).sum(1)
        lost = 1.02 * growth(2 * len(X) + 8) * size + wrong * 1.02 * (V * V).sum(1)
        bound: Array = np.sqrt(np.maximum(exact + lost, 0) + TINY) * (1 + 1e-14)
        return bound

    def _length(self, A: Array | None) -> float:
        """Bound ‖A h‖₂ per ‖δ‖_P at k ≥ 1."""
        H = self.outputs
        rows = np.zeros((H if A is None else len(A), len(self.P)))
        rows[:, :H] = np.eye(H) if A is None else A
        bounds = [self._stretch(rows)]
        if self.last is not None and A is None:
            slope = largest(self.sector)
            bounds.append(self._stretch(slope[:, None] * self.last) / self.rate * (1 + 1e-14))
        return min(bounds)

    def _stretch(self, A: Array) -> float:
        """Bound the smallest c with ‖A δ‖₂ ≤ c ‖δ‖_P; entries of A may have been rounded once."""
        F = A.T @ A
        try:
            root = np.linalg.inv(np.linalg.cholesky(self.P))
        except np.linalg.LinAlgError:
            return math.inf
        guess = float(np.linalg.eigvalsh(root @ F @ root.T)[-1])
        size = np.abs(A).T @ np.abs(A)
        for margin in (1e-9, 1e-6, 1e-3):
            t = guess * (1 + margin) + 1e-200
            error = 1.02 * growth(len(A) + 8) * size + 4 * UNIT * (t * np.abs(self.P))
            M = t * self.P - F
            if proves_form((M + M.T) / 2, error + TINY):
                return math.sqrt(t) * (1 + 1e-14)
        return math.inf
