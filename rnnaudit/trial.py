"""A plan on trial: written, run beside the original on fresh inputs, described and timed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rnnaudit import runtime
from rnnaudit.cells import run_stack
from rnnaudit.data import Data
from rnnaudit.effects import apart
from rnnaudit.errors import UnsupportedModelError
from rnnaudit.estimators import Witness
from rnnaudit.examine import Examination, ExaminedStack, Progress
from rnnaudit.model import Model
from rnnaudit.planning import TRIES
from rnnaudit.reports.numbers import counted, up
from rnnaudit.results import Equivalence, Export, Skipped
from rnnaudit.runtime import Interface
from rnnaudit.truncation import Form, Plan, Shape
from rnnaudit.verification import verify
from rnnaudit.verification.calls import Manner, buffers
from rnnaudit.verification.inputs import Feed, data_feeds, probe_feeds
from rnnaudit.verification.judge import Tried
from rnnaudit.verification.originals import Cut, Graph
from rnnaudit.verification.slots import of_graph, of_port, read_as_it_is

if TYPE_CHECKING:
    import onnx_ir as ir

TIMED_STEPS = 256
"""Steps of the input that both models are timed on, where there are no data."""

LONGEST_TIMED = 8192
"""The same, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A plan, the graph that was written of it to ``file``, and how that compares."""

    plan: Plan
    forms: Mapping[str, Form]
    graph: ir.Model
    file: Path
    judged: Equivalence


def first_to_pass(
    found: Examination,
    candidates: Iterator[Plan],
    file: Path,
    *,
    shape: Shape,
    data: Data | None,
    progress: Progress | None,
) -> Trial:
    """Write and verify plans until one passes; return the last that was tried where none does.

    Args:
        found: What was examined: the model, and the box of inputs that proofs cover.
        candidates: At least one plan, in the order in which they deserve to be tried.
        file: Where each is written, over the one before.
        shape: The form that is wanted.
        data: The user's sequences.
        progress: Called with what is being done and the share that is done.
    """
    for number, plan in enumerate(islice(candidates, TRIES)):
        if progress is not None:
            progress("verifying" if number == 0 else "verifying a deeper truncation", 0.0)
        trial = _attempt(found, plan, file, shape, data)
        if trial.judged.passed:
            break
    return trial


def without_failures(
    found: Examination,
    failed: Trial,
    *,
    shape: Shape,
    data: Data | None,
    progress: Progress | None,
) -> tuple[Trial, tuple[Skipped, ...]]:
    """Leave layers out of a plan that fails, until the others pass: those that fail alone first.

    Where each passes alone, the one that errs most is left out, and so on. Arguments are
    those of `first_to_pass`.

    Returns:
        The trial that passes and what it leaves out; ``failed`` and nothing where none does.
    """
    depths = failed.plan.depths
    units = [
        unit
        for stack in found.model.stacks
        for layer in stack.layers
        if (unit := tuple(r.label for r in layer.recurrences if r.label in depths))
    ]
    if len(units) < 2 or shape.form == "last":  # the last form may be open to all layers only
        return failed, ()
    errors = {}
    for number, unit in enumerate(units):
        if progress is not None:
            progress("verifying each layer alone", number / len(units))
        judged = _attempt(found, _only(failed.plan, unit), failed.file, shape, data).judged
        errors[unit] = math.inf if judged.max_abs_error is None else judged.max_abs_error
    best_first = sorted(units, key=errors.__getitem__)
    eps = found.settings.eps
    most = min(len(units) - 1, sum(errors[unit] <= eps for unit in units))
    for count in range(most, 0, -1):
        labels = [label for unit in best_first[:count] for label in unit]
        if progress is not None:
            progress("verifying the layers that hold", 1 - count / len(units))
        trial = _attempt(found, _only(failed.plan, labels), failed.file, shape, data)
        if trial.judged.passed:
            lost = [unit for unit in units if unit in best_first[count:]]
            return trial, tuple(
                Skipped(
                    label,
                    f"cut alone to {depths[label]} steps, it moves the model's outputs by "
                    f"{up(errors[unit])} where both are compared",
                )
                for unit in lost
                for label in unit
            )
    return failed, ()


def _only(plan: Plan, labels: Sequence[str]) -> Plan:
    return Plan(tuple(t for t in plan.truncations if t.recurrence in labels))


def _attempt(found: Examination, plan: Plan, file: Path, shape: Shape, data: Data | None) -> Trial:
    """Write a plan and verify it."""
    from rnnaudit import export

    model, settings = found.model, found.settings
    forms = export.choose(model, plan.depths, shape, found.seen.lengths)
    graph = export.truncate_graph(
        model,
        plan.depths,
        forms,
        opset=shape.opset,
        guarded=shape.guard,
        metadata={**plan.metadata(settings.eps), **_proved_for(found, plan)},
    )
    export.write(graph, file)
    known = _known_error(found, plan, forms) if model.direct else _error_in_graph(found, plan, file)
    if known > settings.eps:
        graph.metadata_props["rnnaudit.known_error"] = repr(known)
        export.write(graph, file)
    judged = verify(
        model,
        file,
        eps=settings.eps,
        depths=plan.depths,
        data=data,
        # The same for every plan, so that a deeper one is held to what a shallower one failed.
        seed=settings.seed,
        time_budget=settings.time_budget,
    )
    return Trial(plan, forms, graph, file, judged)


def _proved_for(found: Examination, plan: Plan) -> Mapping[str, str]:
    """Return what the written model says of the inputs for which its depth is proved, if it is."""
    if plan.evidence != "proved":
        return {}
    low, high = found.domains[0].box(found.stacks[0].stack.input_size)
    return {"domain": json.dumps([low.tolist(), high.tolist()])}


def _known_error(found: Examination, plan: Plan, forms: Mapping[str, Form]) -> float:
    """Return how far the plan errs, in float64, on inputs that the searches found; 0 without any.

    Both orders of time are tried, as a witness tells the order in which it is read.
    """
    worst = 0.0
    for each in found.stacks:
        x = _counterexample(each, found.settings.eps)
        if x is None:
            continue
        blocks = {
            r.label: forms[layer.recurrences[0].label].block
            for layer in each.stack.layers
            for r in layer.recurrences
            if r.label in plan.depths
        }
        gap = run_stack(each.stack, x, plan.depths, blocks) - run_stack(each.stack, x)
        worst = max(worst, float(gap.abs().max()))
    return worst


def _counterexample(each: ExaminedStack, eps: float) -> Tensor | None:
    """Return the inputs [2, T, I] that the search found, in both orders of time; None without."""
    best = None if each.refutation is None else each.refutation.best(eps)
    if best is None:
        return None
    read = torch.cat([best.prefix, best.inputs]) if isinstance(best, Witness) else best.inputs
    return torch.stack([read, read.flip(0)])


def _error_in_graph(found: Examination, plan: Plan, file: Path) -> float:
    """Return how far a written graph errs on inputs that the searches found; 0 without any.

    Both graphs run on them in full, where a stack reads an input of the graph as it is: what
    stands behind the stack may amplify its errors, or make them vanish.
    """
    model, original, worst = found.model, None, 0.0
    for each in found.stacks:
        cut = any(r.label in plan.depths for r in each.stack.recurrences())
        x = _counterexample(each, found.settings.eps) if cut else None
        if x is None:
            continue
        original = original or Graph(model, runtime.describe(file), Cut({}, {}))
        slot = read_as_it_is(model, each.stack.layers[0], original.slots)
        if slot is None or slot.fixed("time") not in (None, x.shape[1]):
            continue
        given = Data({slot.name: tuple(x.numpy())}, "a counterexample")
        todo = data_feeds(original.slots, given, found.settings.seed)
        worst = max(worst, apart(original, file, todo, original.answer(todo)) or 0.0)
    return worst


def describe(trial: Trial, model: Model, output: Path, *, steps: int, seed: int) -> Export:
    """Describe the written model as it stands at ``output``, and time it against the original.

    Both run on ``steps`` steps, or on what the graph fixes.
    """
    from rnnaudit import export

    before, after = _original(model), runtime.describe(trial.file)
    manner = Manner.of(after)
    if manner.past:  # a call with one new step, behind full buffers
        steps = 1
    shape, feed = _timing_feed(model, manner.bare(after), steps, seed)
    if manner.past:
        full = {name: _longest(name, trial.plan) - 1 for name in manner.past}
        tried = Feed(Tried(shape, 1, 1), feed)
        feed = {**feed, **buffers(after.inputs, manner.past, tried, feed, full)}
    size: int | None = None
    times: list[float | None] = [None, None]
    if before is not None:
        size = len(before) if isinstance(before, bytes) else _size(before)
        _, first = _timing_feed(model, runtime.describe(before), steps, seed)
        times = runtime.latency([before, trial.file], [first, feed])
    cut = [r for r in model.recurrences() if r.label in trial.plan.depths]
    return Export(
        path=str(output),
        form=_each(trial.forms, Form.describe),
        truncations=trial.plan.truncations,
        opset=export.opset_of(trial.graph.graph),
        bytes_before=size,
        bytes_after=_size(trial.file),
        milliseconds_before=times[0],
        milliseconds_after=times[1],
        latency_shape=shape,
        inputs=tuple((p.name, p.shape or (), p.dtype) for p in after.inputs),
        outputs=tuple(p.name for p in after.outputs),
        initial_state="; ".join(dict.fromkeys(r.initial.describe() for r in cut)),
        form_reason=_each(trial.forms, lambda form: form.why),
    )


def _size(file: Path) -> int:
    """Return the bytes of an ONNX file and of the files beside it that hold its weights."""
    import onnx.external_data_helper

    proto = onnx.load(file, load_external_data=False)
    beside = {
        onnx.external_data_helper.ExternalDataInfo(tensor).location
        for tensor in proto.graph.initializer
        if onnx.external_data_helper.uses_external_data(tensor)
    }
    return sum(path.stat().st_size for path in (file, *(file.parent / name for name in beside)))


def _longest(buffer: str, plan: Plan) -> int:
    """Return the depth of the recurrence that a buffer belongs to, or the largest."""
    label = buffer.removeprefix("past_")
    return plan.depths.get(label, max(plan.depths.values()))


def _each(forms: Mapping[str, Form], say: Callable[[Form], str]) -> str:
    """Say something of every layer's form, once where it is the same of all."""
    said = {label: say(form) for label, form in forms.items()}
    if len(set(said.values())) <= 1:
        return next(iter(said.values()), "")
    return "; ".join(f"{label}: {text}" for label, text in said.items())


def _original(model: Model) -> Path | bytes | None:
    """Return the original as ONNX: the file itself, or a graph of the weights that were read.

    None where no ONNX operator has such a cell.
    """
    from rnnaudit import export

    if model.graph is not None:
        return model.runnable()
    try:
        return export.serialize(export.assemble(model.stacks, {}, dtype=model.dtype))
    except UnsupportedModelError:
        return None


def _timing_feed(
    model: Model, interface: Interface, steps: int, seed: int
) -> tuple[str, Mapping[str, NDArray[np.generic]]]:
    """Make one input of ``steps`` steps, or of what the graph fixes, and name its size."""
    slots = (
        of_graph(model, interface)
        if model.graph is not None
        else tuple(of_port(port, ("time", "batch", None)) for port in interface.inputs)
    )
    feed = probe_feeds(slots, 1, min(steps, LONGEST_TIMED), seed)[0]
    return f"batch {feed.tried.batch}, {counted(feed.tried.length, 'step')}", feed.values
