"""The public API: load a model, audit it, truncate it, verify that two models agree."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from rnnaudit import loaders, runtime
from rnnaudit.data import Data, load_data
from rnnaudit.depth import Norm, curve, drift, warnings
from rnnaudit.errors import UnsupportedModelError, UsageError
from rnnaudit.examine import Examination, Examined, ExaminedStack, Settings, examine
from rnnaudit.findings import finding
from rnnaudit.model import Model
from rnnaudit.observe import observe
from rnnaudit.planning import MARGIN, Wanted, chosen, left_out, plans
from rnnaudit.results import (
    EPSILONS,
    Depth,
    Equivalence,
    Export,
    Finding,
    ModelInfo,
    RecurrenceReport,
    Report,
    Skipped,
    Verdict,
)
from rnnaudit.runtime import Interface
from rnnaudit.truncation import Plan
from rnnaudit.verification import verify as compare
from rnnaudit.verification.inputs import Box, probe_feeds
from rnnaudit.verification.slots import of_graph, of_port
from rnnaudit.versions import versions

if TYPE_CHECKING:
    import onnx_ir as ir

Progress = Callable[[str, float], None]
Source = Model | str | Path

OF_MEASUREMENTS = frozenset({"RA202", "RA203", "RA204", "RA205", "RA206", "RA208", "RA211"})
"""Findings that weaken what is measured, and say nothing of what is proved."""

TIMED_STEPS = 256
TRIES = 5
"""How many plans are written and verified before a truncation is given up."""


def load(path: str | Path) -> Model:
    """Read a PyTorch state_dict or an ONNX model; nothing in the file is executed.

    Raises:
        LoadError: The file is missing, damaged, or of a kind that is not read.
        UnsupportedModelError: It was read, and holds no recurrence that can be audited.
    """
    return loaders.load(path)


def audit(
    model: Source,
    *,
    eps: float = 1e-3,
    norm: Norm = "max",
    data: Data | str | None = None,
    input_range: tuple[float, float] | None = None,
    layer: str | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    time_budget: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Say how far back each recurrence of a model remembers, and on what evidence.

    Args:
        model: A loaded model, or the path of one.
        eps: Wanted accuracy ε of the output, in ``norm``.
        norm: ``max`` (per output unit) or ``2`` over the output's units.
        data: Sequences to measure on, or where to read them; synthetic ones without.
        input_range: Bounds of every input feature that proofs assume; without, the data's
            box, or |x| ≤ 1.
        layer: Audit only recurrences whose label contains this.
        seed: Of everything that is random.
        confidence: Of the statements about unseen sequences.
        time_budget: Seconds for proofs and measurements; what it cuts short is labelled.
        progress: Called with what is being done and the share that is done.

    Raises:
        UsageError: An argument makes no sense.
        LoadError: The model or the data cannot be read.
    """
    settings = _settings(
        eps=eps,
        norm=norm,
        confidence=confidence,
        seed=seed,
        time_budget=time_budget,
        input_range=input_range,
    )
    model, data = _only(_model(model), layer), _data(data)
    seen = observe(model, data, seed=seed, input_range=input_range)
    found = examine(model, seen, data, settings, progress=progress)
    return _report(model, found, data, layer)


