"""What a report says in words: sentences that every format for people shares.

A proved number, a witness, a measurement on the user's data and one on synthetic inputs
never share a phrase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from rnnaudit.reports import numbers
from rnnaudit.results import (
    ARRAYS,
    LIVE,
    MAX_DEPTH,
    UNROLLED,
    Depth,
    Equivalence,
    Evidence,
    Finding,
    MeasuredDepth,
    Outcome,
    RecurrenceReport,
    Refusal,
    Replay,
    Report,
)

CUT = "RA208"
"""The finding that the time budget ended a measurement."""

END_TO_END = "end to end"
"""The scope of a report whose depths are of the model's own output."""

EVIDENCE: Mapping[Evidence, str] = {
    "proved": "proved",
    "measured": "measured on your data, for ε/2",
    "synthetic": "measured on synthetic inputs, for ε/2",
    "chosen": "chosen with --depth",
}

_DEFAULTS: Mapping[str, object] = {
    "linear_before_reset": 1,
    "activations": {"gru": ["sigmoid", "tanh"], "lstm": ["sigmoid", "tanh", "tanh"]},
}


class Settled(NamedTuple):
    """A verdict in one word, and the rest of its sentence: what stands behind it."""

    word: str
    evidence: str

    def __str__(self) -> str:
        """Return the sentence."""
        return self.word + self.evidence


def verdict(report: Report) -> Settled:
    """Say the verdict on the worst case and, where it is weaker, what the data show beside it."""
    word, depth = report.verdict.upper(), report.depth
    if not report.recurrences:
        return Settled(word, ": no recurrence was audited")
    if report.verdict == "stable":
        proof = f" (proved {every_input(report.domain)})"
        if depth.proved is None:
            return Settled(word, f"{proof}; {seen(report)}")
        eps = numbers.epsilon(depth.eps)
        if report.scope != END_TO_END:
            return Settled(
                word,
                f"{proof}: cut to depth {depth.proved}, no recurrence's own output changes by "
                f"more than {eps}; the graph's outputs are compared by truncate",
            )
        return Settled(
            word, f"{proof}: a feed-forward model of depth {depth.proved} is equivalent to {eps}"
        )
    if report.verdict == "unstable":
        where = f"for some inputs {with_domain(report.domain)}".rstrip()
        saved = report.settings.get("witness")
        where_saved = f" saved to {numbers.clean(saved)}" if isinstance(saved, str) else ""
        return Settled(word, f" {where} (witness{where_saved}{_needs(report)}); {seen(report)}")
    k = depth.refuted_below
    more = "deeper ones were not searched" if depth.exhausted else "no more"
    known = "no witness" if k is None else f"a witness refutes k < {k}, {more}"
    return Settled(word, f" in the worst case (no proof, {known}); {seen(report)}")


def _needs(report: Report) -> str:
    """Say which output needs more than the search looked at, and how much that is.

    Where it is not the model's own it is named: the error may vanish behind a recurrence.
    """
    depth = report.depth
    if depth.never_forgets:
        alone = report.scope == END_TO_END or len(report.recurrences) == 1
        whole = "" if alone else f" of {numbers.clean(depth.refuted_in or '')}'s output"
        whose = [(whole, depth)]
    else:
        own = [(r, own_depth(r, report.eps)) for r in report.recurrences]
        whose = [
            (f" of {numbers.clean(r.label)}'s own output", d)
            for r, d in own
            if d is not None and d.never_forgets
        ]
    if not whose:
        return "" if depth.refuted_below is None else f": needs k ≥ {depth.refuted_below}"
    named, first = whose[0]
    more = f", and of {len(whose) - 1} more" if len(whose) > 1 else ""
    return f"{named}{more}: needs k > {first.searched}, the search's horizon"


def noise(depth: Depth) -> str:
    """Say how far float32 alone takes these outputs; empty where that is not known."""
    if depth.float32_noise is None:
        return ""
    return f"float32 alone moves these outputs by up to {numbers.up(depth.float32_noise)}"


BLURRED = "*"
"""Marks an ε that is less than what float32 alone changes."""


def marked(depth: Depth) -> str:
    """Print ε, marked where depths for it are beyond what float32 shows."""
    return numbers.epsilon(depth.eps) + (BLURRED if depth.below_noise else "")


def every_input(domain: str) -> str:
    """Say over which inputs a proof holds: ``for every input with |x| ≤ 1``."""
    return f"for every input {with_domain(domain)}".rstrip()


