"""The rules of a baseline: a report may be no worse than the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from itertools import groupby

from rnnaudit.policy.record import Policy
from rnnaudit.policy.rules import skipped_parts
from rnnaudit.reports import numbers, wording
from rnnaudit.results import Depth, RecurrenceReport, Report, Rule, Verdict

_VERDICTS: tuple[Verdict, ...] = ("stable", "undecided", "unstable")


def regressions(
    report: Report, baseline: Sequence[Report], policy: Policy, today: date
) -> Iterator[Rule]:
    """Judge a report by the earlier one of the same path, or by the only one there is."""
    before = _before(report, baseline)
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


def _before(report: Report, baseline: Sequence[Report]) -> Report | None:
    same = [b for b in baseline if b.model.path == report.model.path]
    if same or len(baseline) != 1:
        return same[0] if same else None
    return baseline[0]


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
            ("confidence", before.settings.get("confidence"), report.settings.get("confidence")),
            ("exceed", before.settings.get("exceed"), report.settings.get("exceed")),
        )
        if was != now
    ]
    return Rule(
        "baseline settings",
        not asked,
        "; ".join(f"{name} = {_shown(was)}" for name, was, _ in asked) or "as in the baseline",
        "; ".join(f"{name} = {_shown(now)}" for name, _, now in asked) or "as in the baseline",
        "",
        "give the options that the baseline was made with, or write the baseline again",
        "RA235",
    )


def _shown(value: object) -> object:
    """Return what a baseline holds of a setting, whatever that is, in one line."""
    return (
        "not given" if value is None else numbers.clean(value) if isinstance(value, str) else value
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
    skipped = {part.where for part in skipped_parts(before)}
    changes += [
        f"{p.where} is now skipped" for p in skipped_parts(report) if p.where not in skipped
    ]
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
    for what, read in _DEPTHS:
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


_DEPTHS: tuple[tuple[str, Callable[[Depth], int | None]], ...] = (
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
        and ((a := policy.allowance(f)) is None or not a.holds(today))
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
