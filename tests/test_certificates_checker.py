"""The checker accepts what was proved, agrees with the search, and refuses anything changed."""

import base64
import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit.certificates import CertificateError, Domain, certify, check, document
from rnnaudit.certificates.checker import derive, pack
from rnnaudit.model import Activation, fingerprint

from .strategies import cells, random_cell, random_states, recurrence, seeds

DOMAIN = Domain(-0.4, 0.4, "|x| ≤ 0.4")


def only(proofs, method):
    """Return what one method proved."""
    return replace(proofs, certificates=tuple(c for c in proofs.certificates if c.method == method))


def proved(kind, **options):
    """Return a recurrence that is proved by a metric, its document and its proofs."""
    r = recurrence(random_cell(3, kind, 5, 2, 0.5, **options))
    proofs = certify(r, DOMAIN)
    method = "numerical radius" if kind == "elman" else "circle criterion"
    proofs = only(proofs, method)
    return r, json.loads(json.dumps(document(r, DOMAIN, proofs))), proofs


@pytest.mark.parametrize("kind", ["elman", "gru", "lstm"])
def test_a_document_survives_json_and_proves_the_same_depths(kind):
    r, text, proofs = proved(kind)
    checked = check(text, r)
    assert checked.method == proofs.best.method
    assert checked.domain == "|x| ≤ 0.4"
    assert checked.rate < 1
    for claim in checked.claims:
        found = proofs.depth(claim.eps, norm=claim.norm)
        assert found <= claim.k <= found + 2


@given(cell=cells(max_hidden=4), seed=seeds)
@settings(max_examples=30)
def test_whatever_is_written_is_accepted(cell, seed):
    r = recurrence(cell, random_states(seed, cell, scale=0.5))
    proofs = certify(r, DOMAIN)
    text = document(r, DOMAIN, proofs)
    if text is not None:
        assert check(text, r).rate >= min(c.bound.value for c in proofs.certificates) * (1 - 1e-12)


@given(kind=st.sampled_from(["elman", "gru", "lstm"]), seed=seeds, gain=st.floats(0.05, 0.6))
@settings(max_examples=20)
def test_what_is_proved_can_be_written(kind, seed, gain):
    r = recurrence(random_cell(seed, kind, 4, 2, gain))
    proofs = certify(r, DOMAIN)
    text = document(r, DOMAIN, proofs)
    if proofs.depth(1e-3) is not None:
        assert text is not None
        assert check(text, r).claims


def unpacked(array):
    raw = base64.b64decode(array["float64"])
    return np.frombuffer(raw, dtype="<f8").reshape(array["shape"]).copy()


def with_array(text, *path, change):
    """Return a copy of a document in which the array at ``path`` is changed."""
    changed = copy.deepcopy(text)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = pack(change(unpacked(place[path[-1]])))
    return changed


def with_entry(text, **entries):
    return {**text, **entries}


def bent(P):
    P[0, 0] *= -1
    return P


def skewed(P):
    P[0, 1] += 1e-9
    return P


def spoiled(v):
    v.flat[0] = math.nan
    return v


CHANGES = {
    "a smaller rate": (
        lambda t: with_entry(t, rate=t["rate"] * 0.9),
        "does not prove the rate",
    ),
    "a smaller depth": (
        lambda t: with_entry(t, claims=[{**c, "k": c["k"] - 1} for c in t["claims"]]),
        "claims k = ",
    ),
    "a metric that is none": (
        lambda t: with_array(t, "metric", "P", change=bent),
        "not positive definite",
    ),
    "a metric of zeros": (
        lambda t: with_array(t, "metric", "P", change=np.zeros_like),
        "not positive definite",
    ),
    "an asymmetric metric": (
        lambda t: with_array(t, "metric", "P", change=skewed),
        "symmetric and finite",
    ),
    "another metric": (
        lambda t: with_array(t, "metric", "P", change=lambda P: np.diag(10.0 ** np.arange(len(P)))),
        "does not prove the rate",
    ),
    "negative multipliers": (
        lambda t: with_array(t, "metric", "T", change=lambda T: -T),
        "not negative",
    ),
    "no multipliers": (
        lambda t: with_array(t, "metric", "T", change=np.zeros_like),
        "does not prove the rate",
    ),
    "narrower slopes": (
        lambda t: with_array(t, "sector", "hi", change=lambda v: 0.5 * v),
        "do not hold what the weights give",
    ),
    "a smaller box of states": (
        lambda t: with_array(t, "states", "hi", change=lambda v: 0.1 * v),
        "not hold (its|their) own image",
    ),
    "a wider domain": (
        lambda t: with_array(t, "domain", "hi", change=lambda v: 100 + v),
        "not hold (its|their) own image|do not hold what the weights give",
    ),
    "NaN": (lambda t: with_array(t, "metric", "P", change=spoiled), "no NaN"),
    "an infinite rate": (lambda t: with_entry(t, rate=math.inf), "must be finite"),
    "a rate of one": (lambda t: with_entry(t, rate=1.0), "between 0 and 1"),
    "another fingerprint": (lambda t: with_entry(t, fingerprint="0" * 64), "of another model"),
    "another schema": (lambda t: with_entry(t, schema="other/1"), "has the schema"),
    "another form": (lambda t: with_entry(t, form="faith"), "has the form 'faith'"),
    "no metric": (lambda t: with_entry(t, metric=None), "no 'metric'"),
    "another shape": (
        lambda t: with_array(t, "metric", "P", change=lambda P: P[1:]),
        "must have shape",
    ),
    "bytes that are no numbers": (
        lambda t: with_entry(t, states={"lo": {"shape": [5], "float64": "!"}, "hi": None}),
        "cannot be read",
    ),
    "an unknown norm": (
        lambda t: with_entry(t, claims=[{"eps": 0.1, "norm": "1", "k": 9}]),
        "max or 2",
    ),
    "a truth for a depth": (
        lambda t: with_entry(t, claims=[{**t["claims"][0], "k": True}]),
        "has no 'k' of type int",
    ),
}


