"""ε is divided so that depths sum to little, and what a division keeps is measured."""

import itertools
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from rnnaudit import cells, load
from rnnaudit.budget import STEP, divide
from rnnaudit.data import Data
from rnnaudit.effects import Effects
from rnnaudit.examine import Settings, examine
from rnnaudit.model import Model
from rnnaudit.observe import observe
from rnnaudit.planning import Wanted, plans
from rnnaudit.truncation import AUTO
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
    found = examine(model, seen, Settings(eps=1e-2, time_budget=8.0))
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


def parallel(path, loud):
    """Write a graph of two GRUs side by side, the outputs of one multiplied by ``loud``."""
    nodes, stored = [], [numpy_helper.from_array(np.array([1]), "directions")]
    for name, seed in (("quiet", 0), ("loud", 1)):
        rng = np.random.default_rng(seed)
        for letter, width, scale in (("W", 3, 0.5), ("R", 4, 0.2)):
            drawn = (scale * rng.standard_normal((1, 12, width))).astype(np.float32)
            stored.append(numpy_helper.from_array(drawn, name + letter))
        reads = ["x", name + "W", name + "R"]
        nodes += [
            helper.make_node("GRU", reads, [name + "4"], name=name, hidden_size=4),
            helper.make_node("Squeeze", [name + "4", "directions"], [name]),
        ]
    stored.append(numpy_helper.from_array(np.float32(loud), "factor"))
    nodes += [
        helper.make_node("Mul", ["loud", "factor"], ["louder"]),
        helper.make_node("Add", ["quiet", "louder"], ["y"]),
    ]
    ports = [("x", [None, None, 3]), ("y", [None, None, 4])]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in ports)
    graph = helper.make_graph(nodes, "parallel", [x], [y], stored)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return load(path)


rng = np.random.default_rng(0)
DATA = Data({"x": tuple(rng.uniform(-1, 1, (60, 3)) for _ in range(6))}, "drawn.npy")


def planned(model, eps, file):
    """Plan with a graph's outputs measured; return the first plan, what stays and the measure."""
    found = examine(
        model,
        observe(model, DATA, seed=0),
        Settings(eps=eps, time_budget=8.0),
    )
    measure = Effects(found, file, AUTO, DATA)
    order, kept = plans(found, Wanted(eps, 512), measure)
    return next(order).depths, kept, measure, found


def test_what_a_graph_amplifies_is_cut_deeper_and_the_rest_less_deep(tmp_path):
    model = parallel(tmp_path / "loud.onnx", 30.0)
    depths, kept, measure, found = planned(model, 1e-2, tmp_path / "cut.onnx")
    assert kept == ()
    assert measure(depths) <= 5e-3
    own = {n: max(each.study.needed(5e-3)) for n, each in found.recurrences.items()}
    assert depths["loud[0]"] > own["loud[0]"]
    shared = {n: max(each.study.needed(5e-3 / 32)) for n, each in found.recurrences.items()}
    assert sum(depths.values()) <= sum(shared.values())


def test_what_a_graph_amplifies_too_much_stays_with_the_reason(tmp_path):
    model = parallel(tmp_path / "loud.onnx", 1e9)
    depths, kept, _, _ = planned(model, 1e-2, tmp_path / "cut.onnx")
    assert set(depths) == {"quiet[0]"}
    ((label, reason),) = ((each.where, each.reason) for each in kept)
    assert label == "loud[0]"
    assert reason.startswith("cut alone to ")
    assert "it moves the model's outputs by " in reason


def test_a_graph_that_cannot_be_run_moves_without_bound(tmp_path):
    model = parallel(tmp_path / "loud.onnx", math.nan)
    seen = observe(model, None, seed=0, sequences=5, length=32)
    found = examine(model, seen, Settings(eps=1e-2, time_budget=1.0))
    measure = Effects(found, tmp_path / "cut.onnx", AUTO, None)
    assert measure({"loud[0]": 3}) == math.inf
