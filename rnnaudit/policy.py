"""A policy is judged on a report: each rule says what was wanted, what came and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from typing import Literal

from rnnaudit.reports import numbers, wording
from rnnaudit.results import (
    Depth,
    Finding,
    Gate,
    MeasuredDepth,
    RecurrenceReport,
    Report,
    Rule,
    Severity,
    Skipped,
    Verdict,
)

Require = Literal["stable", "not-unstable", "any"]

Weakest = Literal["proved", "measured", "any"]
"""The weakest evidence that a depth may rest on: a proof, the user's data, any inputs."""

FailOn = Severity | Literal["never"]

_VERDICTS: tuple[Verdict, ...] = ("stable", "undecided", "unstable")
_SEVERITIES: tuple[FailOn, ...] = ("note", "warning", "error", "never")


@dataclass(frozen=True, slots=True)
class Allowance:
    """A finding that is accepted up to and including a day, and why."""

    id: str
    until: date
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a model must keep to; as it stands, that all of it is proved stable.

    Attributes:
        require: The verdict that is wanted.
        max_lambda: Largest λ that every recurrence is proved to stay below.
        max_lambda_found: Largest ‖J‖ that may be found at any sampled state.
        max_depth: Largest k(ε) of the whole model, on ``evidence`` or stronger.
        evidence: The weakest evidence that a depth may rest on.
        max_exceed: Largest share of sequences that may exceed ε at the measured depth.
        fail_on: Findings of this severity or worse fail.
        allow_skipped: Parts that could not be audited do not fail.
        allow: Findings that are accepted.
        tolerance: Share by which λ and k may grow beyond a baseline.
    """

    require: Require = "stable"
    max_lambda: float | None = None
    max_lambda_found: float | None = None
    max_depth: int | None = None
    evidence: Weakest = "proved"
    max_exceed: float | None = None
    fail_on: FailOn = "error"
    allow_skipped: bool = False
    allow: tuple[Allowance, ...] = ()
    tolerance: float = 0.05


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
    rules = [
        *_verdict(report, policy),
        *_lambda(report, policy),
        *_depth(report, policy),
        *_exceed(report, policy),
        *_skipped(report, policy),
        *_findings(report, policy, today),
    ]
    if baseline is not None:
        rules += _against(report, _before(report, baseline), policy, today)
    return Gate(tuple(rules))


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
            "save such an input with rnnaudit inspect --witness FILE; where yours are unlike "
            "it, narrow --input-range, or gate on your data: --require any --max-depth K "
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
    parts = _parts(report)
    yield Rule(
        "skipped",
        policy.allow_skipped or not parts,
        "skipped parts are accepted" if policy.allow_skipped else "nothing skipped",
        "; ".join(f"{part.where}: {part.reason}" for part in parts) or "nothing skipped",
        ", ".join(part.where for part in parts),
        "each part says why; --allow-skipped accepts a model that was audited in part",
        "RA234",
    )


def _parts(report: Report) -> list[Skipped]:
    return [*report.skipped, *(part for r in report.recurrences for part in r.skipped)]


def _findings(report: Report, policy: Policy, today: date) -> Iterator[Rule]:
    judged = []
    for group in wording.grouped(report.findings):
        allowance = _allowance(group.finding, policy)
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


def _allowance(finding: Finding, policy: Policy) -> Allowance | None:
    """Return the allowance of a finding that lasts longest."""
    matching = [a for a in policy.allow if a.id == finding.id]
    return max(matching, key=lambda a: a.until, default=None)


def _allowed(finding: Finding, where: str, allowance: Allowance, today: date) -> Rule:
    holds = today <= allowance.until
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


# ------------------------------------------------------------------------------ baseline


def _before(report: Report, baseline: Sequence[Report]) -> Report | None:
    same = [b for b in baseline if b.model.path == report.model.path]
    if same or len(baseline) != 1:
        return same[0] if same else None
    return baseline[0]


def _against(report: Report, before: Report | None, policy: Policy, today: date) -> Iterator[Rule]:
    if before is None:
        yield _regression(
            "baseline", False, "this model in the baseline", "it is not there", report.model.path
        )
        return
    yield _same_question(report, before)
    yield _regression(
        "baseline verdict",
        _VERDICTS.index(report.verdict) <= _VERDICTS.index(before.verdict),
        f"{before.verdict} or better, as in the baseline",
        report.verdict,
    )
    yield from _structure(report, before)
    yield from _growth(report, before, policy.tolerance)
    yield from _news(report, before, policy, today)


def _regression(rule: str, passed: bool, wanted: str, got: str, where: str = "") -> Rule:
    help_ = "see what changed in the model; where it is meant, write the baseline again"
    return Rule(rule, passed, wanted, got, where, help_, "RA235")


def _same_question(report: Report, before: Report) -> Rule:
    """Compare what was asked: numbers for another ε or other data say nothing of a change."""
    asked = [
        (name, was, now)
        for name, was, now in (
            ("ε", numbers.epsilon(before.eps), numbers.epsilon(report.eps)),
            ("norm", before.norm, report.norm),
            ("domain", before.domain, report.domain),
            ("data", before.data, report.data),
            ("scope", before.scope, report.scope),
        )
        if was != now
    ]
    return Rule(
        "baseline settings",
        not asked,
        "; ".join(f"{name} = {was}" for name, was, _ in asked) or "as in the baseline",
        "; ".join(f"{name} = {now}" for name, _, now in asked) or "as in the baseline",
        "",
        "give the options that the baseline was made with, or write the baseline again",
        "RA235",
    )


def _structure(report: Report, before: Report) -> Iterator[Rule]:
    was = {r.label: r for r in before.recurrences}
    now = {r.label: r for r in report.recurrences}
    changes = [f"{label} vanished" for label in was if label not in now]
    changes += [f"{label} appeared" for label in now if label not in was]
    changes += [
        f"{label} was {wording.cell(was[label])} of {was[label].hidden_size} units"
        for label, recurrence in now.items()
        if label in was and _kind(recurrence) != _kind(was[label])
    ]
    skipped = {part.where for part in _parts(before)}
    changes += [f"{p.where} is now skipped" for p in _parts(report) if p.where not in skipped]
    wanted = f"the {numbers.counted(len(was), 'recurrence')} of the baseline"
    yield _regression("baseline recurrences", not changes, wanted, "; ".join(changes) or "the same")


def _kind(recurrence: RecurrenceReport) -> tuple[str, int, int]:
    return recurrence.cell, recurrence.input_size, recurrence.hidden_size


def _growth(report: Report, before: Report, tolerance: float) -> Iterator[Rule]:
    was = {r.label: r for r in before.recurrences}
    for recurrence in report.recurrences:
        old = was.get(recurrence.label)
        if old is not None and old.upper is not None:
            yield _grown(
                "λ proved",
                old.upper.value,
                None if recurrence.upper is None else recurrence.upper.value,
                tolerance,
                numbers.rate_up,
                where=recurrence.label,
                gone="no proof any more",
            )
    for what, read in _KINDS:
        k = read(before.depth)
        if k is not None:
            yield _grown(
                f"k {what}",
                k,
                read(report.depth),
                tolerance,
                lambda value: f"{value:.0f}",
                gone="no such depth any more: " + wording.depths(report.depth),
            )


def _measured_k(depth: Depth) -> int | None:
    return None if depth.measured is None else depth.measured.k


_KINDS: tuple[tuple[str, Callable[[Depth], int | None]], ...] = (
    ("proved", lambda depth: depth.proved),
    ("measured", _measured_k),
)


def _grown(
    what: str,
    was: float,
    now: float | None,
    tolerance: float,
    show: Callable[[float], str],
    *,
    gone: str,
    where: str = "",
) -> Rule:
    margin = f" + {numbers.percent(tolerance)}" if tolerance else ""
    return _regression(
        f"baseline {what}",
        now is not None and now <= was * (1 + tolerance),
        f"{what} ≤ {show(was)}{margin}",
        gone if now is None else show(now),
        where,
    )


def _news(report: Report, before: Report, policy: Policy, today: date) -> Iterator[Rule]:
    """Fail on findings that the baseline has not, unless they are notes or allowed."""
    known = {(f.id, f.where) for f in before.findings}
    fresh = [
        f
        for f in report.findings
        if (f.id, f.where) not in known
        and f.severity != "note"
        and ((a := _allowance(f, policy)) is None or a.until < today)
    ]
    for id_, same in groupby(sorted(fresh, key=lambda f: f.id), key=lambda f: f.id):
        each = list(same)
        where = ", ".join(f.where for f in each if f.where)
        yield Rule(
            f"baseline {id_}",
            False,
            "no finding that the baseline has not",
            each[0].message,
            where,
            f"{each[0].help}; or accept it for a time: --allow {id_}:DATE:REASON",
            "RA235",
        )
