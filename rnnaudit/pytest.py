"""A pytest plugin: a test says that a model is stable, and a failure says why it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

import pytest

if TYPE_CHECKING:  # a run of pytest that asks nothing of a model starts without any of it
    from rnnaudit.api import Source
    from rnnaudit.integrations.watching import Question
    from rnnaudit.policy import Policy
    from rnnaudit.results import Report

__all__ = ["assert_stable"]


def assert_stable(
    model: Source, *, policy: Policy | None = None, **question: Unpack[Question]
) -> Report:
    """Audit a model or a live module, and fail the test unless it keeps to a policy.

    ``assert_stable(model, eps=1e-3)`` wants all of it proved stable;
    ``Policy(require="not-unstable", max_depth=64, evidence="measured")`` with ``data`` wants a
    short memory on your data.

    Args:
        model: A module, a loaded model, or the path of one.
        policy: What it must keep to; without, that every recurrence is proved stable.
        question: ``eps``, ``data`` and what else `rnnaudit.audit` takes.

    Returns:
        The audit, judged.

    Raises:
        AssertionError: The policy fails; the message is one paragraph with λ, k and why.
        UsageError: An argument makes no sense.
        LoadError: The model or the data cannot be read.
    """
    __tracebackhide__ = True
    return _passing(_judged(model, policy, question))


@pytest.fixture(name="assert_stable")
def _assert_stable(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`rnnaudit.pytest.assert_stable`, which also writes λ, Λ₁ and k into the JUnit report."""

    def recorded(
        model: Source, *, policy: Policy | None = None, **question: Unpack[Question]
    ) -> Report:
        from rnnaudit.integrations.metrics import metrics

        __tracebackhide__ = True
        report = _judged(model, policy, question)
        for name, value in metrics(report).items():
            # As `record_property` does, which warns of the family of JUnit that is pytest's own.
            request.node.user_properties.append((name, value))
        return _passing(report)

    return recorded


def _judged(model: Source, policy: Policy | None, question: Question) -> Report:
    from rnnaudit.integrations.watching import judged
    from rnnaudit.policy import Policy

    return judged(model, policy or Policy(), question)


def _passing(report: Report) -> Report:
    from rnnaudit.reports.paragraph import paragraph

    __tracebackhide__ = True
    if report.gate is not None and not report.gate.passed:
        raise AssertionError(paragraph(report))
    return report
