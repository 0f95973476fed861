"""A report is put together: what was examined, planned and judged, as records of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rnnaudit.data import Data
from rnnaudit.estimators import Obstacles, Refutation, longest
from rnnaudit.evidence import caveats, curve, cut_study, drift, in_the_way
from rnnaudit.examine import Examination, Examined, ExaminedStack, Settings
from rnnaudit.findings import finding
from rnnaudit.model import Model
from rnnaudit.planning import MARGIN, left_out
from rnnaudit.reports.numbers import epsilon, near, up
from rnnaudit.reports.wording import END_TO_END, noise
from rnnaudit.results import (
    BY_CHOICE,
    EPSILONS,
    Attempt,
    Depth,
    Equivalence,
    Export,
    Finding,
    ModelInfo,
    RecurrenceReport,
    Replay,
    Report,
    Skipped,
    Verdict,
)
from rnnaudit.truncation import ALIKE, Form, Plan
from rnnaudit.versions import versions

SUMMARIES = frozenset({"summary", "states", "every method"})
"""Reasons for which no method of proof stands; they are told as the reason for none."""

OVERFLOWS = 1e200
"""A norm after which the next, of twice as many steps, may be beyond float64."""

OF_MEASUREMENTS = frozenset(
    {"RA202", "RA203", "RA204", "RA205", "RA206", "RA208", "RA211", "RA214", "RA216"}
)
"""Findings that weaken what is measured, and say nothing of what is proved."""


def of_audit(
    found: Examination, *, data: Data | None, layer: str | None, witness: str | None = None
) -> Report:
    """Write down what was examined: the recurrences whose label contains ``layer``, or all."""
    model, settings = found.model, found.settings
    chosen = [label for label in found.recurrences if layer is None or layer in label]
    recurrences = tuple(_recurrence(found, found.recurrences[label]) for label in chosen)
    verdicts = [r.verdict for r in recurrences]
    # A depth beyond the search's horizon is refuted there, but proved is proved.
    if layer is None and any(_refuted(found, stack) for stack in found.stacks):
        verdicts.append("unstable")
    skipped = (
        *model.skipped,
        *(Skipped(label, BY_CHOICE) for label in found.recurrences if label not in chosen),
    )
    return Report(
        model=_info(model),
        settings={**_record(settings, data, layer), "witness": witness},
        verdict=_overall(verdicts, skipped),
        recurrences=recurrences,
        eps=settings.eps,
        norm=settings.norm,
        depth=found.depth(settings.eps),
        table=tuple(found.depth(eps) for eps in EPSILONS),
        scope=END_TO_END if model.whole else "each stack's own output",
        domain=found.domain,
        data=found.seen.description,
        tool=versions(),
        skipped=skipped,
        findings=(*model.findings, *found.seen.findings, *_remarks(found, data)),
    )


def of_truncation(
    found: Examination,
    audited: Report,
    plan: Plan,
    *,
    kept: Sequence[Skipped],
    judged: Equivalence,
    written: Export | None,
    aside: Sequence[int] = (),
    forms: Iterable[Form] = (),
) -> Report:
    """Add to the report ``audited`` what was cut, what stays as it is, and whether it holds.

    ``aside`` are places in the data of sequences that the depth does not have to serve,
    ``forms`` those in which the layers of a graph were written.
    """
    return replace(
        audited,
        skipped=(*audited.skipped, *kept),
        findings=(
            *_bearing(audited.findings, plan),
            *_against(found, plan, judged, audited.scope),
            *_unserved(aside, audited.eps),
            *_about(plan, judged),
            *_slower(forms),
        ),
        equivalence=judged,
        export=written,
    )


def of_comparison(
    original: Model,
    candidate: str | Path,
    judged: Equivalence,
    settings: Settings,
    *,
    data: Data | None,
    findings: tuple[Finding, ...] = (),
) -> Report:
    """Write down how two models compare; no recurrence was audited."""
    return Report(
        model=_info(original),
        settings={**_record(settings, data, None), "candidate": str(candidate)},
        verdict="undecided",
        recurrences=(),
        eps=settings.eps,
        norm=settings.norm,
        depth=Depth(settings.eps),
        table=(),
        scope=END_TO_END,
        domain="",
        data="",
        tool=versions(),
        findings=(*_known(judged), *_failures(judged), *findings),
        equivalence=judged,
    )


def of_replay(model: Model, replayed: Replay, path: str) -> Report:
    """Write down what a witness shows when it runs again; nothing else was audited."""
    remarks: tuple[Finding, ...] = ()
    if not replayed.same_weights:
        remarks = (
            finding("RA238", replayed.where, "the witness was found in weights that differ"),
        )
    return Report(
        model=_info(model),
        settings={"eps": replayed.eps, "seed": 0, "witness": path},
        verdict="undecided",
        recurrences=(),
        eps=replayed.eps,
        norm=replayed.norm,
        depth=Depth(replayed.eps),
        table=(),
        scope=replayed.where,
        domain=replayed.domain,
        data="",
        tool=versions(),
        findings=remarks,
        replay=replayed,
    )


def _info(model: Model) -> ModelInfo:
    return ModelInfo(str(model.path), model.format, model.sha256)


def _record(settings: Settings, data: Data | None, layer: str | None) -> dict[str, object]:
    bounds = settings.input_range
    return {
        "eps": settings.eps,
        "seed": settings.seed,
        "data": None if data is None else data.source,
        "input_range": list(bounds) if isinstance(bounds, tuple) else bounds,
        "layer": layer,
        "confidence": settings.confidence,
        "exceed": settings.exceed,
        "time_budget": settings.time_budget,
    }


def _recurrence(found: Examination, each: Examined) -> RecurrenceReport:
    """Write down one recurrence."""
    recurrence, cell, settings = each.recurrence, each.recurrence.cell, found.settings
    best = each.certificates.best
    return RecurrenceReport(
        name=recurrence.name,
        cell=cell.kind,
        input_size=cell.input_size,
        hidden_size=cell.hidden_size,
        direction=recurrence.direction,
        layer=recurrence.layer,
        verdict=_verdict(each, settings.eps),
        cell_options=cell.options,
        upper=None if best is None else best.bound,
        no_proof=each.certificates.no_proof,
        others=_others(each, settings),
        lower=each.lower,
        norms=each.norms,
        lyapunov=each.spectrum.largest,
        depths=tuple(each.depth(eps, settings) for eps in settings.epsilons),
        curve=curve(each.study),
        spectral_norm=each.spectral_norm,
        initial_state=recurrence.initial.describe(),
        spectrum=each.spectrum,
        unit_memory=each.unit_memory(settings.eps),
        pictures=each.pictures,
    )


def _others(each: Examined, settings: Settings) -> tuple[Attempt, ...]:
    """List the methods beside the best one: what they prove, and which prove nothing."""
    proofs = each.certificates
    proved = [
        Attempt(c.method, c.bound.value, c.bound.norm, c.depth(settings.eps, norm=settings.norm))
        for c in proofs.certificates[1:]
    ]
    failed = [
        Attempt(method, None, "", None, reason)
        for method, reason in proofs.failures
        if method not in SUMMARIES
    ]
    return (*proved, *failed)


def _verdict(each: Examined, eps: float) -> Verdict:
    """Judge one recurrence: proved, refuted up to the horizon of the search, or neither."""
    best = each.certificates.best
    if best is not None and best.bound.value < 1:
        return "stable"
    return "unstable" if _never_forgets(each.refutation, eps) else "undecided"


def _refuted(found: Examination, stack: ExaminedStack) -> bool:
    """Whether a stack's output is refuted up to the horizon, and nothing proves it stable.

    Layers that contract, each on what it reads, contract together: what is refuted up to the
    horizon then has a long memory, and an end to it.
    """
    eps = found.settings.eps
    parts = [found.recurrences[r.label] for r in stack.stack.recurrences()]
    proved = all(_verdict(part, eps) == "stable" for part in parts)
    proved = proved or stack.depth(eps, found.settings).proved is not None
    return not proved and _never_forgets(stack.refutation, eps)


def _never_forgets(refutation: Refutation | None, eps: float) -> bool:
    return refutation is not None and refutation.never_forgets(eps)


def _overall(verdicts: Sequence[Verdict], skipped: Sequence[Skipped]) -> Verdict:
    """Join verdicts: one that is unstable decides, and a part not audited leaves all open."""
    if "unstable" in verdicts:
        return "unstable"
    all_stable = bool(verdicts) and all(v == "stable" for v in verdicts)
    return "stable" if all_stable and not skipped else "undecided"


def _remarks(found: Examination, data: Data | None) -> tuple[Finding, ...]:
    """Say what a reader must know of the measurements."""
    eps = found.settings.eps
    remarks = []
    if data is None and all(found.seen.synthetic):
        remarks.append(
            finding(
                "RA205",
                "inputs",
                "no --data: every measured number is of synthetic inputs",
            )
        )
    remarks += [
        finding("RA211", stack.stack.name, _by_kind(stack, eps))
        for stack in found.stacks
        if left_out(found, stack, eps / MARGIN)
    ]
    for each in found.recurrences.values():
        label = each.recurrence.label
        measured = each.depth(eps, found.settings).measured
        if measured is not None:
            remarks += caveats(each.study, measured, eps, label, found.settings.exceed)
        drifting = drift(each.recurrence, found.seen.recurrences[label][-1], label)
        remarks += [drifting] if drifting is not None and not each.study.whole else []
        if each.obstacles is not None:
            below = each.recurrence.layer > 0
            remarks += in_the_way(each.obstacles, label, below=below, steps=each.steps)
        remarks += _cut(each.refutation, each.obstacles, label, proofs=each.certificates.cut)
        remarks += _cut_norms(found, each)
    for stack in found.stacks:
        whole = stack.depth(eps, found.settings)
        if whole.below_noise:
            moved = f"k({epsilon(eps)}) is of exact arithmetic: {noise(whole)}"
            remarks.append(finding("RA215", stack.stack.name, moved))
        if not stack.study.complete:
            remarks.append(cut_study(stack.study, stack.stack.name))
        if len(list(stack.stack.recurrences())) > 1 or stack.stack.readout is not None:
            remarks += _cut(stack.refutation, None, stack.stack.name)
    return tuple(remarks)


def _cut_norms(found: Examination, each: Examined) -> tuple[Finding, ...]:
    """Say where the time budget ended the curve of norms: it did not overflow."""
    curve, label = each.norms, each.recurrence.label
    most = longest(found.seen.recurrences[label][-1].shape[1])
    if found.settings.time_budget is None or curve is None or not curve.r:
        return ()
    if curve.r[-1] == most or curve.value[-1] > OVERFLOWS:
        return ()
    ended = f"the time budget ended the search for norms after r = {curve.r[-1]} of {most}"
    return (finding("RA216", label, ended),)


def _cut(
    refutation: Refutation | None,
    obstacles: Obstacles | None,
    where: str,
    *,
    proofs: bool = False,
) -> tuple[Finding, ...]:
    """Say which searches the time budget ended early."""
    what = (
        ("proofs", proofs),
        ("counterexamples", refutation is not None and refutation.cut),
        ("fixed points, cycles and divergence", obstacles is not None and obstacles.cut),
    )
    return tuple(
        finding("RA216", where, f"the time budget ended the search for {name}")
        for name, cut in what
        if cut
    )


def _bearing(findings: Sequence[Finding], plan: Plan) -> tuple[Finding, ...]:
    """Leave out what weakens measurements where the depth rests on a proof."""
    if plan.evidence != "proved":
        return tuple(findings)
    return tuple(f for f in findings if f.id not in OF_MEASUREMENTS)


def _by_kind(stack: ExaminedStack, eps: float) -> str:
    """Say which kinds of synthetic inputs are forgotten, and within how many steps."""
    needed: dict[str, list[int | None]] = {}
    for kind, k in zip(stack.kinds, stack.study.needed(eps), strict=False):
        needed.setdefault(kind, []).append(k)
    known = {kind: [k for k in ks if k is not None] for kind, ks in needed.items()}
    short = [f"{max(known[k])} on {k}" for k, ks in needed.items() if len(known[k]) == len(ks)]
    long = [kind for kind, ks in needed.items() if len(known[kind]) < len(ks)]
    beyond = f"longer than the sequences show on {', '.join(long)} inputs"
    if not short:
        return f"k({epsilon(eps)}) is {beyond}"
    return f"k({epsilon(eps)}) is {', '.join(short)} inputs, {beyond}"


def _against(
    found: Examination, plan: Plan, judged: Equivalence, scope: str
) -> tuple[Finding, ...]:
    """Say that an input is known which the plan's depth gets wrong, whatever was measured."""
    below, deepest = max(_refuted_by(found, plan), default=(0, 0))
    needs = f"an input in the domain is known that needs k ≥ {below}" if below else ""
    if judged.known_error is not None:
        return _known(judged, needs)
    if not needs or scope == END_TO_END:
        return ()
    own = f"{needs} for a recurrence's own output, and the depth is {deepest}"
    return (finding("RA305", "worst case", own),)