def truncate(
    model: Source,
    output: str | Path,
    *,
    eps: float = 1e-3,
    depth: int | None = None,
    evidence: Literal["proved", "measured"] | None = None,
    max_depth: int = 512,
    data: Data | str | None = None,
    input_range: tuple[float, float] | None = None,
    layer: str | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    time_budget: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write the feed-forward ONNX model that replaces the recurrence, and verify it.

    The depth rests on the strongest evidence that gives one within ``max_depth``: a proof,
    your data, synthetic inputs. A measured depth is taken at ε/2, so that inputs a little
    worse than those measured still keep ε; where verification on fresh inputs fails all
    the same, it is raised and verified again. A model that fails is written only where
    ``depth`` was given.

    Args:
        model: A loaded model, or the path of one.
        output: Where the ONNX model goes; written whole or not at all.
        eps: Accuracy ε that the output keeps.
        depth: Cut every recurrence to this depth, whatever the evidence.
        evidence: ``proved`` refuses anything weaker; ``measured`` passes proofs over.
        max_depth: Largest depth that is taken.
        data: As in `audit`; verification runs on them too.
        input_range: As in `audit`.
        layer: Cut only layers with a recurrence whose label contains this.
        seed: As in `audit`.
        confidence: As in `audit`.
        time_budget: As in `audit`.
        progress: As in `audit`.

    Returns:
        The audit's report with ``export`` and ``equivalence``.

    Raises:
        UsageError: An argument makes no sense.
        LoadError: The model or the data cannot be read.
        UnsupportedModelError: No depth has the evidence asked for, or the model holds
            something that cannot be truncated.
    """
    from rnnaudit import export

    settings = _settings(
        eps=eps,
        norm="max",
        confidence=confidence,
        seed=seed,
        time_budget=time_budget,
        input_range=input_range,
    )
    _check_depths(depth, max_depth)
    model, data = _only(_model(model), layer), _data(data)
    seen = observe(model, data, seed=seed, input_range=input_range)
    found = examine(model, seen, data, settings, progress=progress)
    kept: tuple[Skipped, ...] = ()
    wanted = Wanted(eps, max_depth, evidence, layer or "")
    if depth is not None:
        candidates: Iterator[Plan] = iter([chosen(found, depth, wanted)])
    else:
        candidates, kept = plans(found, wanted)
    with tempfile.TemporaryDirectory(prefix="rnnaudit-") as folder:
        trial = Path(folder) / "candidate.onnx"
        plan, graph, judged = _tried(
            model,
            candidates=candidates,
            settings=settings,
            data=data,
            trial=trial,
            box=_box(found),
            progress=progress,
        )
        written = None
        if judged.passed or depth is not None:
            export.write(graph, output)
            written = _export(model, plan, graph, trial=trial, output=Path(output), seed=seed)
    report = _report(model, found, data, layer)
    return replace(
        report,
        skipped=(*report.skipped, *kept),
        findings=(*_bearing(report.findings, plan), *_about(plan, judged)),
        equivalence=judged,
        export=written,
    )


def verify(
    original: Source,
    candidate: str | Path,
    *,
    eps: float = 1e-3,
    data: Data | str | None = None,
    seed: int = 0,
    time_budget: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run two models on the same inputs and judge their largest difference against ε.

    Args:
        original: A loaded model, or the path of one.
        candidate: An ONNX file; it runs in ONNX Runtime.
        eps: Largest error that passes, per output unit.
        data: Sequences to run beside the synthetic inputs.
        seed: Of the synthetic inputs.
        time_budget: Seconds for the runs.
        progress: Called with what is being done and the share that is done.

    Raises:
        UsageError: An argument makes no sense.
        LoadError: A file cannot be read.
    """
    model = _model(original)
    settings = _settings(
        eps=eps, norm="max", confidence=0.95, seed=seed, time_budget=time_budget, input_range=None
    )
    data = _data(data)
    if progress is not None:
        progress("running both models", 0.0)
    judged = compare(model, candidate, eps=eps, data=data, seed=seed, time_budget=time_budget)
    return Report(
        model=_info(model),
        settings={**_record(settings, data, None), "candidate": str(candidate)},
        verdict="undecided",
        recurrences=(),
        eps=eps,
        norm="max",
        depth=Depth(eps),
        table=(),
        scope="end to end",
        domain="",
        data="",
        tool=versions(),
        findings=_failures(judged),
        equivalence=judged,
    )


def _tried(
    model: Model,
    *,
    candidates: Iterator[Plan],
    settings: Settings,
    data: Data | None,
    trial: Path,
    box: Box,
    progress: Progress | None,
) -> tuple[Plan, ir.Model, Equivalence]:
    """Write and verify plans until one passes; the last one where none does."""
    from rnnaudit import export

    for number, plan in enumerate(islice(candidates, TRIES)):
        if progress is not None:
            progress("verifying" if number == 0 else "verifying a deeper truncation", 0.0)
        graph = export.truncate_graph(model, plan.depths, metadata=plan.metadata(settings.eps))
        export.write(graph, trial)
        judged = compare(
            model,
            trial,
            eps=settings.eps,
            depths=plan.depths,
            data=data,
            # Fresh inputs: the depth was chosen on those of the audit's own seed.
            seed=settings.seed + 1 + number,
            time_budget=settings.time_budget,
            box=box if plan.evidence == "proved" else None,
        )
        if judged.passed:
            break
    return plan, graph, judged


def _box(found: Examination) -> Box:
    """Return the box of the first stack's inputs that proofs cover."""
    low, high = found.domains[0].box(found.stacks[0].stack.input_size)
    return low.numpy(), high.numpy()


def _report(model: Model, found: Examination, data: Data | None, layer: str | None) -> Report:
    """Write down what was found."""
    settings = found.settings
    recurrences = tuple(
        _recurrence(found, each)
        for label, each in found.recurrences.items()
        if layer is None or layer in label
    )
    return Report(
        model=_info(model),
        settings=_record(settings, data, layer),
        verdict=_overall([r.verdict for r in recurrences], model.skipped),
        recurrences=recurrences,
        eps=settings.eps,
        norm=settings.norm,
        depth=found.depth(settings.eps),
        table=tuple(found.depth(eps) for eps in EPSILONS),
        scope="end to end" if model.whole else "each stack's own output",
        domain=found.domain,
        data=found.seen.description,
        tool=versions(),
        skipped=model.skipped,
        findings=(*model.findings, *found.seen.findings, *_remarks(found)),
    )


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
        verdict="stable" if best is not None and best.bound.value < 1 else "undecided",
        cell_options=cell.options,
        upper=None if best is None else best.bound,
        no_proof=each.certificates.no_proof,
        lower=each.lower,
        norms=each.norms,
        lyapunov=each.lyapunov,
        depths=tuple(each.depth(eps, settings) for eps in settings.epsilons),
        curve=curve(each.study),
        spectral_norm=each.spectral_norm,
        initial_state=recurrence.initial.describe(),
    )


