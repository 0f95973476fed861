"""Why a model fails its gate, in one paragraph: for a failed test, a log or a stopped training."""

from __future__ import annotations

from collections.abc import Iterator

from rnnaudit.reports import numbers, wording
from rnnaudit.results import Outcome, RecurrenceReport, Refusal, Report, Rule


def paragraph(outcome: Outcome) -> str:
    """Return each rule that fails and what to do next, then the verdict, λ, Λ₁ and k.

    The advice names options as ``rnnaudit gate`` does.
    """
    if isinstance(outcome, Refusal):
        said = f"{outcome.path} could not be audited ({outcome.id}): {outcome.message}"
        return numbers.clean(f"{said}; {outcome.help}" if outcome.help else said)
    return numbers.clean(". ".join(_sentences(outcome)) + ".")


def _sentences(report: Report) -> Iterator[str]:
    failures = report.gate.failures if report.gate is not None else ()
    told = {rule.got for rule in failures}
    path = report.model.path
    yield f"{path} fails its gate" if failures else path
    yield from map(_why, failures)
    verdict, depths = (
        str(wording.verdict(report)),
        wording.depths(report.depth, cut=wording.cut_short(report)),
    )
    if verdict not in told:
        yield verdict
    for recurrence in report.recurrences:
        yield f"{recurrence.label}: " + ", ".join(_rates(recurrence))
    if depths not in told:
        yield f"k({numbers.epsilon(report.eps)}): {depths}"


def _why(rule: Rule) -> str:
    where = f" of {rule.where}" if rule.where else ""
    said = f"{rule.rule}{where}: wanted {rule.wanted}, got {rule.got}"
    return f"{said}; next: {rule.help}" if rule.help else said


def _rates(recurrence: RecurrenceReport) -> Iterator[str]:
    upper, none, lower = recurrence.upper, recurrence.no_proof, recurrence.lower
    if upper is not None:
        yield f"λ ≤ {numbers.rate_up(upper.value)} proved ({upper.method})"
    else:
        yield "no λ proved" + (f" ({none.reason})" if none is not None else "")
    if lower is not None:
        yield f"‖J‖ ≥ {numbers.rate_down(lower.value)} found"
    if recurrence.lyapunov is not None:
        exponent = recurrence.lyapunov
        yield f"Λ₁ = {numbers.estimate(exponent.max, exponent.stderr)} per step"
