"""One audit as `inspect` and `gate` ask for it: from the cache where nothing changed, else new."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rnnaudit.cli import inputs
from rnnaudit.errors import RnnauditError

if TYPE_CHECKING:  # a cached audit needs neither numpy nor torch
    from rnnaudit.cli.output import Progress
    from rnnaudit.data import Data
    from rnnaudit.model import Model
    from rnnaudit.results import Norm, Report

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""Data that code makes: they may differ each time."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of every model; the data are read once, when they are first needed."""

    eps: float
    norm: Norm
    layer: str | None
    data: str | None
    time_axis: int | None
    batch_axis: int | None
    input_range: str | None
    confidence: float
    seed: int
    time_budget: float | None
    pictures: bool
    exceed: float | None = None
    weights: str | None = None

    @cached_property
    def sequences(self) -> Data | None:
        """The data themselves."""
        return inputs.sequences(self.data, time_axis=self.time_axis, batch_axis=self.batch_axis)

    @property
    def repeatable(self) -> bool:
        """Whether the next run must find the same: no clock and no code of the user's decides."""
        made = self.data is not None and _FUNCTION.fullmatch(self.data) is not None
        return self.time_budget is None and self.weights is None and not made


def find(
    question: Question,
    model: Model | str,
    *,
    witness: str | None = None,
    cached: bool,
    verbose: bool,
    progress: Progress | None,
) -> Report:
    """Answer for a path; audit anew what no path stands for, or what is to leave a witness.

    Raises:
        RnnauditError: As `rnnaudit.audit`.
    """
    if isinstance(model, str) and witness is None:
        return answer(question, model, cached=cached, verbose=verbose, progress=progress)
    return audit(question, model, witness=witness, progress=progress)


def answer(
    question: Question, model: str, *, cached: bool, verbose: bool, progress: Progress | None
) -> Report:
    """Audit a file, or return what an earlier audit of the same file found.

    Raises:
        RnnauditError: As `rnnaudit.audit`.
    """
    from rnnaudit.cli import cache

    path, data = Path(model), question.data

    def key() -> str | None:
        return cache.key(path, None if data is None else Path(data), asdict(question))

    name = key() if cached and question.repeatable else None
    found = None if name is None else cache.find(name, path)
    if found is not None:
        if verbose:
            sys.stderr.write(f"cached: {model} and all that its audit depends on are unchanged\n")
        return found
    files = () if name is None else _beside(path)
    before = cache.digests(path, files)
    report = audit(question, model, progress=progress)
    # What changed while it was read is neither what was hashed before nor what is there now.
    same = name is not None and (cache.digests(path, files), key()) == (before, name)
    if name is not None and before is not None and same:
        cache.keep(name, report, before)
    return report


def audit(
    question: Question,
    model: Model | str,
    *,
    witness: str | None = None,
    progress: Progress | None,
) -> Report:
    """Audit a model now.

    Raises:
        RnnauditError: As `rnnaudit.audit`.
    """
    bounds = inputs.bounds(question.input_range)
    sequences = question.sequences
    if question.weights is not None and isinstance(model, str):
        model = inputs.model(model, factory=None, trust_pickle=False, weights=question.weights)
    from rnnaudit import api

    return api.audit(
        model,
        eps=question.eps,
        norm=question.norm,
        layer=question.layer,
        witness=witness,
        data=sequences,
        input_range=bounds,
        confidence=question.confidence,
        exceed=question.exceed,
        seed=question.seed,
        time_budget=question.time_budget,
        pictures=question.pictures,
        progress=progress,
    )


def _beside(path: Path) -> Iterable[Path]:
    """Return the other files that a model is made of; none where it is no ONNX model."""
    from rnnaudit.loaders.interface import HEAD_BYTES
    from rnnaudit.loaders.onnx import LOADER
    from rnnaudit.loaders.onnx.reading import beside

    try:
        with path.open("rb") as file:
            onnx = LOADER.recognises(file.read(HEAD_BYTES), path)
        return beside(path) if onnx else ()
    except (OSError, RnnauditError):
        return ()  # the audit says what is wrong with it
