"""A plan says what is cut, where and why, and touches nothing."""

from __future__ import annotations

import json

import pytest

from rnnaudit.errors import UsageError
from rnnaudit.results import Truncation
from rnnaudit.truncation import Plan, plan
from tests.strategies import random_model


def test_a_plan_lists_truncations_in_the_models_order():
    model = random_model(0, "gru", layers=3)
    made = plan(model, {"rnn[2]": 7, "rnn[0]": 4}, {"rnn[0]": "proved", "rnn[2]": "synthetic"})
    assert made.truncations == (
        Truncation("rnn[0]", 4, "proved"),
        Truncation("rnn[2]", 7, "synthetic"),
    )
    assert made.depths == {"rnn[0]": 4, "rnn[2]": 7}


def test_a_plan_rests_on_its_weakest_evidence():
    def resting(*evidence: str) -> str | None:
        return Plan(tuple(Truncation("r", 1, e) for e in evidence)).evidence  # type: ignore[arg-type]

    assert resting("proved", "measured") == "measured"
    assert resting("measured", "synthetic", "proved") == "synthetic"
    assert resting("chosen", "synthetic") == "chosen"
    assert resting() is None


def test_metadata_keeps_the_error_to_the_last_digit():
    stored = Plan((Truncation("rnn[0]", 4, "measured"),)).metadata(0.1 + 0.2)
    assert float(stored["eps"]) == 0.1 + 0.2
    assert json.loads(stored["evidence"]) == {"rnn[0]": "measured"}


def test_both_directions_go_together():
    model = random_model(0, "lstm", bidirectional=True)
    with pytest.raises(UsageError, match=r"a depth, got none for rnn\[0\] reverse; name both"):
        plan(model, {"rnn[0]": 3}, {"rnn[0]": "chosen"})


def test_depths_name_recurrences_and_begin_at_one():
    model = random_model(0, "elman", layers=2)
    with pytest.raises(UsageError, match=r"must name one of rnn\[0\], rnn\[1\], got lstm"):
        plan(model, {"lstm": 3}, {"lstm": "chosen"})
    with pytest.raises(UsageError, match=r"at least 1, got 0 for rnn\[1\]; a model of"):
        plan(model, {"rnn[1]": 0}, {"rnn[1]": "chosen"})
