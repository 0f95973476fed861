"""A policy is judged on a report: each rule says what was wanted, what came and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from rnnaudit.policy.baseline import regressions
from rnnaudit.policy.record import Allowance, FailOn, Policy, Require, Weakest
from rnnaudit.policy.rules import rules
from rnnaudit.results import Gate, Report

__all__ = ["Allowance", "FailOn", "Policy", "Require", "Weakest", "judge"]


def judge(
    report: Report, policy: Policy, *, today: date, baseline: Sequence[Report] | None = None
) -> Gate:
    """Judge a report by every rule of a policy.

    Args:
        report: The audit.
        policy: What it must keep to.
        today: The day on which allowances are read.
        baseline: Earlier reports, compared with where the path is the same; a baseline of
            one report fits every path. None: nothing to compare with.
    """
    judged = list(rules(report, policy, today))
    if baseline is not None:
        judged += regressions(report, baseline, policy, today)
    return Gate(tuple(judged))
