"""Linear cells: the truncated model is a filter, and its tail is the error.

With h' = A h + d_t, h_t − h^k_t = Σ_{j ≥ k} Aʲ d_{t−j}, where d = φ(s_start, x) − s_start
lies in a box. The tail is summed row by row; a metric bounds how far states can be at all,
and so what is left of the tail, and what rounding made of the powers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.certificates.comparison import output_above
from rnnaudit.certificates.interface import DEEPEST, Gauge
from rnnaudit.certificates.intervals import times_above
from rnnaudit.certificates.quadratic import QuadraticCertificate
from rnnaudit.model import Readout
from rnnaudit.norms import UNIT, product_error, up
from rnnaudit.results import Norm, UpperBound

_TERMS = 4000
"""Most terms of the tail that are summed one by one."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearCertificate:
    """The exact tail of h' = A h + d, |d| ≤ ``first`` [H], closed by ``metric``."""

    method: str
    domain: str
    A: Tensor
    first: Tensor
    metric: QuadraticCertificate

    @property
    def bound(self) -> UpperBound:
        """The rate of the metric, which is at least ρ(A)."""
        found = self.metric.bound
        return UpperBound(found.value, found.norm, self.method, self.domain)

    @property
    def box(self) -> Tensor:
        """Bound [S] on |s − s_start| over the reachable states."""
        return self.metric.box

    def gauges(self) -> tuple[Gauge, ...]:
        """Return the norms of the metric."""
        return self.metric.gauges()

    def depth(
        self,
        eps: float,
        readout: Readout | None = None,
        norm: Norm = "max",
        radius: float | None = None,
    ) -> int | None:
        """Return the smallest proved depth; see ``Certificate.depth``."""
        coarse = self.metric.depth(eps, readout, norm, radius)
        if coarse is None or radius is not None or coarse > _TERMS:
            return coarse
        reach = self._reach()
        if not bool(torch.isfinite(reach).all()):
            return coarse
        # With V_{j+1} = V_j A + Δ_j in float64, a row of A^k times a reachable difference is
        # at most Σ_{k ≤ j < J} |V_j| first + |V_J| reach + 2 Σ_{j < J} |Δ_j| reach.
        V = torch.eye(len(self.A), dtype=self.A.dtype) if readout is None else readout.A
        terms: list[Tensor] = []
        lost = torch.zeros_like(V[:, 0])
        for _ in range(_TERMS):
            rest = times_above(V.abs(), reach)
            if output_above(None, rest, norm) <= eps / 1000:
                break
            terms.append(times_above(V.abs(), self.first))
            # A itself is a product of a slope and W, rounded once.
            size = times_above(V.abs(), self.A.abs())
            error = product_error(V, self.A) + 3 * UNIT * size
            # Δ_j meets Aᵐ(s − s_start), the difference of two reachable states: each is within
            # reach of s_start, so that they are within twice that (exact in binary).
            lost = (lost + times_above(error, 2 * reach)) * (1 + 1e-15)
            V = V @ self.A
        rest = (times_above(V.abs(), reach) + lost) * (1 + 1e-15)
        return min(coarse, _summed(terms, rest, eps, norm))

    def _reach(self) -> Tensor:
        """Bound |h − s_start| per unit over the reachable states."""
        bounds = [self.box] + [up(g.radius, 2) * g.units for g in self.gauges()]
        return torch.stack(bounds).amin(0) * (1 + 4 * UNIT)


def _summed(terms: list[Tensor], rest: Tensor, eps: float, norm: Norm) -> int:
    """Return the smallest k with Σ_{j ≥ k} ``terms`` and the ``rest`` beyond them ≤ ε.

    A k at which even the rest alone exceeds ε is beyond every term.
    """
    tail, k = rest, len(terms)
    if not output_above(None, tail, norm) <= eps:
        return DEEPEST
    while k > 0:
        longer = (tail + terms[k - 1]) * (1 + 1e-15)
        if not output_above(None, longer, norm) <= eps:
            break
        tail, k = longer, k - 1
    return k
