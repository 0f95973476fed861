"""Over one domain a proof bounds both what is measured and what is refuted; these have no order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit.cells import run_stack
from rnnaudit.cells.chain import Chain
from rnnaudit.certificates import Domain, certify, certify_stack
from rnnaudit.depth import floor_for, study_recurrence, study_stack
from rnnaudit.estimators import refute, refute_both_ways
from rnnaudit.results import EPSILONS

from . import strategies
from .attacks import ROUNDING, inputs
from .strategies import generator, random_cell, random_stack, recurrence, seeds

pytestmark = pytest.mark.usefixtures("one_thread")

DOMAIN = Domain(-0.4, 0.4, "|x| ≤ 0.4")
SECONDS = 1.0
FEW = {"horizon": 32, "restarts": 4, "steps": 4, "prefix": 12}
FEWER = {"horizon": 24, "restarts": 2, "steps": 2}


def assert_bounded(study, refutation, proved, eps):
    """Assert K_i ≤ ``proved`` for every sequence, and refuted_below ≤ ``proved``.

    Return what is known of both, the larger; None where one of them is not.
    """
    for needed, more in zip(study.needed(eps), study.longer_than(eps), strict=True):
        assert proved >= needed if needed is not None else proved > more
    below = refutation.refuted_below(eps)
    assert (below or 0) <= proved
    known = [k for k in study.needed(eps) if k is not None]
    return max(below, *known) if known and below is not None else None


@st.composite
def single_cells(draw):
    kind = draw(st.sampled_from(["elman", "gru", "lstm"]))
    chosen = draw(strategies.options(kind)) if draw(st.booleans()) else {}
    return random_cell(
        draw(seeds), kind, draw(st.integers(1, 4)), 2, draw(st.floats(0.05, 0.8)), **chosen
    )


def of_single_cell(cell, seed, norm, epsilons=EPSILONS):
    """Yield what is proved of a cell for each ε, and the largest that the other two show."""
    r = recurrence(cell)
    proofs = certify(r, DOMAIN)
    proved = {eps: proofs.depth(eps, norm=norm) for eps in epsilons}
    if all(k is None for k in proved.values()):
        return
    x = inputs(generator(seed), DOMAIN, 2, 12, 60)
    study = study_recurrence(r, x, norm=norm, floor=floor_for(min(EPSILONS)))
    found = refute(Chain.of([r]), *DOMAIN.box(2), **FEW, seed=seed, norm=norm, examples=x)
    for eps, k in proved.items():
        if k is not None and (shown := assert_bounded(study, found, k, eps)) is not None:
            yield k, shown


def of_stack(stack, seed, norm, epsilons):
    """Yield what is proved of a stack for each ε, and the largest that the other two show.

    Where each recurrence is cut on its own, as proved for it, no sequence errs by more than ε.
    """
    proof = certify_stack(stack, DOMAIN, time_budget=SECONDS)
    x = inputs(generator(seed), DOMAIN, stack.input_size, 6, 40)
    box, full = DOMAIN.box(stack.input_size), run_stack(stack, x)
    for eps in epsilons:
        proved = proof.depth(eps, norm)
        if (depths := proof.layerwise(eps, norm)) is not None:
            gap = run_stack(stack, x, depths) - full
            size = gap.abs().amax(-1) if norm == "max" else gap.norm(dim=-1)
            assert size.max() <= eps * ROUNDING
        if proved is None:
            continue
        study = study_stack(stack, x, norm=norm, epsilons=[eps], floor=floor_for(eps))
        if stack.causal:
            chain = Chain.of(list(stack.recurrences()), stack.readout)
            found = refute(chain, *box, **FEW, seed=seed, norm=norm, eps=eps, examples=x)
        else:
            found = refute_both_ways(
                stack, *box, **FEWER, seed=seed, norm=norm, eps=eps, examples=x
            )
        if (shown := assert_bounded(study, found, proved, eps)) is not None:
            yield proved, shown


def assert_many(wanted, of, test):
    """Run a property over random models, and assert that enough of them had all three numbers."""
    counted = []
    test(lambda *given: counted.append(any(True for _ in of(*given))))
    assert sum(counted) >= wanted, f"{sum(counted)} of {len(counted)} models had all three numbers"


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


def over_cells(count):
    def test(each):
        @given(cell=single_cells(), seed=seeds, norm=norms)
        @settings(max_examples=count, deadline=None)
        def drawn(cell, seed, norm):
            each(cell, seed, norm)

        drawn()

    return test


def over_stacks(count):
    def test(each):
        @given(stack=stacks, seed=seeds, norm=norms, eps=st.sampled_from([1e-1, 1e-2, 1e-3]))
        @settings(max_examples=count, deadline=None)
        def drawn(stack, seed, norm, eps):
            each(stack, seed, norm, [eps])

        drawn()

    return test


def test_a_proved_depth_of_a_cell_is_neither_measured_nor_refuted_to_be_too_small():
    assert_many(2, of_single_cell, over_cells(8))


def test_a_proved_depth_of_a_stack_is_neither_measured_nor_refuted_to_be_too_small():
    assert_many(1, of_stack, over_stacks(4))


@pytest.mark.slow
def test_a_proved_depth_bounds_all_evidence_on_many_cells():
    assert_many(40, of_single_cell, over_cells(150))


@pytest.mark.slow
def test_a_proved_depth_bounds_all_evidence_on_many_stacks():
    assert_many(20, of_stack, over_stacks(60))


def assert_sharp(both):
    """Assert that a proof half as deep, or a refutation 40 steps deeper, would not pass."""
    assert both
    assert any(shown > proved // 2 for proved, shown in both)
    assert any(shown + 40 > proved for proved, shown in both)


@pytest.mark.parametrize("norm", ["max", "2"])
@pytest.mark.parametrize(
    ("kind", "gain"), [("elman", 0.1), ("elman", 0.3), ("elman", 0.6), ("gru", 0.1), ("lstm", 0.1)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_proofs_of_cells_are_near_what_is_measured_and_refuted(kind, gain, seed, norm):
    assert_sharp(list(of_single_cell(random_cell(seed, kind, 3, 2, gain), seed, norm)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("elman", {"readout": 2, "gain": 0.3}),
        ("elman", {"layers": 2, "start": "constant"}),
        ("elman", {"layers": 2, "readout": 2}),
        ("elman", {"bidirectional": True, "readout": 2, "gain": 0.3}),
        ("elman", {"bidirectional": True, "layers": 2}),
        ("elman", {"bidirectional": True, "start": "constant"}),
        ("gru", {"readout": 2}),
        ("gru", {"bidirectional": True}),
        ("lstm", {"readout": 2}),
        ("lstm", {"bidirectional": True}),
    ],
)
def test_proofs_of_stacks_are_near_what_is_measured_and_refuted(kind, options):
    stack = random_stack(3, kind, 3, 2, **{"gain": 0.1, **options})
    assert_sharp([*of_stack(stack, 3, "max", [1e-1, 1e-3]), *of_stack(stack, 3, "2", [1e-2])])
