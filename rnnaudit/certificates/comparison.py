"""The comparison matrix: |δ'| ≤ M|δ| entrywise, so |δ_k| ≤ Mᵏ r, with no norm in between."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.certificates.interface import DEEPEST, Gauge, Search, power_above
from rnnaudit.certificates.intervals import times_above
from rnnaudit.model import Readout
from rnnaudit.norms import UNIT, gamma, up
from rnnaudit.results import Norm, UpperBound

OF_NORMS = "∞-norm"
"""The norm of a comparison matrix whose entries compare norms of h and c, not units."""

_STEPS = 3000
"""Steps taken with the matrix itself; beyond them its rate decides."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixing:
    """A step z e + (1 − z) B e with one z in [lo, hi] per unit, the larger end counting."""

    lo: Tensor
    hi: Tensor
    B: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonCertificate:
    """M [S, S] without negative entries bounds one step's differences; ``box`` [S] the first.

    ``weights`` v [S] > 0 prove the rate: M v ≤ rate · v. Where M has fewer rows than there
    are states, its first entry bounds all of h. ``mixing`` adds what M cannot say.
    """

    method: str
    domain: str
    M: Tensor
    weights: Tensor
    rate: float
    box: Tensor
    outputs: int
    norm: str = "weighted max-norm"
    mixing: Mixing | None = None

    @property
    def bound(self) -> UpperBound:
        """The rate λ ≥ ρ(M)."""
        return UpperBound(self.rate, self.norm, self.method, self.domain)

    def depth(
        self,
        eps: float,
        readout: Readout | None = None,
        norm: Norm = "max",
        radius: float | None = None,
    ) -> int | None:
        """Return the smallest proved depth; see ``Certificate.depth``. ``radius`` is not known."""
        if radius is not None or not bool(torch.isfinite(self.box).all()):
            return None
        A = None if readout is None else readout.A.abs()
        advance = stepper(self.M, self.mixing)

        def output(e: Tensor) -> float:
            return output_above(A, self._of_h(e), norm)

        return settled_depth(
            advance, self.box, self.weights, rate=self.rate, output=output, eps=eps
        )

    def _of_h(self, e: Tensor) -> Tensor:
        """Return the bounds [H] of the output's units."""
        return e[:1].expand(self.outputs) if self.norm == OF_NORMS else e[: self.outputs]

    def gauges(self) -> tuple[Gauge, ...]:
        """Return the weighted max-norm max |δ_i| / v_i."""
        if self.norm == OF_NORMS:
            return ()  # the entries are norms, not states
        v = self.weights

        def measure(r: Tensor) -> float:
            return up(float((r / v).max()), 2)

        return (Gauge(self.rate, measure(self.box), v[: self.outputs], measure),)


def stepper(M: Tensor, mixing: Mixing | None = None) -> Callable[[Tensor], Tensor]:
    """Return e ↦ M e (and the mixing of e), rounded up."""
    pattern = (M != 0).to(M)
    if mixing is None:
        return lambda e: times_above(M, e, pattern)
    inner = (mixing.B != 0).to(M)

    def step(e: Tensor) -> Tensor:
        own = times_above(mixing.B, e, inner)
        low = mixing.lo * e + (1 - mixing.lo) * own
        high = mixing.hi * e + (1 - mixing.hi).clamp(min=0) * own
        return (torch.maximum(low, high) + times_above(M, e, pattern)) * (1 + 1e-15)

    return step


def growth_of(M: Tensor, mixing: Mixing) -> float:
    """Return about what one step of a mixed comparison grows by, by power iteration."""
    step, growth = stepper(M, mixing), 1.0
    v = torch.ones_like(mixing.lo)
    for _ in range(100):
        after = step(v)
        growth = float((after / v).max())
        v = after / after.max().clamp(min=1e-300) + 1e-9
    return growth


def compare(M: Tensor, domain: str, box: Tensor, outputs: int, search: Search) -> None:
    """Prove contraction by M [S, S], which bounds one step's differences entrywise."""
    found = contracting_weights(M)
    if found is None:
        search.fail("comparison matrix", _too_large(M))
        return
    search.certificates.append(
        ComparisonCertificate("comparison matrix", domain, M, *found, box, outputs)
    )


def _too_large(M: Tensor) -> str:
    """Say why a comparison matrix proves nothing."""
    if not bool(torch.isfinite(M).all()):
        return "the comparison matrix overflows float64"
    radius = float(torch.linalg.eigvals(M).abs().max())
    return f"the comparison matrix has a spectral radius of about {radius:.4g}, not below 1"


def mixing_weights(M: Tensor, mixing: Mixing) -> tuple[Tensor, float] | None:
    """Search for v > 0 with F(v) ≤ λ v, λ < 1, for the step F of a mixed comparison.

    v = 1 + F(v) / μ, iterated, is positive and exists for any μ above F's growth rate.
    """
    step, growth = stepper(M, mixing), growth_of(M, mixing)
    best: tuple[Tensor, float] | None = None
    for part in (0.02, 0.1, 0.3, 0.6):
        mu = growth + (1 - growth) * part
        if not 0 < mu < 1:
            continue
        v = torch.ones_like(mixing.lo)
        for _ in range(300):
            v = 1 + step(v) / mu
            if not bool(torch.isfinite(v).all()):
                break
        rate = up(float((step(v) / v).max()) * (1 + 4 * UNIT))
        if rate < 1 and (best is None or rate < best[1]):
            best = v, rate
    return best


def settled_depth(
    advance: Callable[[Tensor], Tensor],
    first: Tensor,
    weights: Tensor,
    *,
    rate: float,
    output: Callable[[Tensor], float],
    eps: float,
) -> int | None:
    """Return the smallest k such that output(e_j) ≤ ε for every j ≥ k, e_0 = first.

    Args:
        advance: Bounds the next differences from these; monotone and homogeneous.
        first: Bound [n] on the differences before any step.
        weights: v > 0 with advance(v) ≤ rate · v, so that e ≤ t v stays so.
        rate: Below 1.
        output: Bounds the output's error from differences e; monotone and homogeneous.
        eps: The error that is allowed.
    """
    if not eps > 0 or not bool(torch.isfinite(first).all()):
        return None
    tail = output(weights)
    e, last_failure, k = first, -1, 0
    while True:
        if not output(e) <= eps:
            last_failure = k
        # e ≤ t v, and t only shrinks from here on.
        t = float((e / weights).max()) * (1 + 4 * UNIT)
        if up(t * tail, 4) <= eps:
            return last_failure + 1
        if k == _STEPS:
            break
        e, k = advance(e), k + 1
    size = t * tail
    if not math.isfinite(size):
        return None
    later = range(DEEPEST - k)
    place = bisect_left(
        later, True, key=lambda more: size * power_above(rate, more) * (1 + 1e-14) <= eps
    )
    return None if place == len(later) else k + place


def output_above(A: Tensor | None, e: Tensor, norm: Norm) -> float:
    """Bound the norm of A δ (or of δ) over |δ| ≤ e, for A without negative entries."""
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
        v = torch.linalg.solve_ex(eye - M / mu, one)[0]
        if not bool(torch.isfinite(v).all()) or float(v.min()) <= 0:
            continue
        v = v / v.max()
        if float(v.min()) < 1e-100:
            continue
        rate = up(float((times_above(M, v) / v).max()) * (1 + 4 * UNIT))
        if rate < 1 and (best is None or rate < best[1]):
            best = v, rate
    return best