def _overall(verdicts: Sequence[Verdict], skipped: Sequence[Skipped]) -> Verdict:
    """Join verdicts: one that is unstable decides, and a part not audited leaves all open."""
    if "unstable" in verdicts:
        return "unstable"
    all_stable = bool(verdicts) and all(v == "stable" for v in verdicts)
    return "stable" if all_stable and not skipped else "undecided"


def _remarks(found: Examination) -> tuple[Finding, ...]:
    """Say what a reader must know of the measurements."""
    eps = found.settings.eps
    remarks = []
    if all(found.seen.synthetic):
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
            remarks += warnings(each.study, measured, eps, label)
        drifting = drift(each.recurrence, found.seen.recurrences[label][-1], label)
        remarks += [drifting] if drifting is not None else []
    return tuple(remarks)


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
        return f"k({eps:g}) is {beyond}"
    return f"k({eps:g}) is {', '.join(short)} inputs, {beyond}"


def _about(plan: Plan, judged: Equivalence) -> tuple[Finding, ...]:
    """Say on what a truncation rests, and whether it holds."""
    weak = [t for t in plan.truncations if t.evidence != "proved"]
    remarks = []
    if weak:
        kinds = {"synthetic": "synthetic inputs", "measured": "the data", "chosen": "your choice"}
        sources = " and ".join(dict.fromkeys(kinds[t.evidence] for t in weak))
        remarks.append(
            finding(
                "RA301",
                weak[0].recurrence if len(weak) == 1 else "depths",
                f"the depth rests on {sources}, not on a proof",
            )
        )
    return (*remarks, *_failures(judged))


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
            f"the largest error is {judged.required_eps:g}, more than ε = {judged.eps:g}",
        ),
    )