@pytest.mark.parametrize("kind", ["elman", "gru", "lstm"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_document_is_refused(kind, change):
    r, text, _ = proved(kind)
    alter, words = CHANGES[change]
    with pytest.raises(CertificateError, match=words):
        check(alter(text), r)


@pytest.mark.parametrize("kind", ["elman", "gru", "lstm"])
def test_another_model_is_refused(kind):
    r, text, _ = proved(kind)
    weight = r.cell.W
    weight[0, 0] = math.nextafter(float(weight[0, 0]), 9)
    with pytest.raises(CertificateError, match="fingerprint of its weights differs"):
        check(text, r)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_changed_balls_are_refused(kind):
    cell = random_cell(3, kind, 32, 4, 0.2)
    for weights in (cell.W, cell.b) if kind == "lstm" else (cell.W, cell.b_input, cell.b_recurrent):
        weights.mul_(0.1)
    r = recurrence(cell)
    text = document(r, DOMAIN, certify(r, DOMAIN))
    check(text, r)
    balls = text["balls"]
    for change, words in (
        ({"radii": [0.5 * v for v in balls["radii"]]}, "do not hold their own image"),
        ({"radii": []}, "one for each part of the state"),
        ({"radii": [math.nan for _ in balls["radii"]]}, "balls are for plain cells"),
        ({"radii": "1"}, "a list of numbers"),
        ({"centre": pack(100 + unpacked(balls["centre"]))}, "do not hold their own image"),
    ):
        with pytest.raises(CertificateError, match=words):
            check({**text, "balls": {**balls, **change}}, r)
    with pytest.raises(CertificateError, match="do not hold what the weights give"):
        check({**text, "balls": None}, r)


def test_balls_are_not_for_elman_cells():
    r, text, _ = proved("elman")
    with pytest.raises(CertificateError, match="balls are for gated cells"):
        check({**text, "balls": {}}, r)


def test_weights_of_a_comparison_that_do_not_contract_are_refused():
    r = recurrence(random_cell(5, "gru", 4, 2, 0.05))
    text = document(r, DOMAIN, only(certify(r, DOMAIN), "comparison matrix"))
    assert text["form"] == "comparison"
    check(text, r)
    for change, words in (
        (lambda v: v * np.array([1.0, 1e6, 1.0, 1.0]), "do not prove the rate"),
        (lambda v: 0 * v, "must be positive"),
    ):
        with pytest.raises(CertificateError, match=words):
            check(with_array(text, "comparison", "weights", change=change), r)


def test_a_jump_is_refused():
    r = recurrence(random_cell(0, "elman", 3, 2, 0.01))
    text = document(r, DOMAIN, certify(r, DOMAIN))
    jump = recurrence(
        random_cell(0, "elman", 3, 2, 0.01, activation=Activation("thresholdedrelu", 0.5))
    )
    with pytest.raises(CertificateError, match="thresholdedrelu jumps"):
        check({**text, "fingerprint": fingerprint(jump)}, jump)


def test_a_depth_that_no_proof_reaches_is_not_derived():
    r, text, _ = proved("lstm")
    assert derive(text, r, [(0.0, "max"), (1e-3, "max")])[0].eps == 1e-3


def test_the_same_document_does_not_fit_a_larger_copy():
    _, text, _ = proved("gru")
    other = recurrence(random_cell(3, "gru", 6, 2, 0.5))
    with pytest.raises(CertificateError, match="of another model"):
        check(text, other)
