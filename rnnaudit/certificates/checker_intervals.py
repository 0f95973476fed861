"""Interval arithmetic of the checker: numpy only, no code of the search.

Rounding: u = 2⁻⁵³. A dot product of n terms errs by at most γ_n = nu/(1 − nu) times the sum
of the sizes of its terms, in any order of summation (Higham, 2002); ``growth(n)`` is above
γ_n. Elementary functions of numpy are within 4 ulp; ``WIDE`` allows 90. ``TINY`` exceeds
what underflow can lose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from rnnaudit.errors import RnnauditError
from rnnaudit.model import SIGMOID, Activation

Array = NDArray[np.float64]
Box = tuple[Array, Array]

UNIT = 2.0**-53
WIDE = 1e-14
TINY = 1e-280


class CertificateError(RnnauditError):
    """A certificate that does not prove what it claims of this model."""

    exit_code = 1
    default_id = "RA213"


def growth(n: int) -> float:
    """Return an upper bound on γ_n."""
    return n * UNIT * 1.001


def outward(lo: Array, hi: Array, ulps: float = 4.0) -> Box:
    """Round a box outward by a few ulps."""
    return lo - np.abs(lo) * (ulps * UNIT) - TINY, hi + np.abs(hi) * (ulps * UNIT) + TINY


def add(a: Box, b: Box) -> Box:
    """Bound sums."""
    return outward(a[0] + b[0], a[1] + b[1])


def negative(a: Box) -> Box:
    """Bound negatives."""
    return -a[1], -a[0]


def times(a: Box, b: Box) -> Box:
    """Bound products."""
    ends = np.stack([a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1]])
    return outward(ends.min(0), ends.max(0))


def largest(a: Box) -> Array:
    """Return the largest magnitudes in a box."""
    magnitudes: Array = np.maximum(np.abs(a[0]), np.abs(a[1]))
    return magnitudes


def hull(a: Box, b: Box) -> Box:
    """Return the smallest box that holds both."""
    return np.minimum(a[0], b[0]), np.maximum(a[1], b[1])


def affine(A: Array, v: Box, b: Array) -> Box:
    """Bound A v + b; an infinite end of v reaches every row that reads it."""
    lo, hi = (np.where(np.isinf(end), 0.0, end) for end in v)
    up, down = np.maximum(A, 0), np.minimum(A, 0)
    size = np.abs(A) @ largest((lo, hi)) + np.abs(b)
    slack = growth(2 * A.shape[1] + 6) * size * 1.01 + TINY
    low, high = up @ lo + down @ hi + b - slack, up @ hi + down @ lo + b + slack
    unbounded = np.isinf(v[0]) | np.isinf(v[1])
    reached = (A != 0) @ unbounded.astype(float) > 0
    return np.where(reached, -np.inf, low), np.where(reached, np.inf, high)


def _parameters(f: Activation) -> tuple[float, float]:
    defaults = {
        "affine": (1.0, 0.0),
        "leakyrelu": (0.01, 0.0),
        "scaledtanh": (1.0, 1.0),
        "hardsigmoid": (0.2, 0.5),
        "elu": (1.0, 0.0),
    }
    a, b = defaults.get(f.name, (0.0, 0.0))
    return (a if f.alpha is None else f.alpha), (b if f.beta is None else f.beta)


def _logistic(v: Array) -> Array:
    e = np.exp(-np.abs(v))
    return np.where(v >= 0, 1 / (1 + e), e / (1 + e))


VALUES: Mapping[str, Callable[[Array, float, float], Array]] = {
    "tanh": lambda v, a, b: np.tanh(v),
    "relu": lambda v, a, b: np.maximum(v, 0),
    "sigmoid": lambda v, a, b: _logistic(v),
    "affine": lambda v, a, b: a * v + b,
    "leakyrelu": lambda v, a, b: np.where(v >= 0, v, a * v),
    "scaledtanh": lambda v, a, b: a * np.tanh(b * v),
    "hardsigmoid": lambda v, a, b: np.clip(a * v + b, 0, 1),
    "elu": lambda v, a, b: np.where(v >= 0, v, a * np.expm1(np.minimum(v, 0))),
    "softsign": lambda v, a, b: v / (1 + np.abs(v)),
    "softplus": lambda v, a, b: np.maximum(v, 0) + np.log1p(np.exp(-np.abs(v))),
}

_UNBOUNDED = frozenset({"relu", "affine", "leakyrelu", "elu", "softplus"})


def clipped(v: Box, clip: float | None) -> Box:
    """Bound values clipped to ±clip."""
    return v if clip is None else (np.clip(v[0], -clip, clip), np.clip(v[1], -clip, clip))


def _line(a: float, b: float, lo: Array, hi: Array) -> Box:
    """Bound a v + b, whose terms may cancel: what is left then is no measure of the rounding."""
    terms = np.stack([a * lo, a * hi])
    lost = np.minimum(4 * UNIT * (np.abs(terms) + abs(b)), 1e290) + TINY
    return (terms + b - lost).min(0), (terms + b + lost).max(0)


def value(f: Activation, v: Box, clip: float | None) -> Box:
    """Bound φ over v: monotone on either side of 0, so φ at the ends and at 0 decide."""
    v = clipped(v, clip)
    function, (a, b) = VALUES[f.name], _parameters(f)
    lo, hi = np.clip(v[0], -1e300, 1e300), np.clip(v[1], -1e300, 1e300)
    if f.name in ("affine", "hardsigmoid"):
        box = _line(a, b, lo, hi)
        if f.name == "hardsigmoid":
            box = np.clip(box[0], 0, 1), np.clip(box[1], 0, 1)
    else:
        ends = np.stack([function(p, a, b) for p in (lo, hi, np.clip(0.0, lo, hi))])
        low, high = ends.min(0), ends.max(0)
        box = low - np.abs(low) * WIDE - TINY, high + np.abs(high) * WIDE + TINY
    if f.name in _UNBOUNDED:
        endless = (v[0] < -1e300) | (v[1] > 1e300)
        box = np.where(endless, -np.inf, box[0]), np.where(endless, np.inf, box[1])
    return box


def _bell(f: Activation, v: Array, a: float, b: float) -> Array:
    if f.name == "sigmoid":
        return _logistic(v) * _logistic(-v)
    if f.name == "softsign":
        return 1 / (1 + np.abs(v)) ** 2
    scale, inner = (a * b, b * v) if f.name == "scaledtanh" else (1.0, v)
    return scale * 4 * _logistic(2 * inner) * _logistic(-2 * inner)


def slope(f: Activation, v: Box, clip: float | None) -> Box:
    """Bound the difference quotients of φ over v."""
    a, b = _parameters(f)
    held = clipped(v, clip)
    lo, hi = np.clip(held[0], -1e300, 1e300), np.clip(held[1], -1e300, 1e300)
    if f.name in ("tanh", "sigmoid", "scaledtanh", "softsign"):
        near, far = np.clip(0.0, lo, hi), np.where(np.abs(lo) > np.abs(hi), lo, hi)
        ends = np.stack([_bell(f, near, a, b), _bell(f, far, a, b)])
    elif f.name in ("relu", "leakyrelu", "elu"):
        below = [np.full_like(lo, {"relu": 0.0, "leakyrelu": a}.get(f.name, a))]
        if f.name == "elu":
            below.append(a * np.exp(np.minimum(lo, 0)))
        left, right = np.stack(below), np.ones_like(lo)
        ends = np.stack(
            [
                np.where(hi < 0, left.min(0), np.where(lo > 0, 1.0, np.minimum(left.min(0), 1.0))),
                np.where(lo > 0, right, np.where(hi < 0, left.max(0), np.maximum(left.max(0), 1))),
            ]
        )
    elif f.name == "softplus":
        ends = np.stack([_logistic(lo), _logistic(hi)])
    elif f.name == "affine":
        ends = np.stack([np.full_like(lo, a)] * 2)
    elif f.name == "hardsigmoid":
        ends = np.stack([np.zeros_like(lo), np.full_like(lo, a)])
    else:
        raise CertificateError(f"{f.name} jumps, so nothing bounds its slope")
    low, high = ends.min(0), ends.max(0)
    low, high = low - np.abs(low) * WIDE - TINY, high + np.abs(high) * WIDE + TINY
    if f.name in ("tanh", "relu", "softsign", "softplus"):
        high = np.minimum(high, 1.0)
    if clip is not None:
        cut = (v[0] < -clip) | (v[1] > clip)
        low = np.where(cut, np.minimum(low, 0), low)
        high = np.where(cut, np.maximum(high, 0), high)
    return low, high


def one_minus(gate: Activation, pre: Box, clip: float | None) -> Box:
    """Bound 1 − φ, which for σ is σ(−a)."""
    if gate == SIGMOID:
        return value(gate, negative(clipped(pre, clip)), None)
    one = np.ones_like(pre[0])
    return add((one, one), negative(value(gate, pre, clip)))


def above(A: Array, v: Array) -> Array:
    """Bound A v from above for arrays without negative entries; exact zeros stay."""
    product = A @ v
    reached = (A != 0).astype(float) @ (v != 0).astype(float) > 0
    bound: Array = np.where(reached, product * (1 + 2 * growth(A.shape[1] + 2)) + TINY, 0.0)
    return bound


def length_above(e: Array, norm: str) -> float:
    """Bound the norm (``max`` or ``2``) of any vector within e, which has no negative entry."""
    if not len(e):
        return 0.0
    if norm == "max":
        return float(e.max())
    # A square below the smallest float is lost.
    return float(np.sqrt((e * e).sum() * (1 + growth(len(e) + 4)) + TINY)) * (1 + 4 * UNIT)
