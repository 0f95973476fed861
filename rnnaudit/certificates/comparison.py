"""The comparison matrix: |δ'| ≤ M|δ| entrywise, so |δ_k| ≤ Mᵏ r, with no norm in between."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.certificates.interface import MAX_DEPTH, Norm
from rnnaudit.certificates.intervals import times_above
from rnnaudit.model import Readout
from rnnaudit.norms import UNIT, gamma, up
from rnnaudit.results import UpperBound

_STEPS = 3000
"""Steps taken with the matrix itself; beyond them its rate decides."""


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonCertificate:
    """M [S, S] without negative entries bounds one step's differences; ``box`` [S] the first.

    ``weights`` v [S] > 0 prove the rate: M v ≤ rate · v.
    """

    method: str
    domain: str
    M: Tensor
    weights: Tensor
    rate: float
    box: Tensor
    outputs: int

    @property
    def bound(self) -> UpperBound:
        """The rate λ ≥ ρ(M)."""
        return UpperBound(self.rate, "weighted max-norm", self.method, self.domain)

    def depth(
        self,
        eps: float,
        readout: Readout | None = None,
        norm: Norm = "max",
        radius: float | None = None,
    ) -> int | None:
        """Return the smallest proved depth; see ``Certificate.depth``. ``radius`` is not known."""
        if radius is not None or not eps > 0 or not bool(torch.isfinite(self.box).all()):
            return None
        A = None if readout is None else readout.A.abs()
        tail = _output(A, self.weights[: self.outputs], norm)
        e, last_failure = self.box, -1
        # M is a sum of nonnegative terms: what `times_above` adds per step, once.
        reached = (self.M != 0).to(e)
        for k in range(_STEPS + 1):
            if _output(A, e[: self.outputs], norm) > eps:
                last_failure = k
            # e ≤ t v, and t only shrinks from here on.
            t = float((e / self.weights).max()) * (1 + 4 * UNIT)
            if up(t * tail, 2) <= eps:
                return last_failure + 1
            e = times_above(self.M, e, reached)
        k = _STEPS + 1
        t = float((e / self.weights).max()) * (1 + 4 * UNIT)
        more = math.ceil(math.log(max(t * tail / eps, 1.0)) / -math.log(self.rate))
        while k + more < MAX_DEPTH:
            if t * tail * self.rate**more * (1 + 1e-14) <= eps:
                return k + more
            more += 1
        return None


def _output(A: Tensor | None, e: Tensor, norm: Norm) -> float:
    """Bound the output's difference when that of h is at most e per unit."""
    if A is not None:
        e = times_above(A, e)
    if e.numel() == 0:
        return 0.0
    if norm == "max":
        return float(e.max())
    return up(float(torch.linalg.vector_norm(e)) * (1 + gamma(e.numel() + 4)), 2)


def contracting_weights(M: Tensor) -> tuple[Tensor, float] | None:
    """Search for v > 0 with M v ≤ λ v and the smallest λ < 1 that is found; None without one.

    v = (I − M/μ)⁻¹ 1 is positive for any μ above ρ(M); the quotient is then checked.
    """
    n = M.shape[0]
    if n == 0 or not bool(torch.isfinite(M).all()):
        return None
    radius = float(torch.linalg.eigvals(M).abs().max())
    if not radius < 1:
        return None
    best: tuple[Tensor, float] | None = None
    eye, one = torch.eye(n, dtype=M.dtype), torch.ones(n, dtype=M.dtype)
    near = [radius * (1 + part) for part in (1e-9, 1e-6, 1e-4, 1e-2)]
    spread = [radius + (1 - radius) * part for part in (0.01, 0.1, 0.3, 0.6, 0.9)]
    for mu in (*near, *spread):
        if not 0 < mu < 1:
            continue
        v = torch.linalg.solve(eye - M / mu, one)
        if not bool(torch.isfinite(v).all()) or float(v.min()) <= 0:
            continue
        v = v / v.max()
        if float(v.min()) < 1e-100:
            continue
        rate = up(float((times_above(M, v) / v).max()) * (1 + 4 * UNIT))
        if rate < 1 and (best is None or rate < best[1]):
            best = v, rate
    return best
