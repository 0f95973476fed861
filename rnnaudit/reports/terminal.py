"""The report on a terminal: 80 columns, and the verdict last, where the eye rests.

Colour only repeats what the words say: green is proved or passed, yellow measured,
red refuted or failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich.cells import cell_len
from rich.text import Text

from rnnaudit.reports import numbers, wording
from rnnaudit.reports.commands import shell, snippet
from rnnaudit.reports.layout import Column, Piece, flow, hang, table, to_str
from rnnaudit.results import (
    Depth,
    Equivalence,
    Export,
    MeasuredDepth,
    RecurrenceReport,
    Replay,
    Report,
)

WIDTH = 80

BLOCKS = 3
"""More recurrences than this are shown as a table."""

LONGEST_UNITS = 5
"""Units of the state that are named with their depth."""

PROVED, MEASURED, REFUTED, LABEL = "green", "yellow", "red", "dim"
VERDICTS = {
    "STABLE": "bold green",
    "UNSTABLE": "bold red",
    "UNDECIDED": "bold yellow",
    "REPLAYS": "bold green",
    "FAILS": "bold red",
    "PASS": "bold green",
    "FAIL": "bold red",
}
SEVERITIES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True, slots=True)
class TerminalRenderer:
    """Plain text for people; ``verbose`` shows each recurrence in full, ``quiet`` the verdict."""

    colour: bool = False
    verbose: bool = False
    quiet: bool = False
    width: int = WIDTH

    @property
    def name(self) -> str:
        """The format's name."""
        return "text"

    def render(self, report: Report) -> str:
        """Return the report as text, no line wider than ``width``."""
        lines = _verdict(report, self.width) if self.quiet else self._body(report)
        return to_str(list(lines), colour=self.colour, width=self.width)

    def _body(self, report: Report) -> Iterator[Text]:
        yield from _head(report, self.width)
        compared = report.export is not None or report.equivalence is not None
        if report.export is not None:
            yield Text()
            yield from _cuts(report, report.export, self.width)
        if report.recurrences and (self.verbose or not compared):
            yield Text()
            if self.verbose or len(report.recurrences) <= BLOCKS:
                yield from _blocks(report, self.width, self.verbose)
            else:
                yield from _overview(report, self.width)
            yield from _depths(report, self.width)
        if self.verbose:
            yield Text()
            yield from _settings(report, self.width)
        if report.skipped or report.findings:
            yield Text()
            yield from _remarks(report, self.width)
        yield Text()
        yield from _verdict(report, self.width)
        yield from _next(report, self.width)
        if report.equivalence is not None:
            yield from _comparison(report.equivalence, self.width)
        if report.replay is not None:
            yield from _replay(report.replay, self.width)
        if report.export is not None:
            yield Text()
            yield from _written(report.export, self.width)
        elif isinstance(cut := report.settings.get("cut"), dict):
            yield Text()
            facts: list[Piece] = [f"{numbers.clean(str(r))} to k = {k}" for r, k in cut.items()]
            yield from _labelled("cut", facts, self.width)
        elif report.equivalence is not None and "candidate" not in report.settings:
            yield Text()
            yield from _labelled("wrote", ["nothing: no depth that was tried keeps ε"], self.width)


def _head(report: Report, width: int) -> Iterator[Text]:
    facts: list[Piece] = [
        Text(numbers.clean(PurePath(report.model.path).name), "bold"),
        numbers.clean(report.model.format),
    ]
    if report.recurrences or (report.equivalence is None and report.replay is None):
        facts.append(numbers.counted(len(report.recurrences), "recurrence"))
    skipped = len(report.skipped) + sum(len(r.skipped) for r in report.recurrences)
    if skipped:
        facts.append(Text(f"{skipped} skipped", MEASURED))
    yield from flow(facts, width)
    candidate = report.settings.get("candidate")
    if isinstance(candidate, str):
        yield from _labelled("against", [numbers.clean(candidate)], width)
    if report.recurrences:
        yield from _labelled("inputs", [numbers.clean(report.data)], width)
        yield from _labelled("domain", [numbers.clean(report.domain) or "every input"], width)
        norm = "largest |Δ| over units" if report.norm == "max" else "‖Δ‖₂ over units"
        yield from _labelled("errors", [norm, numbers.clean(report.scope)], width)


def _labelled(label: str, facts: Sequence[Piece], width: int, column: int = 9) -> Iterator[Text]:
    yield from hang(Text(label, LABEL), flow(facts, width - column), indent=0, column=column)


# ------------------------------------------------------------------------- recurrences


