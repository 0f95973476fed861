"""The comparison matrix: |δ'| ≤ M|δ| entrywise, so |δ_k| ≤ Mᵏ r, with no norm in between."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

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
        return _decay(self, readout, norm).depth(eps)

    def of_h(self, e: Tensor) -> Tensor:
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


class Decay:
    """What a restart leaves of an error: output(e_k), e_0 = first, worked out once for every ε."""

    def __init__(
        self,
        advance: Callable[[Tensor], Tensor],
        first: Tensor,
        weights: Tensor,
        *,
        rate: float,
        output: Callable[[Tensor], float],
    ) -> None:
        """Begin with the differences before any step.

        Args:
            advance: Bounds the next differences from these; monotone and homogeneous.
            first: Bound [n] on the differences before any step.
            weights: v > 0 with advance(v) ≤ rate · v, so that e ≤ t v stays so.
            rate: Below 1.
            output: Bounds the output's error from differences e; monotone and homogeneous.
        """
        self._advance, self._weights, self._rate, self._output = advance, weights, rate, output
        self._e, self._tail = first, output(weights)
        self._bounded = bool(torch.isfinite(first).all())
        self._errors: list[float] = []
        self._later: list[float] = []
        self._size = math.inf

    def depth(self, eps: float) -> int | None:
        """Return the smallest k such that output(e_j) ≤ ε for every j ≥ k; None without one."""
        if not eps > 0 or not self._bounded:
            return None
        last_failure = -1
        for k in range(_STEPS + 1):
            if k == len(self._errors):
                self._step()
            if not self._errors[k] <= eps:
                last_failure = k
            if self._later[k] <= eps:
                return last_failure + 1
        if not math.isfinite(self._size):
            return None
        later = range(DEEPEST - _STEPS)
        place = bisect_left(
            later,
            True,
            key=lambda more: self._size * power_above(self._rate, more) * (1 + 1e-14) <= eps,
        )
        return None if place == len(later) else _STEPS + place

    def _step(self) -> None:
        """Bound the output one step later, and at every step from there on."""
        if self._errors:
            self._e = self._advance(self._e)
        self._errors.append(self._output(self._e))
        # e ≤ t v, and t only shrinks from here on.
        t = float((self._e / self._weights).max()) * (1 + 4 * UNIT)
        self._size = t * self._tail
        self._later.append(up(self._size, 4))


@lru_cache(maxsize=256)
def _decay(certificate: ComparisonCertificate, readout: Readout | None, norm: Norm) -> Decay:
    A = None if readout is None else readout.A.abs()

    def output(e: Tensor) -> float:
        return output_above(A, certificate.of_h(e), norm)

    return Decay(
        stepper(certificate.M, certificate.mixing),
        certificate.box,
        certificate.weights,
        rate=certificate.rate,
        output=output,
    )


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
