"""Over one domain a proof bounds both what is measured and what is refuted; these have no order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit.cells.chain import Chain
from rnnaudit.certificates import Domain, certify, certify_stack
from rnnaudit.depth import floor_for, study_recurrence, study_stack
from rnnaudit.estimators.adversary import refute
from rnnaudit.results import EPSILONS

from . import strategies
from .attacks import inputs
from .strategies import generator, random_cell, random_stack, recurrence, seeds

pytestmark = pytest.mark.usefixtures("one_thread")

DOMAIN = Domain(-0.4, 0.4, "|x| ≤ 0.4")
SECONDS = 1.0
FEW = {"horizon": 32, "restarts": 4, "steps": 4, "prefix": 12}


def assert_bounded(study, refutation, proved, eps):
    """Assert K_i ≤ ``proved`` for every sequence, and refuted_below ≤ ``proved``."""
    for needed, more in zip(study.needed(eps), study.longer_than(eps), strict=True):
        assert proved >= needed if needed is not None else proved > more
    if refutation is not None:
        assert (refutation.refuted_below(eps) or 0) <= proved


@st.composite
def single_cells(draw):
    kind = draw(st.sampled_from(["elman", "gru", "lstm"]))
    chosen = draw(strategies.options(kind)) if draw(st.booleans()) else {}
    return random_cell(
        draw(seeds), kind, draw(st.integers(1, 4)), 2, draw(st.floats(0.05, 0.8)), **chosen
    )


def of_single_cell(cell, seed, norm):
    r = recurrence(cell)
    proofs = certify(r, DOMAIN)
    proved = {eps: proofs.depth(eps, norm=norm) for eps in EPSILONS}
    if all(k is None for k in proved.values()):
        return 0
    x = inputs(generator(seed), DOMAIN, 2, 12, 60)
    study = study_recurrence(r, x, norm=norm, floor=floor_for(min(EPSILONS)))
    found = refute(Chain.of([r]), *DOMAIN.box(2), **FEW, seed=seed, norm=norm, examples=x)
    for eps, k in proved.items():
        if k is not None:
            assert_bounded(study, found, k, eps)
    return 1


def of_stack(stack, seed, norm, eps):
    proved = certify_stack(stack, DOMAIN, time_budget=SECONDS).depth(eps, norm)
    if proved is None:
        return 0
    x = inputs(generator(seed), DOMAIN, stack.input_size, 6, 40)
    study = study_stack(stack, x, norm=norm, epsilons=[eps], floor=floor_for(eps))
    found = None
    if stack.causal:
        chain = Chain.of(list(stack.recurrences()), stack.readout)
        box = DOMAIN.box(stack.input_size)
        found = refute(chain, *box, **FEW, seed=seed, norm=norm, eps=eps, examples=x)
    assert_bounded(study, found, proved, eps)
    return 1


norms = st.sampled_from(["max", "2"])
stacks = st.builds(
    random_stack,
    seeds,
    st.sampled_from(["elman", "gru", "lstm"]),
    st.integers(1, 4),
    st.integers(1, 2),
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    readout=st.none() | st.integers(1, 3),
    start=st.sampled_from(["zero", "constant"]),
    gain=st.floats(0.05, 0.4),
)


@given(cell=single_cells(), seed=seeds, norm=norms)
@settings(max_examples=6, deadline=None)
def test_a_proved_depth_of_a_cell_is_neither_measured_nor_refuted_to_be_too_small(cell, seed, norm):
    of_single_cell(cell, seed, norm)


@given(stack=stacks, seed=seeds, norm=norms, eps=st.sampled_from([1e-1, 1e-2, 1e-3]))
@settings(max_examples=3, deadline=None)
def test_a_proved_depth_of_a_stack_is_neither_measured_nor_refuted_to_be_too_small(
    stack, seed, norm, eps
):
    of_stack(stack, seed, norm, eps)


@pytest.mark.slow
@given(cell=single_cells(), seed=seeds, norm=norms)
@settings(max_examples=150, deadline=None)
def test_a_proved_depth_bounds_all_evidence_on_many_cells(cell, seed, norm):
    of_single_cell(cell, seed, norm)


@pytest.mark.slow
@given(stack=stacks, seed=seeds, norm=norms, eps=st.sampled_from([1e-1, 1e-2, 1e-3]))
@settings(max_examples=60, deadline=None)
def test_a_proved_depth_bounds_all_evidence_on_many_stacks(stack, seed, norm, eps):
    of_stack(stack, seed, norm, eps)


@pytest.mark.parametrize(
    "kind",
    ["elman", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gru", "lstm"))],
)
def test_small_weights_are_proved_so_that_the_order_is_tested(kind):
    assert of_single_cell(random_cell(1, kind, 4, 2, 0.2), 1, "max")
    stack = random_stack(1, kind, 3, 2, layers=2, readout=2, gain=0.1)
    assert of_stack(stack, 1, "max", 1e-2)
