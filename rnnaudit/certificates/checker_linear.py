"""The checker's sum of a filter's tail: the error of a linear cell cut to depth k."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rnnaudit.certificates.checker_intervals import (
    TINY,
    UNIT,
    Array,
    CertificateError,
    above,
    growth,
    length_above,
)
from rnnaudit.certificates.checker_metric import Gauge, Metric
from rnnaudit.certificates.checker_systems import array_of
from rnnaudit.model import Cell, ElmanCell

_TERMS = 4000
"""Most terms of the tail that are summed one by one."""


def transition(cell: Cell) -> Array:
    """Return A of h' = A h + d, each entry rounded at most once.

    Raises:
        CertificateError: The cell is not linear.
    """
    linear = isinstance(cell, ElmanCell) and cell.activation.name == "affine"
    if not (linear and isinstance(cell, ElmanCell) and cell.clip is None):
        raise CertificateError("the tail of a filter is a proof for linear cells only")
    slope = 1.0 if cell.activation.alpha is None else cell.activation.alpha
    return slope * array_of(cell.W)


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """h_t − s_start = Σ_j Aʲ d_{t−j}, |d| ≤ first: a cut to k leaves the terms from j = k on."""

    A: Array
    metric: Metric

    def gauge(self) -> Gauge:
        """Return the metric's norm."""
        return self.metric.gauge()

    def depth(self, eps: float, norm: str, A: Array | None, through: Array | None) -> int | None:
        """Return the smallest depth that is proved for ε of the output A h; None without one."""
        coarse = self.metric.depth(eps, norm, A, through)
        if coarse is None or coarse > _TERMS:
            return coarse
        gauge = self.metric.gauge()
        reach = np.minimum(self.metric.r, gauge.units * gauge.radius) * (1 + 8 * UNIT)
        if not np.isfinite(reach).all():
            return coarse
        V = np.eye(len(self.A)) if A is None else A
        terms: list[Array] = []
        lost = np.zeros(len(V))
        for _ in range(_TERMS):
            size = np.abs(V)
            if length_above(above(size, reach), norm) <= eps / 1000:
                break
            terms.append(above(size, self.metric.first))
            # V A rounds in its sums, and once in A. What it lost of Vⱼ₊₁ meets a difference of
            # two reachable states, which is at most twice the reach.
            wrong = (size @ np.abs(self.A)) * (1.02 * growth(len(self.A) + 8)) + TINY
            lost = (lost + above(wrong, 2 * reach)) * (1 + 4 * UNIT)
            V = V @ self.A
        tail, k = (above(np.abs(V), reach) + lost) * (1 + 4 * UNIT), len(terms)
        if not length_above(tail, norm) <= eps:
            return coarse
        while k and length_above(tail := (tail + terms[k - 1]) * (1 + 4 * UNIT), norm) <= eps:
            k -= 1
        return min(k, coarse)