def with_domain(domain: str) -> str:
    """Turn a domain into a phrase that follows ``input``; empty where it is every input."""
    domain = numbers.clean(domain)
    if not domain or domain in ("every input", "all inputs", "any input"):
        return ""
    return f"with {domain}" if any(c in domain for c in "|≤=") else f"in {domain}"


def seen(report: Report) -> str:
    """Say what was measured of the whole, as a clause: ``on your data k(1e-3) = 31 (…)``."""
    measured, k = report.depth.measured, f"k({numbers.epsilon(report.depth.eps)})"
    if measured is None:
        alone = any(d.measured is not None for r in report.recurrences for d in r.depths)
        return f"{k} was measured for each recurrence alone" if alone else f"{k} was not measured"
    where = "on synthetic inputs" if measured.synthetic else "on your data"
    aside = f", {measured.set_aside} set aside" if measured.set_aside else ""
    count = numbers.counted(measured.sequences, "sequence") + aside
    if measured.k is None:
        return f"{where} {k} is {longer(measured, cut_short(report))} ({count})"
    share = measured.exceed_probability
    most = "" if share is None else f", ≤ {numbers.percent_up(share)} exceed"
    return f"{where} {k} = {measured.k} ({count}{most})"


def longer(measured: MeasuredDepth, cut: bool) -> str:
    """Say that the memory outlasts the data, or what the time budget let the data show."""
    if measured.longer_than == 0 and cut:
        return "unknown: the time budget ended the study"
    if measured.longer_than == 0:
        return "unknown: the study was cut short, or the data are too short"
    shown = "" if measured.longer_than is None else f": more than {measured.longer_than}"
    return f"longer than the {'time budget let the ' if cut else ''}data show{shown}"


def brief(measured: MeasuredDepth | None) -> str:
    """Say a measured depth in a word, for a table: ``31``, ``> 128``, ``?`` if unknown."""
    if measured is None:
        return numbers.NONE
    if measured.k is not None:
        return str(measured.k)
    if measured.longer_than == 0:
        return "?"
    return "longer" if measured.longer_than is None else f"> {measured.longer_than}"


def cut_short(report: Report, label: str | None = None) -> bool:
    """Whether the time budget ended a measurement early: of one recurrence, or of any."""
    return any(f.id == CUT and label in (None, f.where) for f in report.findings)


def sample(measured: MeasuredDepth) -> str:
    """Count the sequences that a depth was measured on."""
    aside = f", {measured.set_aside} set aside" if measured.set_aside else ""
    if measured.synthetic:
        return f"{measured.sequences} synthetic{aside}"
    return numbers.counted(measured.sequences, "sequence") + aside


def depths(depth: Depth, *, cut: bool = False) -> str:
    """Say every depth that is known, each with its evidence; ``cut`` as in `longer`."""
    facts = []
    if depth.proved is not None:
        facts.append(f"proved {depth.proved}")
    if depth.measured is not None:
        measured = depth.measured
        k = longer(measured, cut) if measured.k is None else f"measured {measured.k}"
        facts.append(f"{k} ({sample(measured)})")
    if depth.refuted_below is not None:
        facts.append(f"no k < {depth.refuted_below} (witness)")
    return " · ".join(facts) or "no depth: neither proved nor measured"


def exceed(measured: MeasuredDepth) -> str:
    """Say how many unseen sequences may exceed ε at the measured depth."""
    if measured.exceed_probability is None:
        return ""
    share = numbers.percent_up(measured.exceed_probability)
    return f"at {numbers.percent(measured.confidence)} confidence ≤ {share} exceed"


def norm(name: str) -> str:
    """Name a norm in full: ``2`` is the 2-norm."""
    return f"{name}-norm" if name in ("1", "2", "max") else name


def cell(recurrence: RecurrenceReport) -> str:
    """Name a cell's family, with the activation where the family leaves it open."""
    activation = recurrence.cell_options.get("activation")
    return f"{recurrence.cell}/{activation}" if activation else recurrence.cell


def options(recurrence: RecurrenceReport) -> str:
    """List the options that set a cell apart from PyTorch's default."""
    found = []
    for name, value in recurrence.cell_options.items():
        if name == "activation":
            continue
        usual = _DEFAULTS.get(name)
        usual = usual.get(recurrence.cell) if isinstance(usual, dict) else usual
        plain = list(value) if isinstance(value, (list, tuple)) else value
        if plain == usual:
            continue
        if plain is True:
            found.append(name)
        else:
            shown = ", ".join(map(str, plain)) if isinstance(plain, list) else plain
            found.append(f"{name} = {shown}")
    if recurrence.initial_state != "zero":
        found.append(f"initial state: {recurrence.initial_state}")
    return numbers.clean(" · ".join(found))