def _refuted_by(found: Examination, plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield what the searches say a stack needs, and how deep the plan cuts it, if not as deep."""
    for each in found.stacks:
        depths = [plan.depths[n.label] for n in each.stack.recurrences() if n.label in plan.depths]
        refuted = each.refutation and each.refutation.refuted_below(found.settings.eps)
        if depths and refuted and refuted > max(depths):
            yield refuted, max(depths)


def _known(judged: Equivalence, needs: str = "") -> tuple[Finding, ...]:
    """Say how far the candidate errs on an input that a search found, and how it can pass."""
    if judged.known_error is None:
        return ()
    where = f"{needs}: on it" if needs else "on an input that a search found"
    both = "; those that were compared are others, and pass" if judged.passed else ""
    error = f"{where} the written model errs by {near(judged.known_error)}{both}"
    return (finding("RA305", "worst case", error),)


def _unserved(aside: Sequence[int], eps: float) -> tuple[Finding, ...]:
    """Name the sequences of the data that the depth was not chosen for."""
    if not aside:
        return ()
    named = ", ".join(map(str, aside[:8])) + (" …" if len(aside) > 8 else "")
    return (
        finding(
            "RA306",
            "data",
            f"sequences set aside by --exceed: {named} ({len(aside)}); on them the written model "
            f"may err by more than {epsilon(eps)}, and it was not verified on them",
        ),
    )


def _about(plan: Plan, judged: Equivalence) -> tuple[Finding, ...]:
    """Say on what a truncation rests, and whether it holds."""
    weak = [t for t in plan.truncations if t.evidence != "proved"]
    remarks = []
    if weak:
        kinds = {"synthetic": "synthetic inputs", "measured": "the data", "chosen": "your choice"}
        sources = " and ".join(dict.fromkeys(kinds[t.evidence] for t in weak))
        rests = finding(
            "RA301",
            weak[0].recurrence if len(weak) == 1 else "depths",
            f"the depth rests on {sources}, not on a proof",
        )
        if any(t.evidence == "chosen" for t in weak):
            rests = replace(
                rests, help="without --depth it rests on the strongest evidence there is"
            )
        remarks.append(rests)
    return (*remarks, *_failures(judged))


def _slower(forms: Iterable[Form]) -> tuple[Finding, ...]:
    """Say that the recurrences of a graph take less time than what replaces them, by estimate."""
    known = [(f.cost, f.operator) for f in forms if f.cost is not None and f.operator is not None]
    took, before = sum(cost for cost, _ in known), sum(operator for _, operator in known)
    if took <= ALIKE * before:
        return ()
    return (
        finding(
            "RA307",
            "speed",
            "the recurrence is the faster choice here: the truncated model takes an estimated "
            f"{near(took / before, 2)}× its time",
        ),
    )


def _failures(judged: Equivalence) -> tuple[Finding, ...]:
    """Say that two models differ, or that they could not be compared."""
    if judged.passed:
        return ()
    if judged.required_eps is None:
        return (finding("RA304", "comparison", judged.reason or "nothing was compared"),)
    return (
        finding(
            "RA303",
            "comparison",
            f"the largest error is {up(judged.required_eps)}, more than ε = {epsilon(judged.eps)}",
        ),
    )
