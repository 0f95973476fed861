"""ε is divided so that depths sum to little, and what a division keeps is measured."""

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit import cells
from rnnaudit.budget import STEP, divide
from rnnaudit.examine import Settings, examine
from rnnaudit.model import Model
from rnnaudit.observe import observe
from rnnaudit.planning import Wanted, plans
from tests.strategies import random_stack

pytestmark = pytest.mark.usefixtures("one_thread")


def decaying(rates):
    """Return what layers need whose errors at depth k are rate^k."""

    def needed(unit, eps):
        return {unit[0]: max(0, math.ceil(math.log(eps) / math.log(rates[unit])))}

    return needed


@given(
    layers=st.lists(st.tuples(st.floats(0.3, 0.97), st.floats(1e-3, 1e3)), min_size=2, max_size=3)
)
@settings(max_examples=60, deadline=None)
def test_a_division_keeps_to_epsilon_and_comes_near_the_best_of_all(layers):
    units = [(str(n),) for n in range(len(layers))]
    gains = {unit: gain for unit, (_, gain) in zip(units, layers, strict=True)}
    needed = decaying({unit: rate for unit, (rate, _) in zip(units, layers, strict=True)})

    def total(tolerances):
        return sum(needed(unit, e)[unit[0]] for unit, e in tolerances.items())

    found = divide(gains, needed, 1e-3)
    assert sum(gains[unit] * e for unit, e in found.items()) <= 1e-3 * (1 + 1e-12)
    every = (
        {u: 1e-3 / gains[u] * STEP**n for u, n in zip(units, rungs, strict=True)}
        for rungs in itertools.product(range(13), repeat=len(units))
        if sum(STEP**n for n in rungs) <= 1
    )
    last_step = max(math.log(STEP) / math.log(rate) for rate, _ in layers)
    assert total(found) <= min(map(total, every)) + 1 + last_step


def test_where_a_layer_shows_too_little_nothing_is_divided():
    def needed(unit, eps):
        return {unit[0]: 3} if unit == ("a",) or eps > 0.8e-3 else None

    gains = {("a",): 1.0, ("b",): 1.0}
    assert divide(gains, needed, 1e-3) is None
    found = divide(gains, needed, 2e-3)
    assert sum(found.values()) <= 2e-3
    assert found["b",] > 0.8e-3


def made(seed, kind, layers=2):
    stack = random_stack(seed, kind, layers=layers, readout=2, gain=0.7)
    return Model(Path("x.pt"), "made", "", (stack,), whole=True)


@pytest.mark.parametrize(("seed", "kind"), [(0, "elman"), (1, "gru"), (2, "lstm")])
def test_divided_depths_keep_the_target_and_never_sum_to_more_than_a_shared_tolerance(seed, kind):
    model = made(seed, kind)
    seen = observe(model, None, seed=0, sequences=5, length=96)
    found = examine(model, seen, Settings(eps=1e-2, time_budget=2.0))
    (stack,) = found.stacks
    order, _ = plans(found, Wanted(1e-2, 512, "measured"))
    depths = next(order).depths
    full = cells.run_stack(stack.stack, seen.stacks[0][0])

    def error(cut):
        return float((cells.run_stack(stack.stack, seen.stacks[0][0], cut) - full).abs().max())

    assert error(depths) <= 5e-3
    studies = {label: each.study for label, each in found.recurrences.items()}
    shared = [
        {label: max(1, *study.needed(factor * 5e-3)) for label, study in studies.items()}
        for factor in (4, 2, 1, 0.5, 0.25, 0.125)
    ]
    first = next(cut for cut in shared if error(cut) <= 5e-3)
    assert sum(depths.values()) <= sum(first.values())
