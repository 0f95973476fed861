"""Interval arithmetic on float64 tensors, every end rounded outward.

Sums and products of two floats round once, so one step outward covers them. Elementary
functions are those of torch, whose vectorised forms are within 1 ulp (SLEEF u10) and whose
compositions here stay within 8; ``_SLACK`` allows 32, and ``TINY`` what flushes to zero.
Infinite ends mean an unbounded side; 0 · ∞ is 0, as it is for sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.cells.activations import parameters, slope, slope_interval, value
from rnnaudit.model import Activation
from rnnaudit.norms import TINY, UNIT, gamma

_SLACK = 32 * UNIT
_INF = torch.tensor(math.inf, dtype=torch.float64)


def raised(v: Tensor) -> Tensor:
    """Return the next floats above v."""
    return torch.nextafter(v, _INF)


def lowered(v: Tensor) -> Tensor:
    """Return the next floats below v."""
    return torch.nextafter(v, -_INF)


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """The box lo ≤ v ≤ hi, elementwise, of tensors of any one shape."""

    lo: Tensor
    hi: Tensor

    @classmethod
    def point(cls, v: Tensor) -> Interval:
        """Return the box that holds v alone."""
        return cls(v, v)

    @classmethod
    def symmetric(cls, radius: Tensor) -> Interval:
        """Return the box |v| ≤ radius."""
        return cls(-radius, radius)

    @property
    def size(self) -> Tensor:
        """The largest magnitude in the box."""
        return torch.maximum(self.lo.abs(), self.hi.abs())

    @property
    def finite(self) -> bool:
        """Whether every end is a finite number (NaN is not)."""
        return bool(torch.isfinite(self.lo).all() and torch.isfinite(self.hi).all())

    def __add__(self, other: Interval) -> Interval:
        """Return the box of sums."""
        return Interval(lowered(self.lo + other.lo), raised(self.hi + other.hi))

    def __neg__(self) -> Interval:
        """Return the box of negatives."""
        return Interval(-self.hi, -self.lo)

    def __sub__(self, other: Interval) -> Interval:
        """Return the box of differences."""
        return self + (-other)

    def __mul__(self, other: Interval) -> Interval:
        """Return the box of products."""
        ends = torch.stack(
            [self.lo * other.lo, self.lo * other.hi, self.hi * other.lo, self.hi * other.hi]
        )
        zero = torch.stack(
            [
                (self.lo == 0) | (other.lo == 0),
                (self.lo == 0) | (other.hi == 0),
                (self.hi == 0) | (other.lo == 0),
                (self.hi == 0) | (other.hi == 0),
            ]
        )
        ends = torch.where(zero, torch.zeros_like(ends), ends)
        exact = zero.all(0)  # products of zeros; any other product may flush to zero
        return Interval(
            torch.where(exact, ends[0], lowered(ends.amin(0)) - TINY),
            torch.where(exact, ends[0], raised(ends.amax(0)) + TINY),
        )

    def split(self, sizes: int | list[int]) -> tuple[Interval, ...]:
        """Cut the first axis into parts of one size, or of these sizes."""
        ends = zip(self.lo.split(sizes), self.hi.split(sizes), strict=True)
        return tuple(Interval(lo, hi) for lo, hi in ends)

    def hull(self, other: Interval) -> Interval:
        """Return the smallest box that holds both."""
        return Interval(torch.minimum(self.lo, other.lo), torch.maximum(self.hi, other.hi))

    def meet(self, other: Interval) -> Interval:
        """Return the box of what both hold."""
        return Interval(torch.maximum(self.lo, other.lo), torch.minimum(self.hi, other.hi))

    def inside(self, other: Interval) -> bool:
        """Say whether the other box holds this one (NaN: no)."""
        return bool((self.lo >= other.lo).all() and (self.hi <= other.hi).all())

    def clamp(self, bound: float | None) -> Interval:
        """Return the box of values clipped to ±bound; the box itself for None."""
        if bound is None:
            return self
        return Interval(self.lo.clamp(-bound, bound), self.hi.clamp(-bound, bound))


def times_above(A: Tensor, v: Tensor, pattern: Tensor | None = None) -> Tensor:
    """Bound A v from above for A [m, n] and v [n] (or [n, k]) without negative entries.

    A row of A v that is zero by its pattern of zeros stays exactly zero. ``pattern`` is
    (A ≠ 0) as numbers, where the caller has it.
    """
    product = A @ v
    # All terms are nonnegative: relative error γ_n, and each product may underflow by TINY.
    above = product * (1 + 2 * gamma(A.shape[-1] + 2)) + A.shape[-1] * TINY
    if bool((v > 0).all()) and pattern is None:
        reached = (A != 0).any(-1)
        reached = reached.reshape(reached.shape + (1,) * (product.ndim - 1)).expand(product.shape)
    else:
        reached = ((A != 0).to(A) if pattern is None else pattern) @ (v != 0).to(A) > 0
    return torch.where(reached, above, torch.zeros_like(product))


def affine(A: Tensor, box: Interval, b: Tensor | None = None) -> Interval:
    """Return the box of A v + b over v in ``box``, for A [m, n]."""
    lo_inf, hi_inf = torch.isinf(box.lo), torch.isinf(box.hi)
    lo, hi = box.lo.masked_fill(lo_inf, 0.0), box.hi.masked_fill(hi_inf, 0.0)
    up_, down = A.clamp(min=0), A.clamp(max=0)
    low, high = up_ @ lo + down @ hi, up_ @ hi + down @ lo
    # 2n products and the bias: |error| ≤ γ_{2n+2} (|A| |v| + |b|), plus underflow.
    size = A.abs() @ torch.maximum(lo.abs(), hi.abs())
    if b is not None:
        low, high, size = low + b, high + b, size + b.abs()
    slack = 1.01 * gamma(2 * A.shape[-1] + 4) * size + (2 * A.shape[-1] + 2) * TINY
    low, high = lowered(low - slack), raised(high + slack)
    if bool(lo_inf.any() or hi_inf.any()):
        to = lo.dtype
        up_inf = ((up_ > 0).to(to) @ hi_inf.to(to) + (down < 0).to(to) @ lo_inf.to(to)) > 0
        low_inf = ((up_ > 0).to(to) @ lo_inf.to(to) + (down < 0).to(to) @ hi_inf.to(to)) > 0
        low = low.masked_fill(low_inf, -math.inf)
        high = high.masked_fill(up_inf, math.inf)
    return Interval(low, high)


def _widened(lo: Tensor, hi: Tensor) -> Interval:
    """Allow for the error of elementary functions at both ends."""
    return Interval(lo - lo.abs() * _SLACK - TINY, hi + hi.abs() * _SLACK + TINY)


def _line(activation: Activation, lo: Tensor, hi: Tensor) -> Interval:
    """Return a box of α v + β over lo ≤ v ≤ hi: terms that cancel leave their roundings."""
    alpha, beta = parameters(activation)
    terms = alpha * torch.stack([lo, hi])
    ends = terms + beta
    # The product, both sums: one rounding each, of no more than the terms' sizes.
    lost = (4 * UNIT * (terms.abs() + abs(beta))).clamp(max=1e290) + TINY
    return Interval((ends - lost).amin(0), (ends + lost).amax(0))


def apply(activation: Activation, v: Interval, clip: float | None = None) -> Interval:
    """Return a box of φ over v, first clipped to ±clip.

    Every activation but a jump is monotone on either side of 0, so its ends are among
    φ(lo), φ(hi) and φ(0).
    """
    v = v.clamp(clip)
    big = 1e300  # stands for infinity where φ has a limit
    lo, hi = v.lo.clamp(-big, big), v.hi.clamp(-big, big)
    if activation.name in {"affine", "hardsigmoid"}:
        box = _line(activation, lo, hi)
        if activation.name == "hardsigmoid":
            box = Interval(box.lo.clamp(0, 1), box.hi.clamp(0, 1))
    else:
        middle = torch.zeros_like(lo).clamp(min=lo, max=hi)
        ends = torch.stack([value(activation, end) for end in (lo, hi, middle)])
        box = _widened(ends.amin(0), ends.amax(0))
    unbounded = activation.name in {"relu", "leakyrelu", "affine", "elu", "softplus"}
    if unbounded:
        infinite = (v.lo < -big) | (v.hi > big)
        box = Interval(
            box.lo.masked_fill(infinite, -math.inf), box.hi.masked_fill(infinite, math.inf)
        )
    return box


_BELL = frozenset({"tanh", "sigmoid", "scaledtanh", "softsign"})
"""Slope even, and falling (in size) away from 0."""


def slopes(activation: Activation, v: Interval, clip: float | None = None) -> Interval | None:
    """Return a box that holds every difference quotient of φ on v; None where there is none.

    Difference quotients are means of the slope, so the slope's own range holds them.
    """
    everywhere = slope_interval(activation)
    if everywhere is None:
        return None
    held = v.clamp(clip)
    lo, hi = held.lo, held.hi
    zero = torch.zeros_like(lo)
    name = activation.name
    if name in _BELL:
        near = zero.clamp(min=lo, max=hi)
        far = torch.where(lo.abs() > hi.abs(), lo, hi).clamp(-1e300, 1e300)
        at_near, at_far = slope(activation, near), slope(activation, far)
        box = _widened(torch.minimum(at_near, at_far), torch.maximum(at_near, at_far))
    elif name in {"relu", "leakyrelu", "elu"}:
        right = torch.ones_like(lo)
        left_hi = slope(activation, torch.minimum(hi, -zero).clamp(min=-1e300) - 1e-300)
        left_lo = slope(activation, lo.clamp(min=-1e300, max=0) - 1e-300)
        left = _widened(torch.minimum(left_lo, left_hi), torch.maximum(left_lo, left_hi))
        both = left.hull(Interval.point(right))
        box = Interval(
            torch.where(lo > 0, right, torch.where(hi < 0, left.lo, both.lo)),
            torch.where(lo > 0, right, torch.where(hi < 0, left.hi, both.hi)),
        )
    elif name == "softplus":
        box = _widened(slope(activation, lo), slope(activation, hi))
    else:
        box = Interval(torch.full_like(lo, everywhere[0]), torch.full_like(hi, everywhere[1]))
    # No slope leaves the interval that holds everywhere (up to the rounding of its ends).
    box = box.meet(_widened(*(torch.full_like(lo, end) for end in everywhere)))
    if everywhere[0] == 0:
        box = Interval(box.lo.clamp(min=0), box.hi)
    if name in {"tanh", "relu", "softsign", "softplus"}:
        box = Interval(box.lo, box.hi.clamp(max=1.0))
    elif name == "sigmoid":
        box = Interval(box.lo, box.hi.clamp(max=0.25))
    if clip is not None:
        # Where the clip can take hold, quotients mix slopes with 0.
        cut = (v.lo < -clip) | (v.hi > clip)
        box = Interval(
            torch.where(cut, box.lo.clamp(max=0), box.lo),
            torch.where(cut, box.hi.clamp(min=0), box.hi),
        )
    return box


def settled(box: Interval, image: Callable[[Interval], Interval]) -> Interval:
    """Widen a box a little so that it holds its own image with room for rounding to spare.

    A box from which no such widening is found is returned as it is.
    """
    width = box.hi - box.lo
    for part in (1e-9, 1e-6, 1e-3):
        room = 1e-4 * part * width + 1e-13
        wider = Interval(box.lo - part * width - 1e-10, box.hi + part * width + 1e-10)
        for _ in range(30):
            after = image(wider)
            after = Interval(after.lo - room, after.hi + room)
            if not wider.finite or after.inside(wider):
                return wider
            wider = wider.hull(Interval(after.lo - room, after.hi + room))
    return box


def loosened(sector: Interval) -> Interval:
    """Widen the intervals of multipliers by 1e-10 of their size, so that any checker's hold."""
    more = 1e-10 * sector.size + 1e-250
    return Interval(sector.lo - more, sector.hi + more)