def _blocks(report: Report, width: int, verbose: bool) -> Iterator[Text]:
    for i, recurrence in enumerate(report.recurrences):
        if i:
            yield Text()
        yield from _block(report, recurrence, width, verbose)


def _block(
    report: Report, recurrence: RecurrenceReport, width: int, verbose: bool
) -> Iterator[Text]:
    depth = wording.own_depth(recurrence, report.eps)
    cut = wording.cut_short(report, recurrence.label)
    k = f"k({numbers.epsilon(report.eps)})"
    column = 4 + max(8, cell_len(k) + 1)
    yield from hang("", flow(_title(recurrence), width - 2, "  "), indent=2, column=2)
    rows: list[tuple[str, list[Piece]]] = [
        ("options", [wording.options(recurrence)]),
        ("λ", _rates(recurrence, report.domain, verbose)),
        ("others", _others(recurrence, report.eps) if verbose else []),
        ("r steps", _norms(recurrence, verbose)),
        ("memory", _memory(recurrence, wording.step_seconds(report))),
        ("Λ₂ …", _spectrum(recurrence, verbose)),
        ("units", _units(recurrence, verbose)),
        (k, _evidence(depth, wording.step_seconds(report), cut) if depth is not None else []),
    ]
    rows += [
        ("skipped", [numbers.clean(s.where), numbers.clean(s.reason)]) for s in recurrence.skipped
    ]
    for label, facts in rows:
        lines = flow(facts, width - column)
        if lines:
            yield from hang(Text(label, LABEL), lines, indent=4, column=column)


def _place(recurrence: RecurrenceReport) -> str:
    return f"{numbers.clean(recurrence.name)}[{recurrence.layer}]"


def _title(recurrence: RecurrenceReport) -> list[Piece]:
    return [
        Text(_place(recurrence), "bold"),
        wording.cell(recurrence),
        _sizes(recurrence),
        recurrence.direction,
        Text(recurrence.verdict, VERDICTS[recurrence.verdict.upper()].removeprefix("bold ")),
    ]


def _sizes(recurrence: RecurrenceReport) -> str:
    return f"{recurrence.input_size} → {recurrence.hidden_size}"


def _rates(recurrence: RecurrenceReport, domain: str, verbose: bool) -> list[Piece]:
    facts: list[Piece] = []
    if recurrence.upper is not None:
        upper = recurrence.upper
        over = "" if upper.domain == domain else f", {upper.domain}"
        how = numbers.clean(f"{wording.norm(upper.norm)}: {upper.method}{over}")
        facts.append(
            Text.assemble((f"≤ {numbers.rate_up(upper.value)} proved", PROVED), f" ({how})")
        )
    elif recurrence.no_proof is not None:
        facts.append(f"no proof: {numbers.clean(recurrence.no_proof.reason)}")
    if recurrence.lower is not None:
        lower = recurrence.lower
        method = lower.method if verbose else lower.method.partition(" (")[0]
        how = numbers.clean(f"{wording.norm(lower.norm)}: {method}")
        facts.append(
            Text.assemble((f"‖J‖ ≥ {numbers.rate_down(lower.value)} found", MEASURED), f" ({how})")
        )
    if recurrence.spectral_norm is not None:
        facts.append(f"‖W‖₂ = {numbers.near(recurrence.spectral_norm)}")
    return facts


def _others(recurrence: RecurrenceReport, eps: float) -> list[Piece]:
    """List the methods of proof beside the best one, each on lines of its own."""
    facts: list[Piece] = []
    for attempt in recurrence.others:
        if attempt.rate is None:
            facts.append(numbers.clean(f"{attempt.method}: {attempt.reason}"))
            continue
        k = "no k" if attempt.k is None else f"k({numbers.epsilon(eps)}) = {attempt.k}"
        rate = numbers.rate_up(attempt.rate)
        said = f"{attempt.method}: ≤ {rate} in {wording.norm(attempt.norm)}, {k}"
        facts.append(numbers.clean(said))
    return facts


