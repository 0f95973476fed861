"""What trackers are told of a report: finite numbers whose names say what stands behind them."""

import math
from dataclasses import replace

import pytest

from rnnaudit.errors import UsageError
from rnnaudit.integrations.metrics import metrics
from rnnaudit.integrations.watching import positive
from rnnaudit.policy import Policy
from rnnaudit.reports.paragraph import paragraph
from rnnaudit.results import LowerBound, Refusal
from tests import reports_by_hand as by_hand


@pytest.mark.parametrize("name", by_hand.REPORTS)
def test_every_number_is_finite_and_every_name_fits_every_tracker(name):
    found = metrics(by_hand.REPORTS[name])
    for key, value in found.items():
        assert type(value) is float
        assert math.isfinite(value)
        assert key.isascii()
        assert not set(key) & set("[]() ")
    assert found["rnnaudit/stable"] == (by_hand.REPORTS[name].verdict == "stable")


def test_the_numbers_are_those_of_the_report():
    report, found = by_hand.STABLE, metrics(by_hand.STABLE)
    (recurrence,) = report.recurrences
    assert found["rnnaudit/lambda_proved"] == recurrence.upper.value
    assert found["rnnaudit/lambda_found"] == recurrence.lower.value
    assert found["rnnaudit/lyapunov"] == recurrence.lyapunov.max
    assert found["rnnaudit/k_proved"] == report.depth.proved
    assert found["rnnaudit/k_measured"] == report.depth.measured.k
    assert found["rnnaudit/rnn.0/half_life"] == recurrence.lyapunov.half_life
    assert metrics(report, "a.")["a.k_proved"] == report.depth.proved


def test_a_measurement_on_synthetic_inputs_has_a_name_of_its_own():
    found = metrics(by_hand.UNDECIDED)
    assert by_hand.UNDECIDED.depth.measured.synthetic
    assert "rnnaudit/k_measured" not in found
    assert found["rnnaudit/k_synthetic"] == by_hand.UNDECIDED.depth.measured.k


def test_a_memory_longer_than_the_data_has_no_depth():
    found = metrics(by_hand.LONGER)
    assert not {"rnnaudit/k_measured", "rnnaudit/k_synthetic"} & set(found)
    longer = by_hand.LONGER.depth.measured.longer_than
    assert found["rnnaudit/synthetic_longer_than"] == longer


def test_the_model_has_a_proved_rate_only_where_every_recurrence_has_one():
    slow = replace(by_hand.BACH.upper, value=0.99)
    two = (by_hand.BACH, replace(by_hand.BACH, layer=1, upper=slow))
    assert metrics(replace(by_hand.STABLE, recurrences=two))["rnnaudit/lambda_proved"] == 0.99
    open_ = (by_hand.BACH, replace(by_hand.BACH, layer=1, upper=None))
    found = metrics(replace(by_hand.STABLE, recurrences=open_))
    assert "rnnaudit/lambda_proved" not in found
    assert "rnnaudit/rnn.0/lambda_proved" in found


def test_what_is_not_finite_or_not_there_has_no_name_and_like_names_stay_apart():
    other = replace(
        by_hand.BACH, name="rnn(0)", layer=0, lower=LowerBound(math.inf, "2", "sampled")
    )
    same = replace(by_hand.BACH, name="rnn.0", layer=0)
    found = metrics(replace(by_hand.STABLE, recurrences=(other, same)))
    assert "rnnaudit/rnn.0.0/lambda_found" not in found
    assert found["rnnaudit/rnn.0.0.1/lambda_found"] == by_hand.BACH.lower.value


# ------------------------------------------------------------------------------ paragraph


@pytest.mark.parametrize("outcome", by_hand.GATED, ids=lambda outcome: type(outcome).__name__)
def test_a_paragraph_is_one_line_with_every_failure(outcome):
    said = paragraph(outcome)
    assert "\n" not in said
    for rule in getattr(outcome, "gate", None).failures if hasattr(outcome, "gate") else ():
        assert rule.rule in said


def test_the_paragraph_of_a_failure_has_lambda_k_and_the_reason_once():
    said = paragraph(by_hand.judged(by_hand.UNDECIDED, Policy()))
    assert said.startswith(f"{by_hand.UNDECIDED.model.path} fails its gate. verdict of lstm[0]: ")
    assert said.count("UNDECIDED in the worst case") == 1
    for part in ("no λ proved", "‖J‖ ≥", "Λ₁ = ", "k(1e-3): measured"):
        assert part in said


def test_the_paragraph_of_a_refusal_says_what_to_do():
    said = paragraph(Refusal("a.pt", "RA104", "finite weights were expected", "go back"))
    assert said == "a.pt could not be audited (RA104): finite weights were expected; go back"


def test_counts_below_one_are_refused():
    positive(steps=None, epochs=1)
    with pytest.raises(UsageError, match="every_n_steps must be at least 1, got 0"):
        positive(every_n_steps=0)
