"""Verifying: both models see the same inputs, and the judge sees what came out."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rnnaudit import runtime
from rnnaudit.data import Data
from rnnaudit.errors import UnsupportedModelError, UsageError
from rnnaudit.model import Model
from rnnaudit.reports.numbers import counted
from rnnaudit.results import Equivalence
from rnnaudit.verification.inputs import Box, Feed, beyond, feeds, lengths
from rnnaudit.verification.judge import Judgement, Tried, judge
from rnnaudit.verification.originals import Answer, Cut, Graph, Original, Weights

Array = np.ndarray[Any, Any]

FRESH = 1
"""Added to the seed, so that no input is one of those that an audit chose the depth on."""

TIME_BUDGET = 60.0
START = 1.5
"""Seconds that two child processes take to start: they say nothing of the speed."""

SMALL = 200_000
"""Steps × sequences × depth below which all inputs are run together, given ENOUGH seconds."""

ENOUGH = 10.0

LONGEST_RUN = 600.0
"""Seconds after which a run of the candidate is given up, whatever the budget."""


def verify(
    original: Model,
    candidate: str | Path,
    *,
    eps: float,
    depths: Mapping[str, int] | None = None,
    data: Data | None = None,
    seed: int = 0,
    time_budget: float | None = None,
) -> Equivalence:
    """Run a candidate ONNX model beside the original and judge every output to ε.

    Inputs are lengths × batch sizes × sources (the user's data, normal, saturating), where
    those axes are dynamic, and the user's sequences whole. The short ones always run; the long
    ones while the budget lasts. Where the candidate says that its depth is proved for inputs
    in a box, synthetic ones stay inside it: the claim says nothing beyond.

    Args:
        original: The model as loaded.
        candidate: An ONNX file; it runs in ONNX Runtime in a child process.
        eps: Largest error that passes, per output unit.
        depths: Depth by ``Recurrence.label``; what the candidate's metadata say without.
        data: The user's sequences.
        seed: Of the synthetic inputs, which are not those that an audit of this seed measures.
        time_budget: Seconds; 60 without.

    Raises:
        UsageError: ``eps`` or the budget is not a positive number.
        LoadError: The candidate cannot be read, or the data do not fit.
        UnsupportedModelError: There is nothing to compare.
    """
    _positive(eps, "eps")
    budget = TIME_BUDGET if time_budget is None else _positive(time_budget, "the time budget")
    candidate, started = Path(candidate), time.perf_counter()
    interface = runtime.describe(candidate)
    stored = interface.metadata
    cut = _known(original, depths if depths is not None else _sizes(stored.get("rnnaudit.depths")))
    blocks = _known(original, _sizes(stored.get("rnnaudit.blocks")))
    source: Original = (Weights if original.graph is None else Graph)(
        original, interface, Cut(cut, blocks)
    )
    traced = original.graph is None or any(slot.traced for slot in source.slots)
    wanted = lengths(cut.values(), blocks.values(), traced=traced)
    box = _box(stored.get("rnnaudit.domain")) if cut else None
    boxes = {} if box is None else {s.name: box for s in source.slots if s.features == len(box[0])}
    todo = feeds(source.slots, wanted, data, seed + FRESH, boxes)
    small = max(cut.values(), default=1) * sum(feed.cost for feed in todo) <= SMALL
    # A child takes a second to start, so that small work is done in one go.
    parts = 1 if small and budget >= ENOUGH else 2
    runs = _run(source, candidate, todo, started + budget, parts)
    seconds = time.perf_counter() - started
    inside = "; synthetic inputs stay in the box for which the depth is proved" if boxes else ""
    known = _number(stored.get("rnnaudit.known_error"))
    reason = runs.error or source.fault()
    if reason:
        judged, truncation, conversion = Judgement.failed(reason, len(runs.tried)), None, None
    else:
        answers, outputs = runs.answers, runs.outputs
        judged = judge([a.outputs for a in answers], outputs, eps, runs.tried)
        truncation = _largest([(a.full, a.cut) for a in answers])
        conversion = _largest([(a.cut, got) for a, got in zip(answers, outputs, strict=True)])
    return judged.equivalence(
        eps,
        source.describe() + inside,
        truncation_error=truncation,
        conversion_error=conversion,
        seconds=seconds,
        left_out=(*beyond(todo, data), *runs.left_out_by(budget)),
        known_error=known if cut and known is not None and known > eps else None,
    )


def _positive(value: float, what: str) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{what} must be a positive number, got {value}", help="for example 1e-3")
    return value


def _sizes(text: str | None) -> Mapping[str, int]:
    """Read what ``truncate`` wrote, numbers by label; nothing where the text is not that."""
    try:
        return {str(label): int(size) for label, size in json.loads(text or "{}").items()}
    except (ValueError, AttributeError, TypeError):
        return {}


def _box(text: str | None) -> Box | None:
    """Read the box of inputs for which the depths are proved; None where there is none."""
    try:
        low, high = (np.array(end, np.float64) for end in json.loads(text or "null"))
    except (ValueError, TypeError):
        return None
    fits = low.ndim == 1 and low.shape == high.shape and bool((low <= high).all())
    return (low, high) if fits and bool(np.isfinite([low, high]).all()) else None


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _known(original: Model, depths: Mapping[str, int]) -> Mapping[str, int]:
    """Keep depths or blocks that this model can have had; another model's say nothing."""
    labels = {r.label for r in original.recurrences()}
    return dict(depths) if set(depths) <= labels and all(k >= 1 for k in depths.values()) else {}


@dataclass(slots=True)
class _Runs:
    """What both models said, input by input."""

    tried: list[Tried] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    outputs: list[Mapping[str, Array]] = field(default_factory=list)
    error: str = ""
    refused: int = 0
    left_out: int = 0

    def left_out_by(self, budget: float) -> tuple[str, ...]:
        """Say which inputs were not compared."""
        parts = []
        if self.refused:
            parts.append(f"{counted(self.refused, 'input')} on which the original does not run")
        if self.left_out:
            late = counted(self.left_out, "input")
            parts.append(f"{late} by the time budget of {budget:g} s")
        return tuple(parts)


def _run(
    source: Original, candidate: Path, todo: Sequence[Feed], deadline: float, parts: int
) -> _Runs:
    """Run the cheapest part of the inputs, then as many of the rest as the time left allows."""
    runs, rest = _Runs(), list(todo)
    must = sum(not feed.whole for feed in todo)
    chunk = rest if parts == 1 else rest[: math.ceil(must / parts)]
    while chunk and not runs.error:
        rest = rest[len(chunk) :]
        begun = time.perf_counter()
        _both(source, candidate, chunk, runs)
        now = time.perf_counter()
        rate = max(now - begun - START, (now - begun) / 10) / sum(feed.cost for feed in chunk)
        costs = itertools.accumulate(feed.cost * rate for feed in rest)
        chunk = [feed for feed, cost in zip(rest, costs, strict=True) if cost <= deadline - now]
    runs.left_out = 0 if runs.error else len(rest)
    if not runs.answers and not runs.error:
        raise UnsupportedModelError(
            f"the original must run on some input, got: {source.error or 'no answer'}",
            help="give inputs that it takes with --data",
            id="RA304",
        )
    return runs


def _both(source: Original, candidate: Path, todo: Sequence[Feed], runs: _Runs) -> None:
    answered = [(f, a) for f, a in zip(todo, source.answer(todo), strict=True) if a is not None]
    runs.refused += len(todo) - len(answered)
    if not answered:
        return
    outcome = runtime.run(
        candidate,
        [source.feed(feed) for feed, _ in answered],
        calls=source.calls,
        timeout=LONGEST_RUN,
    )
    runs.tried += [feed.tried for feed, _ in answered]
    if outcome.outputs is None:
        runs.error = f"the candidate does not run: {outcome.error}"
        return
    runs.answers += [answer for _, answer in answered]
    runs.outputs += outcome.outputs


def _largest(pairs: Sequence[tuple[Mapping[str, Array], Mapping[str, Array]]]) -> float | None:
    """Return the largest difference over arrays of the same name and shape; None without any."""
    with np.errstate(invalid="ignore", over="ignore"):  # ∞ − ∞ is caught below
        largest = [
            float(np.abs(a[name].astype(np.float64) - b[name].astype(np.float64)).max(initial=0.0))
            for a, b in pairs
            for name in a.keys() & b.keys()
            if a[name].shape == b[name].shape
        ]
    return max(largest) if largest and all(map(math.isfinite, largest)) else None
