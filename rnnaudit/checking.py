"""Proof files are read and proved again: by the checker alone, with nothing slow imported."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rnnaudit.certificates import CertificateError, CheckedStack, check_file
from rnnaudit.certificates.checker import Checked, Claim
from rnnaudit.certificates.checker_stack import SCHEMA
from rnnaudit.errors import LoadError
from rnnaudit.model import Model, Recurrence
from rnnaudit.results import (
    Depth,
    ModelInfo,
    NoProof,
    Norm,
    ProofFile,
    RecurrenceReport,
    Report,
    Skipped,
    UpperBound,
)
from rnnaudit.threads import few_threads
from rnnaudit.versions import versions

LARGEST = 2**30
"""Bytes of the largest file that is read."""


def check(path: Path, model: Model) -> Report:
    """Prove again what a file claims of a model; ``proof_file`` says whether all of it holds.

    Raises:
        LoadError: The file cannot be read.
    """
    document, size = read(path)
    return report(document, model, path=path, size=size)


def read(path: Path) -> tuple[Any, int]:
    """Read a proof file, which may be anything, and count its bytes.

    Raises:
        LoadError: It is missing, too large, or not JSON of this kind.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as error:
        raise LoadError(
            f"a proof file must be readable, got {path}: {error.strerror}",
            help="check the path",
            id="RA132",
        ) from error
    if len(raw) > LARGEST:
        raise LoadError(f"a proof file has at most 1 GiB, and {path} has more", id="RA132")
    try:
        document = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise LoadError(
            f"a proof file is JSON, and {path} is not",
            help="give a file that `rnnaudit certify` wrote, before the model",
            id="RA132",
        ) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise LoadError(
            f"a proof file has the schema {SCHEMA}, and {path} has {str(schema)[:40]!r}",
            help="give a file that `rnnaudit certify` wrote, before the model",
            id="RA132",
        )
    return document, len(raw)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def report(
    document: Mapping[str, Any],
    model: Model,
    *,
    path: Path,
    size: int,
    missing: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Report:
    """Prove a file again, and write down what holds.

    Args:
        document: The proof file.
        model: The model that it speaks of.
        path: Where the file lies.
        size: Its bytes.
        missing: Why recurrences are left out of it, where that is known.
        seed: Of the search that found the proofs.
    """
    stacks: tuple[CheckedStack, ...] = ()
    refused: list[Skipped] = []
    try:
        with few_threads(max((r.cell.state_size for r in model.recurrences()), default=0)):
            stacks = check_file(document, model)
    except CertificateError as error:
        refused.append(Skipped("the file", str(error)))
    for stack in stacks:
        refused += [Skipped(e.recurrence, e.reason) for e in stack.entries if e.proved is None]
        refused += [Skipped(stack.name, stack.reason)] if stack.reason else []
    eps, norm = _wanted(document)
    reasons = {**(missing or {}), **{s.where: f"refused: {s.reason}" for s in refused}}
    file = ProofFile(str(path), size, not refused, tuple(refused))
    found = _report(model, stacks, reasons, eps=eps, norm=norm, seed=seed)
    return replace(found, proof_file=file)


def nothing(
    model: Model, missing: Mapping[str, str], *, eps: float, norm: Norm, seed: int
) -> Report:
    """Write down why nothing was proved."""
    return _report(model, (), missing, eps=eps, norm=norm, seed=seed)


def _report(
    model: Model,
    stacks: Sequence[CheckedStack],
    reasons: Mapping[str, str],
    *,
    eps: float,
    norm: Norm,
    seed: int,
) -> Report:
    proved = {e.recurrence: e.proved for s in stacks for e in s.entries if e.proved is not None}
    recurrences = tuple(
        _recurrence(
            r, proved.get(r.label), reasons.get(r.label, "the file holds no proof of it"), norm
        )
        for r in model.recurrences()
    )
    valid = stacks if len(stacks) == len(model.stacks) else ()
    epsilons = dict.fromkeys(c.eps for s in stacks for c in s.claims if c.norm == norm)
    whole = len(proved) == len(recurrences) and all(s.valid for s in stacks)
    return Report(
        model=ModelInfo(str(model.path), model.format, model.sha256),
        settings={"eps": eps, "norm": norm, "seed": seed},
        verdict="stable" if whole and not model.skipped else "undecided",
        recurrences=recurrences,
        eps=eps,
        norm=norm,
        depth=Depth(eps, _deepest(valid, eps, norm)),
        table=tuple(Depth(e, _deepest(valid, e, norm)) for e in epsilons),
        scope="end to end" if model.whole else "each stack's own output",
        domain=" · ".join(dict.fromkeys(stack.domain for stack in stacks)),
        data="",
        tool=versions(),
        skipped=model.skipped,
        findings=model.findings,
    )


def _wanted(document: Mapping[str, Any]) -> tuple[float, Norm]:
    """Return the ε and the norm that the file was written for; what is odd is 1e-3 and max."""
    eps = document.get("eps")
    fine = isinstance(eps, float) and 0 < eps < float("inf")
    return (eps if fine and eps else 1e-3), ("2" if document.get("norm") == "2" else "max")


def _deepest(stacks: Sequence[CheckedStack], eps: float, norm: str) -> int | None:
    """Return the largest depth over all stacks, where each claims one."""
    depths = [_depth(stack.claims, eps, norm) for stack in stacks]
    known = [k for k in depths if k is not None]
    return max(known) if known and len(known) == len(depths) else None


def _depth(claims: Sequence[Claim], eps: float, norm: str) -> int | None:
    return min((c.k for c in claims if c.eps == eps and c.norm == norm), default=None)


def _recurrence(
    recurrence: Recurrence, proved: Checked | None, reason: str, norm: str
) -> RecurrenceReport:
    cell = recurrence.cell
    claims = () if proved is None else proved.claims
    return RecurrenceReport(
        name=recurrence.name,
        cell=cell.kind,
        input_size=cell.input_size,
        hidden_size=cell.hidden_size,
        direction=recurrence.direction,
        layer=recurrence.layer,
        verdict="undecided" if proved is None else "stable",
        cell_options=cell.options,
        upper=None
        if proved is None
        else UpperBound(proved.rate, proved.norm, proved.method, proved.domain),
        no_proof=NoProof(reason) if proved is None else None,
        lower=None,
        norms=None,
        lyapunov=None,
        depths=tuple(Depth(c.eps, c.k) for c in claims if c.norm == norm),
        initial_state=recurrence.initial.describe(),
    )