def own_depth(recurrence: RecurrenceReport, eps: float) -> Depth | None:
    """Return a recurrence's depth for ε, where the audit has one."""
    return next((d for d in recurrence.depths if d.eps == eps), None)


def step_seconds(report: Report) -> float | None:
    """Return the seconds that one step stands for, where the user said so."""
    value = report.settings.get("step_seconds")
    return float(value) if isinstance(value, (int, float)) else None


def lasting(k: float, step: float | None) -> str:
    """Print a depth as time where a step has a length, else nothing."""
    return "" if step is None else numbers.seconds(k * step)


def next_command(report: Report) -> tuple[tuple[str, ...] | None, str]:
    """Return the command to run next, or None, and why.

    A depth that can be had is worth truncating to; without one, longer data or the
    user's own may give it.
    """
    if report.export is not None or report.equivalence is not None or not report.recurrences:
        return None, ""
    depth, called, same = report.depth, _called(report), carried(report)
    if not all(map(numbers.printable, (*called, *same))):
        return None, ""
    eps = numbers.epsilon(depth.eps)
    measured = depth.measured.k if depth.measured is not None else None
    depths = [k for k in (depth.proved, measured) if k is not None]
    written_out = {f.where for f in report.findings if f.message.startswith(UNROLLED)}
    if all(r.cell == "traced" or r.name in written_out for r in report.recurrences):
        return None, ""  # there is no node that a form could replace
    if depths:
        most = min(depths) if min(depths) > MAX_DEPTH else None
        if (code := _in_python(report, most)) is not None:
            return None, code
        within = () if most is None else ("--max-depth", str(most))
        return ("rnnaudit", "truncate", *called, "--eps", eps, *same, *within), ""
    if depth.measured is not None and depth.measured.longer_than is not None:
        if cut_short(report):
            return None, "give it more time with --time-budget"
        if depth.measured.synthetic and _live(report):
            return None, f"rnnaudit.audit(module, eps={eps}, data=your_sequences)"
        if depth.measured.synthetic:
            return ("rnnaudit", "inspect", *called, "--data", "YOUR_SEQUENCES.npz"), ""
        return None, "measure on longer sequences, or keep the recurrence"
    return None, ""


def _live(report: Report) -> bool:
    """Whether the model is a module in memory, which no command can name."""
    asked = report.settings.get("factory") or report.settings.get("trust_pickle")
    return report.model.format == LIVE and not asked


def _called(report: Report) -> tuple[str, ...]:
    """Return the arguments that name the model to a command, and how to read it."""
    path, weights = report.model.path, report.settings.get("weights")
    factory = report.settings.get("factory")
    read = ("--trust-pickle",) if report.settings.get("trust_pickle") is True else ()
    if isinstance(factory, str):
        return (*((weights,) if isinstance(weights, str) else ()), "--factory", factory)
    return (path, *read, *(("--weights", weights) if isinstance(weights, str) else ()))


def _in_python(report: Report, max_depth: int | None) -> str | None:
    """Return the call of Python to make next where a command has not what it takes."""
    asked, live = report.settings, _live(report)
    if not live and asked.get("data") != ARRAYS:
        return None
    given = {name: asked.get(name) for name in ("input_range", "layer", "exceed")}
    if isinstance(given["input_range"], list):
        given["input_range"] = tuple(given["input_range"])
    words = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if (data := asked.get("data")) is not None:
        words.insert(0, "data=data" if data == ARRAYS else f"data={data!r}")
    if max_depth is not None:
        words.append(f"max_depth={max_depth}")
    if live:
        model = "module"
    else:
        model = f"{report.model.path!r}, {PurePath(report.model.path).stem + '.truncated.onnx'!r}"
    arguments = ", ".join([model, f"eps={numbers.epsilon(report.depth.eps)}", *words])
    return f"rnnaudit.truncate({arguments})"


