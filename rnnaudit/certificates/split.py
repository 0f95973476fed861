"""How a proved ε is divided between recurrences so that the sum of their depths is smallest.

Cut to k, a recurrence below the last layer moves the output by at most b(k), which falls
with k; what such bounds leave of ε is the last layer's. Of all depths that fit within a
known sum, every total Σ k is looked at with the smallest Σ b that it allows, by a min-plus
product of the recurrences' bounds, so that no division of ε gives a smaller sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Bound = Callable[[int], float]
"""What a cut to a depth of 1 or more moves the output by at most; it falls with the depth."""

Last = Callable[[float], Mapping[str, int] | None]
"""The last layer's depths for what is left of ε: they sum to less the more is left."""

FINEST = 512
"""Depths of one recurrence that are looked at; of more, every second, third, …"""


def cheapest(
    bounds: Sequence[Bound],
    counts: Sequence[int],
    last: Last,
    eps: float,
    most: int,
) -> tuple[tuple[int, ...], Mapping[str, int]] | None:
    """Return depths for the bounds, and those of the last layer, with the smallest sum.

    Args:
        bounds: Of recurrences, or of layers whose directions share a depth.
        counts: How many recurrences share each depth.
        last: The last layer's depths.
        eps: What the bounds and the last layer's error sum to at most.
        most: No depth is larger.

    Returns:
        None where no division of ε has such depths.
    """
    if not bounds:
        only = last(eps)
        return None if only is None else ((), only)
    lows = [least(bound, math.nextafter(eps, 0), most) for bound in bounds]
    low = [k for k in lows if k is not None]
    whole = last(eps)
    if len(low) < len(lows) or whole is None:
        return None
    found = list(_proposed(bounds, last, eps, most))
    floor = _sum(low, counts, whole)
    ceilings = [_sum(depths, counts, rest) for depths, rest in found]
    room = max(0, min(ceilings, default=most * (sum(counts) + len(whole))) - floor)
    stride = -(-room // FINEST) or 1
    size = room // stride + 1

    def depth(i: int, place: int) -> int:
        return min(low[i] + place * stride // counts[i], most)

    tables = [_table(bound, [depth(i, j) for j in range(size)]) for i, bound in enumerate(bounds)]
    totals, choices = tables[0], []
    for table in tables[1:]:
        totals, choice = _joined(totals, table)
        choices.append(choice)
    at = _smallest(totals, last, eps, stride)
    if at is not None:
        rest = last(left(eps, float(totals[at])))
        places = []
        for choice in choices[::-1]:
            places.append(at - int(choice[at]))
            at = int(choice[at])
        places.append(at)
        assert rest is not None
        found.append((tuple(depth(i, j) for i, j in enumerate(places[::-1])), rest))
    return min(found, key=lambda division: _sum(division[0], counts, division[1]), default=None)


def _sum(depths: Sequence[int], counts: Sequence[int], rest: Mapping[str, int]) -> int:
    return sum(k * c for k, c in zip(depths, counts, strict=True)) + sum(rest.values())


def left(eps: float, passed: float) -> float:
    """Return ε − passed from below."""
    return math.nextafter(eps - passed, 0)


def least(bound: Bound, eps: float, most: int, first: int = 1) -> int | None:
    """Return the smallest k from ``first`` to ``most`` with bound(k) ≤ ε; None without one."""
    if bound(first) <= eps:
        return first
    low, high = first, 2 * first or 1
    while not bound(high) <= eps:
        low, high = high, 2 * high
        if low >= most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) <= eps else (middle, high)
    return high if high <= most else None


def _proposed(
    bounds: Sequence[Bound], last: Last, eps: float, most: int
) -> Iterator[tuple[tuple[int, ...], Mapping[str, int]]]:
    """Yield divisions that give every bound the same share: the smallest sum is no larger."""
    for share in (0.5, 0.2, 0.05, 0.01):
        known = [least(bound, share * eps / len(bounds), most) for bound in bounds]
        depths = tuple(k for k in known if k is not None)
        if len(depths) < len(known):
            continue
        passed = 0.0
        for bound, k in zip(bounds, depths, strict=True):
            passed = math.nextafter(passed + bound(k), math.inf)
        rest = last(left(eps, passed))
        if rest is not None:
            yield depths, rest


def _table(bound: Bound, depths: Sequence[int]) -> NDArray[np.float64]:
    """Return the bound at each depth; equal depths follow one another."""
    known = {k: bound(k) for k in dict.fromkeys(depths)}
    return np.array([known[k] for k in depths])


def _joined(
    a: NDArray[np.float64], b: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return min over i of a[i] + b[j − i], rounded up, for every j, and the i that gives it."""
    size = len(a)
    best, choice = np.full(size, np.inf), np.zeros(size, np.intp)
    for i in range(size):
        sums = np.nextafter(a[i] + b[: size - i], np.inf)
        better = sums < best[i:]
        best[i:][better] = sums[better]
        choice[i:][better] = i
    return best, choice


def _smallest(totals: NDArray[np.float64], last: Last, eps: float, stride: int) -> int | None:
    """Return the place j at which j · stride and the last layer's depths sum to least.

    Between two places the totals lie between theirs, so that a sum is at least that of
    the first place with what the second leaves of ε.
    """
    falling = np.minimum.accumulate(totals)
    known: dict[int, float] = {}

    def cost(place: int) -> float:
        if place not in known:
            rest = last(left(eps, float(falling[place]))) if falling[place] < eps else None
            known[place] = math.inf if rest is None else sum(rest.values())
        return known[place]

    best, at = math.inf, None
    pending = [(0, len(totals) - 1)]
    for place in pending[0]:
        if place * stride + cost(place) < best:
            best, at = place * stride + cost(place), place
    while pending:
        first, end = pending.pop()
        if end - first < 2 or not (first + 1) * stride + cost(end) < best:
            continue
        middle = (first + end) // 2
        if middle * stride + cost(middle) < best:
            best, at = middle * stride + cost(middle), middle
        pending += [(middle, end), (first, middle)]
    if at is None:
        return None
    # Of equal totals the first leaves the smallest depths.
    return int(np.argmax(totals <= falling[at]))
