"""Contraction in a quadratic norm ‖δ‖_P = √(δᵀPδ), and the depths that follow.

If ‖δ'‖_P ≤ λ‖δ‖_P in every step, then |uᵀδ_k| ≤ λᵏ √(uᵀP⁻¹u) ‖δ_0‖_P. Where each unit's
slope may also be 0, the last step does better: slopes of units that do not help may be
zeroed, so that |δ_{k,i}| ≤ λᵏ ‖δ_0‖_P / √P_ii without an inverse, for k ≥ 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rnnaudit.certificates.interface import Gauge, geometric_depth
from rnnaudit.certificates.intervals import Interval, times_above
from rnnaudit.model import Readout
from rnnaudit.norms import (
    TINY,
    UNIT,
    gamma,
    gram_above,
    inverse_forms_above,
    quotient_above,
    up,
)
from rnnaudit.results import Norm, UpperBound
from rnnaudit.threads import few_threads


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One proof: rate λ in ‖·‖_P, proved with multipliers T, from states within ``radius``.

    P [S, S] is exactly symmetric and proved positive definite; T [m]. ``radius`` bounds
    ‖s − s_start‖_P over the reachable states (infinite where unknown).
    """

    rate: float
    P: Tensor
    T: Tensor
    radius: float


@dataclass(frozen=True, slots=True, eq=False)
class LastStep:
    """The last step δ_k = Σ W δ_{k−1} with slopes in ±``slope`` per unit.

    ``zeroable`` says that the proof covers slopes of 0, for every unit.
    """

    W: Tensor
    slope: Tensor
    zeroable: bool


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """The matrix inequality behind a proof: the sector, and what T is multiplied by in it."""

    sector: Interval
    times: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class QuadraticCertificate:
    """A family of metrics of one method; ``depth`` takes the member that serves it best.

    ``box`` [S] bounds |s − s_start| per state over the reachable states; ``outputs`` is the
    width of h, which comes first in the state. ``anywhere`` says that the contraction holds
    for all states, not only for reachable ones.
    """

    method: str
    domain: str
    members: tuple[Metric, ...]
    box: Tensor
    outputs: int
    form: Form
    last: LastStep | None = None
    anywhere: bool = False
    norm: str = "weighted 2-norm"

    @property
    def bound(self) -> UpperBound:
        """The smallest rate of the family."""
        rate = min(m.rate for m in self.members)
        return UpperBound(rate, self.norm, self.method, self.domain)

    def depth(
        self,
        eps: float,
        readout: Readout | None = None,
        norm: Norm = "max",
        radius: float | None = None,
    ) -> int | None:
        """Return the smallest proved depth; see ``Certificate.depth``."""
        depths = [self.depth_of(m, eps, readout, norm, radius) for m in self.members]
        return min((k for k in depths if k is not None), default=None)

    def depth_of(
        self,
        member: Metric,
        eps: float,
        readout: Readout | None = None,
        norm: Norm = "max",
        radius: float | None = None,
    ) -> int | None:
        """Return the smallest depth that one member proves."""
        first, later = _reach(self, member, readout, norm)
        if radius is None:
            first = min(up(first * member.radius, 2), _from_box(self, readout, norm))
            later = up(later * member.radius, 2)
        elif self.anywhere:
            start = _widest(member.P) * radius
            first, later = up(first * start, 4), up(later * start, 4)
        else:
            return None
        return geometric_depth(member.rate, first, later, eps)

    def gauges(self) -> tuple[Gauge, ...]:
        """Return the norm of every member."""
        return tuple(_gauge(self, member) for member in self.members)


@lru_cache(maxsize=256)
def _gauge(certificate: QuadraticCertificate, member: Metric) -> Gauge:
    H, P = certificate.outputs, member.P
    units = _root(inverse_forms_above(P, torch.eye(P.shape[0], dtype=P.dtype)[:H]))
    spread = quotient_above(P, torch.diag(P.diagonal()))

    def measure(r: Tensor) -> float:
        return _radius(P, r, P.diagonal(), spread)

    return Gauge(member.rate, member.radius, units, measure)


def _from_box(certificate: QuadraticCertificate, readout: Readout | None, norm: Norm) -> float:
    """Bound the output's difference before any step, from the box alone."""
    r = certificate.box[: certificate.outputs]
    if not bool(torch.isfinite(r).all()):
        return math.inf
    if readout is not None:
        r = times_above(readout.A.abs(), r)
    if norm == "max":
        return float(r.max()) if r.numel() else 0.0
    return up(float(torch.linalg.vector_norm(r)) * (1 + gamma(r.numel() + 4)), 2)


