"""How ε is divided between layers so that the sum of their depths is smallest.

A layer that is cut to an error e of its own outputs moves the model's outputs by about L e,
with L measured. For tolerances e_l with Σ L_l e_l ≤ ε that make Σ k_l(e_l) smallest, every
layer pays the same price: steps of depth for a unit of ε. Errors of several layers need not
add up like this, so that a division is a proposal, and what it keeps is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

Unit = tuple[str, ...]
"""The labels of a layer's recurrences, which are cut together."""

Depths = Mapping[str, int]

Needed = Callable[[Unit, float], Depths | None]
"""The depths that keep a layer's own outputs to a tolerance; None where there are none."""

STEP = 2.0**-0.5
"""Ratio of neighbouring tolerances."""

RUNGS = 24
"""Tolerances of a layer that are looked at."""

SMALLEST = 1e-6
"""Gains below this count as this much: such a layer is given all the tolerance it can use."""


def divide(gains: Mapping[Unit, float], needed: Needed, eps: float) -> Mapping[Unit, float] | None:
    """Return a tolerance for each layer's own outputs; None where no depths keep them.

    Args:
        gains: How far an error of 1 in a layer's outputs moves the model's outputs.
        needed: Depths by tolerance.
        eps: What the tolerances, times their gains, sum to at most.
    """
    whole = {unit: eps / max(gain, SMALLEST) for unit, gain in gains.items()}
    rungs = dict.fromkeys(gains, 0)

    def steps(unit: Unit, rung: int) -> float:
        depths = needed(unit, whole[unit] * STEP**rung) if rung < RUNGS else None
        return math.inf if depths is None else sum(depths.values())

    def price(unit: Unit) -> float:
        rung = rungs[unit]
        return (steps(unit, rung + 1) - steps(unit, rung)) / (STEP**rung - STEP ** (rung + 1))

    if any(math.isinf(steps(unit, 0)) for unit in gains):
        return None
    while sum(STEP**rung for rung in rungs.values()) > 1:
        cheapest = min(gains, key=price)
        if math.isinf(price(cheapest)):
            return None
        rungs[cheapest] += 1
    return {unit: whole[unit] * STEP**rung for unit, rung in rungs.items()}
