"""What a proof file proves, for people: λ, method, domain and k of every recurrence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from rich.text import Text

from rnnaudit.reports import numbers, wording
from rnnaudit.reports.commands import shell
from rnnaudit.reports.layout import Column, Piece, flow, hang, table, to_str
from rnnaudit.results import Depth, ProofFile, RecurrenceReport, Report

_COLUMN = 10


@dataclass(frozen=True, slots=True)
class ProofRenderer:
    """The report of ``certify`` (``written``) and of ``check``, no line wider than ``width``."""

    written: bool
    width: int = 80
    colour: bool = False
    quiet: bool = False

    def render(self, report: Report) -> str:
        """Return the report as text."""
        lines = self._verdict(report) if self.quiet else self._body(report)
        return to_str(list(lines), colour=self.colour, width=self.width)

    def _body(self, report: Report) -> Iterator[Text]:
        yield from self._head(report)
        for recurrence in report.recurrences:
            yield Text()
            yield from self._block(recurrence)
        if any(r.depths for r in report.recurrences):
            yield Text()
            yield from _depths(report, self.width)
        for skipped in report.skipped:
            label = "left out"
            yield from self._line(label, [numbers.clean(skipped.where), skipped.reason], 0)
        yield Text()
        yield from self._verdict(report)

    def _head(self, report: Report) -> Iterator[Text]:
        name = Text(numbers.clean(PurePath(report.model.path).name), "bold")
        count = numbers.counted(len(report.recurrences), "recurrence")
        yield from flow([name, numbers.clean(report.model.format), count], self.width)
        file = report.proof_file
        if file is not None and not self.written:
            facts = [numbers.clean(PurePath(file.path).name), numbers.size(file.bytes)]
            yield from self._line("proof", [" · ".join(facts)], 0)
        if self.written and report.data:
            yield from self._line("inputs", [numbers.clean(report.data)], 0)
        norm = "largest |Δ| over units" if report.norm == "max" else "‖Δ‖₂ over units"
        yield from self._line("errors", [norm, report.scope], 0)

    def _block(self, recurrence: RecurrenceReport) -> Iterator[Text]:
        title: list[Piece] = [
            Text(f"{numbers.clean(recurrence.name)}[{recurrence.layer}]", "bold"),
            wording.cell(recurrence),
            f"{recurrence.input_size} → {recurrence.hidden_size}",
            recurrence.direction,
        ]
        yield from hang("", flow(title, self.width - 2), indent=2, column=2)
        upper = recurrence.upper
        if upper is None:
            reason = "" if recurrence.no_proof is None else recurrence.no_proof.reason
            yield from self._line("nothing", [Text(numbers.clean(reason), "yellow")], 4)
            return
        rate = Text(f"≤ {numbers.rate_up(upper.value)} proved", "green")
        yield from self._line("λ", [rate], 4)
        yield from self._line("method", [f"{upper.method}, in a {upper.norm}"], 4)
        yield from self._line("domain", [upper.domain], 4)
        if recurrence.initial_state != "zero":
            yield from self._line("from", [numbers.clean(recurrence.initial_state)], 4)

    def _line(self, label: str, facts: list[Piece], indent: int) -> Iterator[Text]:
        column = indent + _COLUMN
        lines = flow(facts, self.width - column)
        yield from hang(Text(label, "dim"), lines, indent=indent, column=column)

    def _command(self, *words: str) -> Iterator[Text]:
        """Show a command that a shell reads as it is; none where a name cannot be printed."""
        if all(map(numbers.printable, words)):
            yield from self._line("next", list(shell(words, self.width - _COLUMN)), 0)

    def _verdict(self, report: Report) -> Iterator[Text]:
        file = report.proof_file
        word, style, rest = _judged(report, file, written=self.written)
        yield from flow([Text.assemble((word, f"bold {style}"), f": {rest}")], self.width)
        for refused in () if file is None else file.refused:
            yield from self._line("refused", [numbers.clean(refused.where), refused.reason], 0)
        if file is not None and self.written:
            facts: list[Piece] = [f"{numbers.clean(file.path)} ({numbers.size(file.bytes)})"]
            yield from self._line("wrote", facts, 0)
            yield from self._command("rnnaudit", "check", file.path, report.model.path)
        if file is None and self.written:
            asked = ("--eps", numbers.epsilon(report.depth.eps), *wording.carried(report))
            yield from self._command("rnnaudit", "inspect", report.model.path, *asked)
            advice = "it measures k, which needs no proof, and says what stands in its way; "
            advice += "a narrower --input-range may leave a domain that is proved"
            yield from self._line("", [advice], 0)


def _judged(report: Report, file: ProofFile | None, *, written: bool) -> tuple[str, str, str]:
    """Say what holds: a word, its colour and the rest of the sentence."""
    proved = sum(r.upper is not None for r in report.recurrences)
    if not proved and file is None:
        return "NO PROOF", "yellow", "no recurrence was proved to forget; nothing was written"
    if file is not None and not file.valid:
        return "REFUSED", "red", "the file does not prove what it claims of this model"
    of = f"{proved} of {numbers.counted(len(report.recurrences), 'recurrence')}"
    again = "" if written else " proved again from the weights"
    k = report.depth.proved
    whose = "end to end" if report.scope == "end to end" else "for each stack's own output"
    follows = (
        f"; {whose} k = {k} keeps {numbers.epsilon(report.eps)}"
        if k is not None
        else f"; no depth follows {whose}"
    )
    return ("PROVED" if written else "VALID"), "green", f"{of}{again}{follows}"


def _depths(report: Report, width: int) -> Iterator[Text]:
    """Set the depths in a table: one row for each recurrence, and one for the output."""
    epsilons = sorted({d.eps for r in report.recurrences for d in r.depths}, reverse=True)
    shown = epsilons[:7]
    columns = [Column("k for ε =", right=False, shrinks=True)]
    columns += [Column(numbers.epsilon(eps)) for eps in shown]

    def row(name: str, depths: tuple[Depth, ...]) -> list[Piece]:
        known = {d.eps: d.proved for d in depths}
        return [name, *(numbers.whole(known.get(e)) for e in shown)]

    rows = [row(numbers.clean(r.label), r.depths) for r in report.recurrences if r.depths]
    rows.append(row(report.scope, report.table))
    yield from table(columns, rows, indent=2, width=width)