def _norms(recurrence: RecurrenceReport, verbose: bool) -> list[Piece]:
    """Show ‖J_r … J_1‖₂ where it tells more than one step: where that is 1 or larger."""
    curve = recurrence.norms
    if curve is None or not curve.r or (curve.value[0] < 1 and not verbose):
        return []
    points = [
        f"{numbers.down(value)} (r = {r})" for r, value in zip(curve.r, curve.value, strict=True)
    ]
    if not verbose and len(points) > 4:
        last = len(points) - 1
        points = [points[i] for i in sorted({0, last // 3, 2 * last // 3, last})]
    return ["‖J_r … J_1‖₂ ≥ " + points[0], *points[1:]]


def _memory(recurrence: RecurrenceReport, step: float | None) -> list[Piece]:
    exponent = recurrence.lyapunov
    if exponent is None:
        return []
    half = exponent.half_life
    if half is None:
        shown = "never halves: perturbations grow"
    else:
        shown = f"half-life {numbers.near(half, 2)} steps{_aside(wording.lasting(half, step))}"
    rate = numbers.estimate(exponent.max, exponent.stderr)
    return [shown, f"Λ₁ = {rate} per step over {exponent.steps} steps"]


def _spectrum(recurrence: RecurrenceReport, verbose: bool) -> list[Piece]:
    """List the exponents after the first."""
    found = recurrence.spectrum
    if found is None or not verbose:
        return []
    pairs = list(zip(found.values, found.stderrs, strict=True))[1:]
    return [
        "−∞" if value is None or error is None else numbers.estimate(value, error)
        for value, error in pairs
    ]


def _units(recurrence: RecurrenceReport, verbose: bool) -> list[Piece]:
    """Name the units of the state that remember longest, and what half of all do without."""
    memory = recurrence.unit_memory
    if memory is None or not verbose:
        return []
    ranked = memory.longest(sum(map(len, memory.units.values())))
    middle = ranked[len(ranked) // 2][1]
    facts: list[Piece] = [
        f"{name} {'longer than the data show' if k is None else k}"
        for name, k in ranked[:LONGEST_UNITS]
    ]
    if middle is not None and len(ranked) > LONGEST_UNITS:
        facts.append(f"half of the {len(ranked)} units need ≤ {middle}")
    return facts


def _aside(*facts: str) -> str:
    inside = "; ".join(fact for fact in facts if fact)
    return f" ({inside})" if inside else ""


def _evidence(depth: Depth, step: float | None, cut: bool) -> list[Piece]:
    facts: list[Piece] = []
    if depth.below_noise:
        facts.append(Text(f"ε is below float32's own error: {wording.noise(depth)}", MEASURED))
    if depth.proved is not None:
        time = _aside(wording.lasting(depth.proved, step))
        facts.append(Text.assemble((f"proved {depth.proved}", PROVED), time))
    if depth.measured is not None:
        facts.append(_measured(depth.measured, step, cut))
    if depth.refuted_below is not None:
        facts.append(Text(f"no k < {depth.refuted_below} (witness)", REFUTED))
    return facts


def _measured(measured: MeasuredDepth, step: float | None, cut: bool) -> Text:
    sample, exceed = wording.sample(measured), wording.exceed(measured)
    if measured.k is None:
        return Text.assemble((wording.longer(measured, cut), MEASURED), _aside(sample))
    confidence = f"{sample}: {exceed}" if exceed else sample
    time = wording.lasting(measured.k, step)
    return Text.assemble((f"measured {measured.k}", MEASURED), _aside(time, confidence))


def _overview(report: Report, width: int) -> Iterator[Text]:
    columns = [
        Column("recurrence", right=False, shrinks=True),
        Column("cell", right=False, shrinks=True),
        Column("size", right=False),
        Column("λ ≤"),
        Column("‖J‖ ≥"),
        Column("t½"),
        Column("proved"),
        Column("measured"),
    ]
    yield from table(
        columns, [_overview_row(report, r) for r in report.recurrences], indent=2, width=width
    )
    eps = numbers.epsilon(report.eps)
    legend = [
        f"proved, measured: k({eps})",
        "t½: half-life in steps",
        "← reads backwards",
        "--verbose shows each in full",
    ]
    for line in flow(legend, width - 2):
        line.stylize(LABEL)
        yield Text.assemble("  ", line)


def _overview_row(report: Report, recurrence: RecurrenceReport) -> list[Piece]:
    depth = wording.own_depth(recurrence, report.eps)
    half = recurrence.lyapunov.half_life if recurrence.lyapunov else None
    return [
        _place(recurrence),
        wording.cell(recurrence) + (" ←" if recurrence.direction == "reverse" else ""),
        _sizes(recurrence).replace(" ", ""),
        Text(numbers.rate_up(recurrence.upper.value), PROVED) if recurrence.upper else numbers.NONE,
        numbers.rate_down(recurrence.lower.value) if recurrence.lower else numbers.NONE,
        numbers.near(half, 2) if half is not None else numbers.NONE,
        count(depth.proved if depth else None, PROVED),
        brief(depth.measured if depth else None),
    ]


def count(k: int | None, style: str) -> Text:
    """Print a depth, or a dash where there is none."""
    return Text(numbers.whole(k), LABEL if k is None else style)


def brief(measured: MeasuredDepth | None) -> Text:
    """Print a measured depth in few letters: ``31``, ``> 128``, or a dash."""
    known = measured is not None and measured.k is not None
    return Text(wording.brief(measured), "" if known else MEASURED if measured else LABEL)


def _depths(report: Report, width: int) -> Iterator[Text]:
    """Show k for every ε of the table, whole model, by kind of evidence."""
    rows = [
        ("k proved", [count(d.proved, PROVED) for d in report.table]),
        ("k measured", [brief(d.measured) for d in report.table]),
        ("no k below", [count(d.refuted_below, REFUTED) for d in report.table]),
    ]
    rows = [(name, cells) for name, cells in rows if any(c.plain != numbers.NONE for c in cells)]
    if not rows:
        return
    scope = f"{numbers.clean(report.scope)}, ε ="
    scope = scope if cell_len(scope) <= width // 2 else "ε ="
    wide = max(cell_len(cell.plain) for _, cells in rows for cell in cells) + 2
    fitting = max(
        1, (width - 2 - max(cell_len(scope), len("no k below"))) // max(wide, len("2.5e-1") + 2)
    )
    for first in range(0, len(report.table), fitting):
        part = slice(first, first + fitting)
        headings = [
            Column(Text(wording.marked(d), "bold" if d.eps == report.eps else LABEL))
            for d in report.table[part]
        ]
        yield Text()
        yield from table(
            [Column(Text(scope, LABEL), right=False), *headings],
            [[Text(name, LABEL), *cells[part]] for name, cells in rows],
            indent=2,
            width=width,
        )
    said = wording.noise(report.depth)
    if said:
        below = any(d.below_noise for d in report.table)
        star = f"{wording.BLURRED} below its own error: " if below else ""
        for line in flow([f"{star}{said}"], width - 2):
            yield Text.assemble("  ", (line.plain, LABEL))


# ------------------------------------------------------------------- verdict, remarks


def _verdict(report: Report, width: int) -> Iterator[Text]:
    if report.replay is not None:
        settled = wording.replayed(report.replay)
        label = "witness"
    elif report.equivalence is not None:
        settled = wording.judgement(report.equivalence)
        label = "verify"
    else:
        settled = wording.verdict(report)
        label = "verdict"
    words = Text.assemble((settled.word, VERDICTS[settled.word]), settled.evidence)
    yield from _labelled(f"{label}:", [words], width)


def _next(report: Report, width: int) -> Iterator[Text]:
    command, advice = wording.next_command(report)
    if command is not None:
        lines = [Text(line) for line in shell(command, width - 9)]
        yield from hang(Text("next:", LABEL), lines, indent=0, column=9)
    elif advice:
        yield from _labelled("next:", [advice], width)


def _remarks(report: Report, width: int) -> Iterator[Text]:
    for skipped in report.skipped:
        facts = [Text.assemble(numbers.clean(skipped.where), ": ", numbers.clean(skipped.reason))]
        yield from hang(Text("skipped", MEASURED), flow(facts, width - 9), indent=0, column=9)
    for finding, places in wording.grouped(report.findings):
        label = Text(finding.severity, SEVERITIES[finding.severity])
        where = ", ".join(map(numbers.clean, places[:3]))
        where += f" and {len(places) - 3} more" if len(places) > 3 else ""
        message = numbers.clean(f"{where}: {finding.message}" if where else finding.message)
        facts = [Text.assemble((finding.id, "bold"), " ", message)]
        yield from hang(label, flow(facts, width - 9), indent=0, column=9)
        if finding.help:
            advice = flow([f"→ {numbers.clean(finding.help)}"], width - 9)
            yield from hang("", [Text(line.plain, LABEL) for line in advice], indent=0, column=9)


def _settings(report: Report, width: int) -> Iterator[Text]:
    facts = [f"{name} = {numbers.clean(str(value))}" for name, value in report.settings.items()]
    yield from _labelled("settings", facts, width)
    made = [f"{name} {version}" for name, version in report.tool.items() if name != "name"]
    yield from _labelled("versions", [numbers.clean(fact) for fact in made], width)


# ------------------------------------------------------------------ truncate and verify


def _cuts(report: Report, export: Export, width: int) -> Iterator[Text]:
    cut = {t.recurrence: t for t in export.truncations}
    for recurrence in report.recurrences:
        title = _title(recurrence)[:-1]
        truncation = cut.get(recurrence.label)
        if truncation is None:
            title.append(Text("stays recurrent", MEASURED))
        else:
            style = PROVED if truncation.evidence == "proved" else MEASURED
            time = _aside(wording.lasting(truncation.depth, wording.step_seconds(report)))
            evidence = wording.EVIDENCE[truncation.evidence]
            title.append(Text(f"k = {truncation.depth}{time} {evidence}", style))
        first, *more = flow(title, width - 4, "  ")
        lines = [first, *(Text.assemble("  ", line) for line in more)]
        yield from hang("", lines, indent=2, column=2)


def _replay(replay: Replay, width: int) -> Iterator[Text]:
    """Show the distances at a thinning set of depths, as found and as replayed."""
    count = len(replay.depths)
    shown = sorted({min(count, 1 << i) - 1 for i in range(count.bit_length() + 1)} | {count - 1})
    rows: list[list[Piece]] = [
        [
            str(replay.depths[i]),
            numbers.near(replay.found[i]),
            Text(
                numbers.near(replay.replayed[i]),
                REFUTED if replay.refutes(replay.replayed[i]) else LABEL,
            ),
        ]
        for i in shown
    ]
    yield Text()
    columns = [Column("depth"), Column("found"), Column("replayed")]
    yield from table(columns, rows, indent=2, width=width)
    facts: list[Piece] = [
        f"output of {numbers.clean(replay.where)}",
        f"inputs {numbers.clean(replay.domain)}",
    ]
    yield from _labelled("of", facts, width)


def _comparison(equivalence: Equivalence, width: int) -> Iterator[Text]:
    rows: list[tuple[str, list[Piece]]] = []
    if equivalence.required_eps is not None and not equivalence.passed:
        rows.append(("passes at", [f"ε = {numbers.exact(equivalence.required_eps)}, the smallest"]))
    if equivalence.where is not None:
        at = equivalence.where
        rows.append(
            (
                "where",
                [
                    f"output {numbers.clean(at.output)}",
                    f"t = {at.t}",
                    f"unit {at.unit}",
                    f"row {at.batch} of {numbers.clean(at.input)}",
                ],
            )
        )
    parts = [f"{name} {numbers.up(value)}" for name, value in equivalence.percentiles.items()]
    rows.append(("errors", list(parts)))
    sources = [
        f"{name} {numbers.up(value)} ({how})"
        for name, value, how in (
            ("truncation", equivalence.truncation_error, "float64 against float64"),
            ("conversion", equivalence.conversion_error, "the file against float64"),
        )
        if value is not None
    ]
    rows.append(("of which", list(sources)))
    if equivalence.reference:
        rows.append(("original", [numbers.clean(equivalence.reference)]))
    rows.append(("left out", [numbers.clean(part) for part in equivalence.left_out]))
    for label, facts in rows:
        lines = flow(facts, width - 12)
        if lines:
            yield from hang(Text(label, LABEL), lines, indent=2, column=12)


def _written(export: Export, width: int) -> Iterator[Text]:
    before = "?" if export.bytes_before is None else numbers.size(export.bytes_before)
    rows: list[tuple[str, list[Piece]]] = [
        ("wrote", [Text(numbers.clean(export.path), "bold")]),
        (
            "form",
            [
                numbers.clean(export.form),
                f"opset {export.opset}",
                f"initial state {numbers.clean(export.initial_state)}",
                *([numbers.clean(export.form_reason)] if export.form_reason else []),
            ],
        ),
        ("reads", [numbers.clean(_port(name, shape)) for name, shape, _ in export.inputs]),
        ("size", [f"{before} → {numbers.size(export.bytes_after)}"]),
    ]
    if export.milliseconds_after is not None:
        rows.append(
            (
                "latency",
                [
                    *_spans(export.milliseconds_before, export.milliseconds_after),
                    numbers.clean(export.latency_shape),
                ],
            )
        )
    for label, facts in rows:
        yield from _labelled(label, facts, width)
    yield Text()
    yield Text("run it:", LABEL)
    for line in snippet(export, width - 4):
        yield Text(f"    {line}")


def _port(name: str, shape: tuple[int | str, ...]) -> str:
    return f"{name} [{', '.join(map(str, shape))}]"


def _spans(before: float | None, after: float) -> list[Piece]:
    if before is None:
        return [numbers.seconds(after / 1e3)]
    unit = max(before, after) / 1e3
    ratio = numbers.near(max(before / after, after / before), 2)
    return [
        f"{numbers.seconds(before / 1e3, unit)} → {numbers.seconds(after / 1e3, unit)}",
        f"{ratio}× {'faster' if after <= before else 'slower'}",
    ]
