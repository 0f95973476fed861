"""Proofs as files: every stack of a model is proved, and written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rnnaudit.certificates import StackCertificate, stack_document
from rnnaudit.certificates.checker_stack import SCHEMA
from rnnaudit.examine import Progress, Settings, domain_of, prove_stack
from rnnaudit.model import Model
from rnnaudit.observe import Observation
from rnnaudit.results import NoProof
from rnnaudit.threads import few_threads
from rnnaudit.versions import versions


def prove(
    model: Model, seen: Observation | None, settings: Settings, progress: Progress | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Prove every stack of a model.

    Args:
        model: The model.
        seen: What its stacks read, whose box is their domain; None where no input decides it.
        settings: Of the proofs.
        progress: Called with what is being done and the share that is done.

    Returns:
        The proof file as a plain document, and why a recurrence or a stack is left out of
        it, by its name.
    """
    proofs: list[StackCertificate] = []
    for i, stack in enumerate(model.stacks):
        groups, synthetic = ((), True) if seen is None else (seen.stacks[i], seen.synthetic[i])
        domain = domain_of(model, groups, settings, synthetic=synthetic)
        if progress is not None:
            progress(f"proving {stack.name}", i / len(model.stacks))
        budget = None if settings.time_budget is None else settings.time_budget / len(model.stacks)
        proofs.append(prove_stack(stack, domain, budget, settings.seed))
    with few_threads(max((r.cell.state_size for r in model.recurrences()), default=0)):
        stacks = [stack_document(p.stack, p, eps=settings.eps, norm=settings.norm) for p in proofs]
    kept = {entry["recurrence"] for stack in stacks for entry in stack["recurrences"]}
    return (
        {
            "schema": SCHEMA,
            "tool": {"name": "rnnaudit", "version": versions()["version"]},
            "model": {"name": model.path.name, "format": model.format, "sha256": model.sha256},
            "eps": settings.eps,
            "norm": settings.norm,
            "stacks": [stack for stack in stacks if stack["recurrences"]],
        },
        {
            label: _why(found.no_proof)
            for proof in proofs
            for label, found in proof.recurrences.items()
            if label not in kept
        },
    )


def _why(no_proof: NoProof | None) -> str:
    if no_proof is None:
        return "proved, but too close to call for another program"
    return f"no proof: {no_proof.reason}"


def dumped(document: Mapping[str, Any]) -> bytes:
    """Return a proof file's bytes."""
    return (json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()
