"""The rules of a policy, each judged on one report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date

from rnnaudit.policy.record import Allowance, FailOn, Policy, Weakest
from rnnaudit.reports import numbers, wording
from rnnaudit.results import (
    Depth,
    Finding,
    MeasuredDepth,
    RecurrenceReport,
    Report,
    Rule,
    Skipped,
)

_SEVERITIES: tuple[FailOn, ...] = ("note", "warning", "error", "never")


def rules(report: Report, policy: Policy, today: date) -> Iterator[Rule]:
    """Judge a report by every rule that the policy sets."""
    yield from _verdict(report, policy)
    yield from _lambda(report, policy)
    yield from _depth(report, policy)
    yield from _exceed(report, policy)
    yield from _skipped(report, policy)
    yield from _findings(report, policy, today)


# ------------------------------------------------------------------------------- verdict


def _verdict(report: Report, policy: Policy) -> Iterator[Rule]:
    if policy.require == "any":
        return
    verdict = report.verdict
    audited = {r.verdict for r in report.recurrences}
    if policy.allow_skipped and verdict == "undecided" and audited == {"stable"}:
        verdict = "stable"
    wanted = {"stable": ("stable",), "not-unstable": ("stable", "undecided")}[policy.require]
    open_ones = [r.label for r in report.recurrences if r.verdict not in wanted]
    yield Rule(
        "verdict",
        verdict in wanted,
        "stable: proved for every input" if policy.require == "stable" else "not unstable",
        str(wording.verdict(report)),
        ", ".join(open_ones),
        _after_verdict(report),
        "RA230",
    )


def _after_verdict(report: Report) -> str:
    if report.verdict == "unstable":
        return (
            "save such an input with rnnaudit inspect MODEL --witness FILE; where yours are "
            "unlike it, narrow --input-range, or gate on your data: --require any --max-depth K "
            "--evidence measured --data PATH"
        )
    if report.skipped:
        return "what was skipped leaves the verdict open: see the rule on it"
    return (
        "narrow --input-range to what the model sees, or gate on your data: "
        "--max-depth K --evidence measured --data PATH"
    )


# ------------------------------------------------------------------------------------- λ


def _lambda(report: Report, policy: Policy) -> Iterator[Rule]:
    for recurrence in report.recurrences:
        if policy.max_lambda is not None:
            yield _proved_rate(recurrence, policy.max_lambda)
        if policy.max_lambda_found is not None:
            yield _found_rate(recurrence, policy.max_lambda_found)


def _proved_rate(recurrence: RecurrenceReport, limit: float) -> Rule:
    upper, none = recurrence.upper, recurrence.no_proof
    if upper is not None:
        got = f"λ ≤ {numbers.rate_up(upper.value)} proved"
    else:
        got = "no proof" + (f": {none.reason}" if none is not None else "")
    return Rule(
        "max-lambda",
        upper is not None and upper.value <= limit,
        f"λ ≤ {numbers.exact(limit)} proved",
        got,
        recurrence.label,
        "narrow --input-range, train with a smaller recurrent norm, or raise --max-lambda",
        "RA231",
    )


def _found_rate(recurrence: RecurrenceReport, limit: float) -> Rule:
    lower = recurrence.lower
    return Rule(
        "max-lambda-found",
        lower is not None and lower.value <= limit,
        f"no ‖J‖ found above {numbers.exact(limit)}",
        "not searched" if lower is None else f"‖J‖ ≥ {numbers.rate_down(lower.value)} found",
        recurrence.label,
        "some reachable state stretches differences by this much in one step: train with a "
        "smaller recurrent norm, or raise --max-lambda-found",
        "RA231",
    )


# --------------------------------------------------------------------------------- depth


def _depth(report: Report, policy: Policy) -> Iterator[Rule]:
    if policy.max_depth is None:
        return
    depth = report.depth
    known = _accepted(depth, policy.evidence)
    yield Rule(
        "max-depth",
        any(k <= policy.max_depth for k in known),
        f"k({numbers.epsilon(report.eps)}) ≤ {policy.max_depth} {_on(policy.evidence)}",
        wording.depths(depth),
        _deepest(report, policy.evidence),
        _after_depth(depth, known, policy.evidence),
        "RA232",
    )


def _accepted(depth: Depth, weakest: Weakest) -> list[int]:
    """Return the depths that rest on evidence at least this strong."""
    known = [depth.proved]
    measured = depth.measured
    if measured is not None and (weakest == "any" or (weakest == "measured" and _yours(measured))):
        known.append(measured.k)
    return [k for k in known if k is not None]


def _yours(measured: MeasuredDepth) -> bool:
    return not measured.synthetic


def _deepest(report: Report, weakest: Weakest) -> str:
    """Name the recurrence that needs most; one without a depth needs more than any."""
    if len(report.recurrences) < 2:
        return ""

    def needed(recurrence: RecurrenceReport) -> float:
        depth = wording.own_depth(recurrence, report.eps)
        known = _accepted(depth, weakest) if depth is not None else []
        return min(known, default=float("inf"))

    return max(report.recurrences, key=needed).label


def _on(weakest: Weakest) -> str:
    return {
        "proved": "proved",
        "measured": "proved, or measured on your data",
        "any": "on any evidence",
    }[weakest]


def _after_depth(depth: Depth, known: Sequence[int], weakest: Weakest) -> str:
    if known:
        return f"raise --max-depth to {min(known)}, raise --eps, or train for a shorter memory"
    measured = depth.measured
    if measured is None or measured.k is None or weakest == "any":
        return "give longer sequences with --data, or raise --eps"
    if _yours(measured):
        return "--evidence measured accepts what your data show"
    return "give your sequences with --data and accept them with --evidence measured"


# ---------------------------------------------------------------------------- exceedance


def _exceed(report: Report, policy: Policy) -> Iterator[Rule]:
    if policy.max_exceed is None:
        return
    measured = report.depth.measured
    counts = measured is not None and (policy.evidence == "any" or _yours(measured))
    share = measured.exceed_probability if measured is not None and counts else None
    yield Rule(
        "max-exceed",
        share is not None and share <= policy.max_exceed,
        f"at most {numbers.percent(policy.max_exceed)} of sequences exceed ε",
        _shares(measured, counts=counts),
        "",
        "give more sequences with --data: n that keep ε bound the share by 1 − 0.05^(1/n)",
        "RA233",
    )


def _shares(measured: MeasuredDepth | None, *, counts: bool) -> str:
    if measured is None:
        return "nothing was measured"
    if not counts:
        return "measured on synthetic inputs, which say nothing of yours"
    return wording.exceed(measured) or "no statement: the data show no depth, or several stacks"


# --------------------------------------------------------------------- skipped, findings


def _skipped(report: Report, policy: Policy) -> Iterator[Rule]:
    parts = skipped_parts(report)
    yield Rule(
        "skipped",
        policy.allow_skipped or not parts,
        "skipped parts are accepted" if policy.allow_skipped else "nothing skipped",
        "; ".join(f"{part.where}: {part.reason}" for part in parts) or "nothing skipped",
        ", ".join(part.where for part in parts),
        "each part says why; --allow-skipped accepts a model that was audited in part",
        "RA234",
    )


def skipped_parts(report: Report) -> list[Skipped]:
    """Return what could not be audited, of the model and of its recurrences."""
    return [*report.skipped, *(part for r in report.recurrences for part in r.skipped)]


def _findings(report: Report, policy: Policy, today: date) -> Iterator[Rule]:
    judged = []
    for group in wording.grouped(report.findings):
        allowance = policy.allowance(group.finding)
        where = ", ".join(group.places)
        if allowance is not None:
            judged.append(_allowed(group.finding, where, allowance, today))
        elif _severe(group.finding, policy.fail_on):
            judged.append(_failing(group.finding, where, f"no finding {_worse(policy.fail_on)}"))
    yield from judged
    if all(rule.passed for rule in judged) and policy.fail_on != "never":
        counts = [
            (severity, sum(f.severity == severity for f in report.findings))
            for severity in ("error", "warning", "note")
        ]
        told = ", ".join(numbers.counted(count, noun) for noun, count in counts if count)
        apart = ", apart from those allowed" if judged else ""
        yield Rule("findings", True, f"no finding {_worse(policy.fail_on)}{apart}", told or "none")


def _worse(severity: FailOn) -> str:
    return "that is an error" if severity == "error" else f"of severity {severity} or worse"


def _severe(finding: Finding, fail_on: FailOn) -> bool:
    return _SEVERITIES.index(finding.severity) >= _SEVERITIES.index(fail_on)


def _allowed(finding: Finding, where: str, allowance: Allowance, today: date) -> Rule:
    holds = allowance.holds(today)
    state = "allowed" if holds else "the allowance has expired: it held"
    return Rule(
        f"finding {finding.id}",
        holds,
        f"no {finding.id}, or an allowance of it that holds",
        f"{finding.message} ({state} until {allowance.until}: {allowance.reason})",
        where,
        f"{finding.help}; or decide again, and give the allowance a new date",
        finding.id if holds else "RA236",
    )


def _failing(finding: Finding, where: str, wanted: str) -> Rule:
    return Rule(
        f"finding {finding.id}",
        False,
        wanted,
        finding.message,
        where,
        f"{finding.help}; or accept it for a time: --allow {finding.id}:DATE:REASON",
        finding.id,
    )