def _export(
    model: Model, plan: Plan, graph: ir.Model, *, trial: Path, output: Path, seed: int
) -> Export:
    """Describe the written model, and time it against the original."""
    from rnnaudit import export

    after = runtime.describe(trial)
    before: Path | bytes | None = model.path
    if model.graph is None:
        try:
            before = export.serialize(export.assemble(model.stacks, {}, dtype=model.dtype))
        except UnsupportedModelError:
            before = None  # no ONNX operator has this cell
    shape, feed = _timing_feed(model, after, seed)
    times: list[float | None] = [None, None]
    if before is not None:
        extra = _timing_feed(model, runtime.describe(before), seed)[1]
        times = runtime.latency([before, trial], [extra, feed])
    size = (
        None
        if before is None
        else len(before)
        if isinstance(before, bytes)
        else before.stat().st_size
    )
    starts = dict.fromkeys(
        r.initial.describe() for r in model.recurrences() if r.label in plan.depths
    )
    return Export(
        path=str(output),
        form="window",
        truncations=plan.truncations,
        opset=graph.opset_imports[""],
        bytes_before=size,
        bytes_after=trial.stat().st_size,
        milliseconds_before=times[0],
        milliseconds_after=times[1],
        latency_shape=shape,
        inputs=tuple((p.name, p.shape or (), p.dtype) for p in after.inputs),
        outputs=tuple(p.name for p in after.outputs),
        initial_state="; ".join(starts),
    )


def _timing_feed(
    model: Model, interface: Interface, seed: int
) -> tuple[str, Mapping[str, NDArray[np.generic]]]:
    """Make one input of 256 steps, or of what the graph fixes, and name its size."""
    slots = (
        of_graph(model, interface)
        if model.graph is not None
        else tuple(of_port(port, ("time", "batch", None)) for port in interface.inputs)
    )
    feed = probe_feeds(slots, 1, TIMED_STEPS, seed)[0]
    return f"batch {feed.tried.batch}, {feed.tried.length} steps", feed.values


# ----------------------------------------------------------------------------- arguments


def _model(source: Source) -> Model:
    return source if isinstance(source, Model) else load(source)


def _data(source: Data | str | None) -> Data | None:
    return load_data(source) if isinstance(source, str) else source


def _only(model: Model, layer: str | None) -> Model:
    """Keep the stacks that hold a recurrence whose label contains ``layer``."""
    if layer is None:
        return model
    stacks = tuple(s for s in model.stacks if any(layer in r.label for r in s.recurrences()))
    if not stacks:
        names = ", ".join(r.label for r in islice(model.recurrences(), 8))
        raise UsageError(f"--layer must be part of one of {names}, got {layer!r}")
    return replace(model, stacks=stacks)


def _settings(
    *,
    eps: float,
    norm: Norm,
    confidence: float,
    seed: int,
    time_budget: float | None,
    input_range: tuple[float, float] | None,
) -> Settings:
    if not (eps > 0 and math.isfinite(eps)):
        raise UsageError(f"ε must be a positive finite number, got {eps}", help="for example 1e-3")
    if norm not in ("max", "2"):
        raise UsageError(f"the norm must be max or 2, got {norm!r}")
    if not 0 < confidence < 1:
        raise UsageError(f"the confidence must be between 0 and 1, got {confidence}")
    if time_budget is not None and not (time_budget > 0 and math.isfinite(time_budget)):
        raise UsageError(f"the time budget must be a positive number of seconds, got {time_budget}")
    epsilons = tuple(sorted({*EPSILONS, eps}, reverse=True))
    return Settings(eps, norm, epsilons, confidence, seed, time_budget, input_range)


def _check_depths(depth: int | None, max_depth: int) -> None:
    for name, value in (("depth", depth), ("max-depth", max_depth)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}")


def _info(model: Model) -> ModelInfo:
    return ModelInfo(str(model.path), model.format, model.sha256)


def _record(settings: Settings, data: Data | None, layer: str | None) -> dict[str, object]:
    return {
        "eps": settings.eps,
        "seed": settings.seed,
        "data": None if data is None else data.source,
        "input_range": None if settings.input_range is None else list(settings.input_range),
        "layer": layer,
        "confidence": settings.confidence,
        "time_budget": settings.time_budget,
    }
