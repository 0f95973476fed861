"""The report for pull requests and step summaries: GitHub's Markdown, verdict first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rnnaudit.reports import numbers, wording
from rnnaudit.reports.checks import checks
from rnnaudit.results import Depth, MeasuredDepth, Outcome, RecurrenceReport, Refusal, Report

_MARKUP = re.compile(r"[\\`*{}\[\]<>#|~&@$!]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.|:(?=//)")
"""What means something to Markdown, HTML or GitHub; an underscore inside a word does not."""


class MarkdownRenderer:
    """Headings and tables; what comes from a file can neither mark up nor link."""

    @property
    def name(self) -> str:
        """The format's name."""
        return "markdown"

    def render(self, report: Report) -> str:
        """Return one report in full."""
        return _text(_section(report))

    def render_all(self, outcomes: Sequence[Outcome]) -> str:
        """Return a table of all models, then what failed and what was found of each."""
        return _text(_gathered(outcomes))


def _text(lines: Iterator[str]) -> str:
    return "\n".join(lines) + "\n"


def _gathered(outcomes: Sequence[Outcome]) -> Iterator[str]:
    said = wording.gathered(outcomes)
    yield f"## rnnaudit: {said.word}{escaped(said.evidence)}"
    yield ""
    headings = ("", "model", "verdict", "λ ≤", "k proved", "k measured", "no k <")
    yield from _table(headings, [_row(outcome) for outcome in outcomes])
    epsilons = {numbers.epsilon(o.eps): None for o in outcomes if isinstance(o, Report)}
    if epsilons:
        yield f"k for ε = {', '.join(epsilons)}"
        yield ""
    for outcome in outcomes:
        yield from _failures(outcome)
        yield from _findings(outcome)


def _row(outcome: Outcome) -> list[str]:
    state = wording.state(outcome)
    shown = state if state == "pass" else f"**{state}**"
    if isinstance(outcome, Refusal):
        return [shown, escaped(outcome.path), outcome.id, *[numbers.NONE] * 4]
    bounds = [r.upper.value for r in outcome.recurrences if r.upper is not None]
    whole = bounds and len(bounds) == len(outcome.recurrences)
    return [
        shown,
        escaped(outcome.model.path),
        outcome.verdict,
        numbers.rate_up(max(bounds)) if whole else numbers.NONE,
        *_known(outcome.depth),
    ]


def _failures(outcome: Outcome) -> Iterator[str]:
    if isinstance(outcome, Refusal):
        yield f"### error: {escaped(outcome.path)}"
        yield ""
        yield f"{outcome.id}: {escaped(outcome.message)}"
        yield ""
        if outcome.help:
            yield f"Next: {escaped(outcome.help)}"
            yield ""
        return
    failed = [rule for rule in checks(outcome) if not rule.passed]
    if failed:
        yield f"### fail: {escaped(outcome.model.path)}"
        yield ""
        yield from _table(
            ("rule", "where", "wanted", "got", "next"),
            [[escaped(t) for t in (r.rule, r.where, r.wanted, r.got, r.help)] for r in failed],
        )


def _findings(outcome: Outcome) -> Iterator[str]:
    if isinstance(outcome, Report) and outcome.findings:
        path = escaped(outcome.model.path)
        count = numbers.counted(len(outcome.findings), "finding")
        yield f"<details><summary>{count} in {path}</summary>"
        yield ""
        yield from _listed(outcome)
        yield "</details>"
        yield ""


def _listed(report: Report) -> Iterator[str]:
    rows = [
        [group.finding.id, group.finding.severity, ", ".join(group.places), group.finding.message]
        for group in wording.grouped(report.findings)
    ]
    yield from _table(("id", "severity", "where", "what"), [list(map(escaped, r)) for r in rows])


# --------------------------------------------------------------------------- one report


def _section(report: Report) -> Iterator[str]:
    yield f"## {escaped(report.model.path)}: {wording.verdict(report).word}"
    yield ""
    yield escaped(str(wording.verdict(report)))
    yield ""
    if report.equivalence is not None:
        yield escaped(str(wording.judgement(report.equivalence)))
        yield ""
    if report.export is not None:
        yield f"Wrote {escaped(report.export.path)}: {escaped(report.export.form)}"
        yield ""
    if report.recurrences:
        yield from _recurrences(report)
    yield from _failures(report)
    if report.table:
        headings = [escaped(wording.marked(depth)) for depth in report.table]
        yield from _table((f"{escaped(report.scope)}, ε =", *headings), _depths(report.table))
        if said := wording.noise(report.depth):
            star = f"{wording.BLURRED} below its own error: "
            below = any(depth.below_noise for depth in report.table)
            yield escaped(f"{star if below else ''}{said}")
            yield ""
    if report.skipped:
        rows = [[escaped(part.where), escaped(part.reason)] for part in report.skipped]
        yield from _table(("skipped", "why"), rows)
    if report.findings:
        yield from _listed(report)
    facts = (("inputs", report.data), ("domain", report.domain), ("format", report.model.format))
    yield " · ".join(f"{name}: {escaped(fact)}" for name, fact in facts if fact)


def _recurrences(report: Report) -> Iterator[str]:
    headings = (
        *("recurrence", "cell", "size", "verdict", "λ ≤ proved", "‖J‖ ≥ found", "half-life"),
        *("k proved", "k measured", "no k <"),
    )
    yield from _table(headings, [_recurrence(report, r) for r in report.recurrences])


def _recurrence(report: Report, recurrence: RecurrenceReport) -> list[str]:
    half = recurrence.lyapunov.half_life if recurrence.lyapunov else None
    own = wording.own_depth(recurrence, report.eps) or Depth(report.eps)
    return [
        escaped(recurrence.label),
        escaped(wording.cell(recurrence)),
        f"{recurrence.input_size} → {recurrence.hidden_size}",
        recurrence.verdict,
        numbers.rate_up(recurrence.upper.value) if recurrence.upper else numbers.NONE,
        numbers.rate_down(recurrence.lower.value) if recurrence.lower else numbers.NONE,
        numbers.near(half, 2) if half is not None else numbers.NONE,
        *_known(own),
    ]


def _depths(table: Sequence[Depth]) -> list[list[str]]:
    known = [_known(depth) for depth in table]
    names = ("k proved", "k measured", "no k below")
    return [[name, *(each[i] for each in known)] for i, name in enumerate(names)]


def _known(depth: Depth) -> list[str]:
    measured = depth.measured
    return [
        numbers.whole(depth.proved),
        wording.brief(measured) + _source(measured),
        numbers.whole(depth.refuted_below),
    ]


def _source(measured: MeasuredDepth | None) -> str:
    return " (synthetic)" if measured is not None and measured.synthetic else ""


# -------------------------------------------------------------------------------- syntax


def escaped(text: str) -> str:
    """Make a text literal: one line, and no character that Markdown or HTML gives a meaning."""
    return _MARKUP.sub(lambda found: f"&#{ord(found.group())};", numbers.clean(text))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{' --- |' * len(headings)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
