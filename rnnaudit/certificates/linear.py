"""Linear cells: the truncated model is a filter, and its tail is the error.

With h' = A h + d_t, h_t − h^k_t = Σ_{j ≥ k} Aʲ d_{t−j}, where d = φ(s_start, x) − s_start
lies in a box. The tail is summed row by row, and a metric bounds what is left of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.certificates.comparison import output_above
from rnnaudit.certificates.interface import Gauge, Norm
from rnnaudit.certificates.intervals import times_above
from rnnaudit.certificates.quadratic import QuadraticCertificate
from rnnaudit.model import Readout
from rnnaudit.norms import UNIT, product_error
from rnnaudit.results import UpperBound

_TERMS = 4000
"""Most terms of the tail that are summed one by one."""

_PARTS = (2, 8, 64, 1000)
"""Shares of ε left to the metric: a smaller one sums more terms, whose rounding grows."""


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
        # Beyond each of these the metric's own depth bounds the tail by a share of ε.
        shares = [(eps / part, self.metric.depth(eps / part, readout, norm)) for part in _PARTS]
        closed = [(left, k) for left, k in shares if k is not None and k <= _TERMS]
        if not closed:
            return coarse
        rows = torch.eye(len(self.A), dtype=self.A.dtype) if readout is None else readout.A
        terms = []
        V, off = rows, torch.zeros_like(rows)
        for _ in range(max(k for _, k in closed)):
            # V is near rows · Aʲ, within `off` entrywise.
            terms.append(times_above(V.abs() + off, self.first))
            # A itself is a product of a slope and W, rounded once.
            size = times_above(V.abs(), self.A.abs())
            off = times_above(off, self.A.abs()) + product_error(V, self.A) + 3 * UNIT * size
            V = V @ self.A
        return min(coarse, *(_summed(terms[:k], left, eps, norm) for left, k in closed))


def _summed(terms: list[Tensor], left: float, eps: float, norm: Norm) -> int:
    """Return the smallest k with Σ_{j ≥ k} ``terms`` and what is ``left`` beyond them ≤ ε."""
    k = len(terms)
    tail = torch.zeros_like(terms[0]) if terms else torch.zeros(1, dtype=torch.float64)
    while k > 0:
        longer = (tail + terms[k - 1]) * (1 + 1e-15)
        if not output_above(None, longer, norm) + left <= eps:
            break
        tail, k = longer, k - 1
    return k