def carried(report: Report) -> tuple[str, ...]:
    """Return the options of this run that the next one needs to see the same."""
    data, layer = report.settings.get("data"), report.settings.get("layer")
    bounds, exceed = report.settings.get("input_range"), report.settings.get("exceed")
    options: list[str] = []
    if isinstance(data, str):
        options += ("--data", data)
    for name in ("time_axis", "batch_axis"):
        if isinstance(axis := report.settings.get(name), int):
            options += (f"--{name.replace('_', '-')}", str(axis))
    if isinstance(bounds, str):
        options += ("--input-range", bounds)
    if isinstance(bounds, (list, tuple)):
        options += ("--input-range", ":".join(f"{end!r}" for end in bounds))
    if isinstance(layer, str):
        options += ("--layer", layer)
    if isinstance(exceed, float):
        options += ("--exceed", numbers.epsilon(exceed))
    return tuple(options)


class Group(NamedTuple):
    """Findings that say the same of several places."""

    finding: Finding
    places: tuple[str, ...]


def grouped(findings: Sequence[Finding]) -> tuple[Group, ...]:
    """Gather equal findings, errors first, else in the order of the report."""
    groups: dict[tuple[str, str, str, str], list[Finding]] = {}
    for finding in findings:
        key = (finding.severity, finding.id, finding.message, finding.help)
        groups.setdefault(key, []).append(finding)
    order = ("error", "warning", "note")
    return tuple(
        Group(same[0], tuple(f.where for f in same if f.where))
        for same in sorted(groups.values(), key=lambda same: order.index(same[0].severity))
    )


def replayed(replay: Replay) -> Settled:
    """Say whether a witness refutes again what it refuted, where, and by how much."""
    eps, k = f"ε = {numbers.epsilon(replay.eps)}", replay.depths[-1]
    gap = numbers.down(replay.replayed[-1])
    where = (
        f"with every recurrence cut to {k} inputs"
        if replay.both_ways
        else f"after {k} shared inputs"
    )
    still = "" if replay.both_ways else " still"
    if replay.passed:
        return Settled(
            "REPLAYS",
            f" in {numbers.clean(replay.runtime)}: {where} the outputs{still} "
            f"differ by {gap}, more than {eps}, so that no depth up to {k} holds",
        )
    less = replay.refuted_below
    eps += f" and what rounding adds, {numbers.up(replay.rounding, 1)}" if replay.rounding else ""
    only = "it refutes no depth" if less is None else f"it refutes k < {less} only"
    return Settled(
        "FAILS",
        f" in {numbers.clean(replay.runtime)}: {where} the outputs differ by "
        f"{numbers.up(replay.replayed[-1])}, no more than {eps}; {only}",
    )


def judgement(equivalence: Equivalence) -> Settled:
    """Say whether two models agree, and by how much."""
    eps = f"ε = {numbers.epsilon(equivalence.eps)}"
    word = "PASS" if equivalence.passed else "FAIL"
    if equivalence.max_abs_error is None:
        reason = numbers.clean(equivalence.reason) or "nothing was compared"
        return Settled(word, f" against {eps}: {reason}")
    error = numbers.up(equivalence.max_abs_error)
    verb = "is within" if equivalence.passed else "exceeds"
    tried = numbers.counted(equivalence.inputs_tried, "input")
    reason = f"; {numbers.clean(equivalence.reason)}" if equivalence.reason else ""
    known = equivalence.known_error
    joined = "but" if equivalence.passed else "and"
    beyond = "" if known is None else f", {joined} {numbers.near(known)} on a known one (RA305)"
    return Settled(word, f": the largest error {error} {verb} {eps} on {tried}{beyond}{reason}")


def state(outcome: Outcome) -> str:
    """Say in one word how a file fared: ``pass``, ``fail``, or ``error`` where none could say."""
    if isinstance(outcome, Refusal):
        return "error"
    failed = outcome.gate is not None and not outcome.gate.passed
    judged = outcome.equivalence
    return "fail" if failed or (judged is not None and not judged.passed) else "pass"


def gathered(outcomes: Sequence[Outcome]) -> Settled:
    """Say how many files pass, fail, and could not be audited."""
    states = [state(outcome) for outcome in outcomes]
    total = numbers.counted(len(states), "model")
    if states.count("pass") == len(states):
        return Settled("PASS", f": {total} {'passes' if len(states) == 1 else 'pass'}")
    told = [
        f"{states.count(name)} {verb}"
        for name, verb in (
            ("pass", "passed"),
            ("fail", "failed"),
            ("error", "could not be audited"),
        )
        if name in states
    ]
    return Settled("FAIL", f": of {total}, {', '.join(told)}")