@lru_cache(maxsize=256)
def _reach(
    certificate: QuadraticCertificate, member: Metric, readout: Readout | None, norm: Norm
) -> tuple[float, float]:
    """Bound the output's error per unit of ‖δ_0‖_P: at k = 0, and per λᵏ at k ≥ 1."""
    P, H = member.P, certificate.outputs
    A = P.new_zeros((H if readout is None else readout.A.shape[0]), P.shape[0])
    A[:, :H] = torch.eye(H, dtype=P.dtype) if readout is None else readout.A
    last = certificate.last
    if A.numel() == 0:
        return 0.0, 0.0
    if norm == "2":
        first = up(math.sqrt(gram_above(A, P)), 2)
        later = first
        if last is not None and readout is None:
            # ‖δ_k‖₂ ≤ ‖diag(slope) W δ_{k−1}‖₂; the product diag(slope) W rounds once.
            weight = last.slope[:, None] * last.W
            square = gram_above(weight, P, roundings=1)
            later = min(later, _per_rate(math.sqrt(square), member.rate))
        return first, later
    rows = _root(inverse_forms_above(P, A))
    first = float(rows.max())
    if last is not None:
        unit = _units(member, last)
        through = A.abs() * unit  # |uᵀδ_k| ≤ Σ |u_i| |δ_{k,i}|
        rows = torch.minimum(rows, _sum_above(through))
        if last.zeroable and readout is not None:
            with few_threads(len(P)):
                larger = enlarged(P, A)
            rows = torch.minimum(rows, _root(inverse_forms_above(P, larger)))
    return first, float(rows.max())


def enlarged(P: Tensor, A: Tensor, steps: int = 300) -> Tensor:
    """Search for v with a small vᵀP⁻¹v that reads no less than a row u of A where u reads.

    With slopes zeroed in the last step wherever u_i δ_i would be negative or u_i is 0,
    uᵀδ only grows, and then uᵀδ ≤ vᵀδ for every v with v_i at least u_i in u's direction:
    so any such v bounds |uᵀδ_k| by λᵏ √(vᵀP⁻¹v) ‖δ_0‖_P. Projected gradients with momentum
    (Nesterov, 1983), in units in which P has a diagonal of ones.
    """
    s = 1 / P.diagonal().sqrt()
    inverse = torch.linalg.inv(s[:, None] * P * s)
    pace = 1 / float(torch.linalg.eigvalsh(inverse)[-1])
    u, sign = A * s, A.sign()
    v = ahead = u
    for step in range(steps):
        after = ahead - pace * (ahead @ inverse)
        after = torch.where(sign == 0, after, sign * torch.maximum(sign * after, u.abs()))
        ahead, v = after + step / (step + 3) * (after - v), after
    # Back in the readout's own units; what rounding took away is put back.
    v = v / s
    return torch.where(sign == 0, v, sign * torch.maximum(sign * v, A.abs()))


def _units(member: Metric, last: LastStep) -> Tensor:
    """Bound |δ_{k,i}| per λᵏ ‖δ_0‖_P at k ≥ 1, unit by unit."""
    unit = last.slope * _root(inverse_forms_above(member.P, last.W)) * (1 + 2 * UNIT)
    unit = unit / member.rate * (1 + 16 * UNIT) if member.rate > 0 else unit * math.inf
    if last.zeroable:
        unit = torch.minimum(unit, (1 + 8 * UNIT) / member.P.diagonal().sqrt())
    return unit


def _root(v: Tensor) -> Tensor:
    """Bound √v from above, one rounding of 1 ulp."""
    return v.sqrt() * (1 + 4 * UNIT)


def _sum_above(M: Tensor) -> Tensor:
    """Bound the row sums of a matrix without negative entries from above."""
    return M.sum(1) * (1 + 2 * gamma(M.shape[1] + 2)) + M.shape[1] * TINY


def _per_rate(value: float, rate: float) -> float:
    return up(value / rate, 16) if rate > 0 else math.inf


@lru_cache(maxsize=64)
def _widest(P: Tensor) -> float:
    """Bound √λ_max(P), so that ‖δ‖_P ≤ √λ_max ‖δ‖₂."""
    return up(math.sqrt(quotient_above(P, torch.eye(P.shape[0], dtype=P.dtype))), 2)


def radius_of_box(P: Tensor, r: Tensor, weights: Tensor) -> float:
    """Bound ‖δ‖_P over the box |δ_i| ≤ r_i.

    δᵀPδ ≤ rᵀ|P|r, and δᵀPδ ≤ t Σ w_i r_i² wherever P ⪯ t diag(w); the smaller counts.
    """
    return _radius(P, r, weights, quotient_above(P, torch.diag(weights)))


def _radius(P: Tensor, r: Tensor, weights: Tensor, spread: float) -> float:
    """Bound ‖δ‖_P over a box, given that P ⪯ spread · diag(weights)."""
    if not bool(torch.isfinite(r).all()):
        return math.inf
    plain = float(r @ times_above(P.abs(), r)) * (1 + 2 * gamma(r.numel() + 2))
    scaled = spread * float((weights * r.square()).sum()) * (1 + 2 * gamma(r.numel() + 6))
    return up(math.sqrt(min(plain, scaled) + TINY), 2)
