"""Several audits on a terminal: a table, each failure explained, and the verdict last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from rnnaudit.reports import numbers, wording
from rnnaudit.reports.layout import Column, Piece, flow, hang, table, to_str
from rnnaudit.reports.terminal import (
    LABEL,
    MEASURED,
    PROVED,
    REFUTED,
    VERDICTS,
    WIDTH,
    brief,
    count,
)
from rnnaudit.results import Outcome, Refusal, Report, Rule

STATES = {"pass": "bold green", "fail": "bold red", "error": "bold red"}


@dataclass(frozen=True, slots=True)
class SummaryRenderer:
    """Plain text for people; ``verbose`` lists the rules that hold too, ``quiet`` one line."""

    colour: bool = False
    verbose: bool = False
    quiet: bool = False
    width: int = WIDTH

    @property
    def name(self) -> str:
        """The format's name."""
        return "text"

    def render_all(self, outcomes: Sequence[Outcome]) -> str:
        """Return all outcomes as text, no line wider than ``width``."""
        lines = list(self._body(outcomes)) if not self.quiet else []
        return to_str([*lines, *_last(outcomes, self.width)], colour=self.colour, width=self.width)

    def _body(self, outcomes: Sequence[Outcome]) -> Iterator[Text]:
        yield from _table(outcomes, self.width)
        yield Text()
        for outcome in outcomes:
            explained = list(_explained(outcome, self.width, self.verbose))
            if explained:
                yield from explained
                yield Text()


def _table(outcomes: Sequence[Outcome], width: int) -> Iterator[Text]:
    columns = [
        Column("gate", right=False),
        Column("model", right=False, shrinks=True),
        Column("verdict", right=False),
        Column("λ ≤"),
        Column("k proved"),
        Column("measured"),
        Column("no k <"),
    ]
    yield from table(columns, [_row(outcome) for outcome in outcomes], indent=0, width=width)
    epsilons = {o.eps: numbers.epsilon(o.eps) for o in outcomes if isinstance(o, Report)}
    synthetic = any(
        o.depth.measured is not None and o.depth.measured.synthetic
        for o in outcomes
        if isinstance(o, Report)
    )
    legend = [f"k for ε = {', '.join(epsilons.values())}"] if epsilons else []
    legend += ["~ measured on synthetic inputs"] if synthetic else []
    for line in flow(legend, width):
        line.stylize(LABEL)
        yield line


def _row(outcome: Outcome) -> list[Piece]:
    state = wording.state(outcome)
    shown = Text(state, STATES[state])
    if isinstance(outcome, Refusal):
        return [shown, numbers.clean(outcome.path), outcome.id, *[numbers.NONE] * 4]
    bounds = [r.upper.value for r in outcome.recurrences if r.upper is not None]
    whole = len(bounds) == len(outcome.recurrences) and bounds
    measured = outcome.depth.measured
    seen = brief(measured)
    if measured is not None and measured.synthetic:
        seen = Text.assemble("~", seen)
    return [
        shown,
        numbers.clean(outcome.model.path),
        Text(outcome.verdict, VERDICTS[outcome.verdict.upper()].removeprefix("bold ")),
        Text(numbers.rate_up(max(bounds)), PROVED) if whole else numbers.NONE,
        count(outcome.depth.proved, PROVED),
        seen,
        count(outcome.depth.refuted_below, REFUTED),
    ]


def _explained(outcome: Outcome, width: int, verbose: bool) -> Iterator[Text]:
    if isinstance(outcome, Refusal):
        yield from _headed("ERROR", outcome.path, width)
        yield from _facts([(outcome.id, outcome.message), ("next", outcome.help)], width)
        return
    if outcome.gate is None:
        return
    rules = outcome.gate.rules if verbose else outcome.gate.failures
    if rules:
        yield from _headed("FAIL" if outcome.gate.failures else "PASS", outcome.model.path, width)
    for rule in rules:
        yield from _rule(rule, width)


def _headed(word: str, path: str, width: int) -> Iterator[Text]:
    style = VERDICTS.get(word, "bold red")
    lines = flow([Text(numbers.clean(path), "bold")], width - 7)
    yield from hang(Text(word, style), lines, indent=0, column=7)


def _rule(rule: Rule, width: int) -> Iterator[Text]:
    mark = Text("holds", PROVED) if rule.passed else Text("fails", REFUTED)
    title = Text.assemble((numbers.clean(rule.rule), "bold"), " ", mark)
    yield from hang(
        "", flow([title, numbers.clean(rule.where)], width - 2, " · "), indent=2, column=2
    )
    facts = [("wanted", rule.wanted), ("got", rule.got)]
    yield from _facts(facts if rule.passed else [*facts, ("next", rule.help)], width)


def _facts(facts: Sequence[tuple[str, str]], width: int) -> Iterator[Text]:
    for label, fact in facts:
        if fact:
            lines = flow([numbers.clean(fact)], width - 12)
            yield from hang(Text(label, LABEL), lines, indent=4, column=12)


def _last(outcomes: Sequence[Outcome], width: int) -> Iterator[Text]:
    said = wording.gathered(outcomes)
    line = Text.assemble((said.word, VERDICTS[said.word]), said.evidence)
    yield from hang(Text("gate:", LABEL), flow([line], width - 9), indent=0, column=9)
    skipped = sum(len(o.skipped) for o in outcomes if isinstance(o, Report))
    if skipped:
        note = Text(f"{numbers.counted(skipped, 'part')} skipped", MEASURED)
        yield from hang("", [note], indent=0, column=9)
