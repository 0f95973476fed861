"""Proofs of contraction: what holds for every input in a domain and every reachable state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from rnnaudit.certificates import elman, gated  # noqa: F401  (registers the kinds)
from rnnaudit.certificates.checker import Checked, Claim, check
from rnnaudit.certificates.checker_intervals import CertificateError
from rnnaudit.certificates.checker_stack import CheckedStack, check_file
from rnnaudit.certificates.document import document, stack_document
from rnnaudit.certificates.interface import (
    Certificate,
    CertificateSet,
    Domain,
    Search,
    prove,
)
from rnnaudit.certificates.stack import StackCertificate, compose
from rnnaudit.model import Recurrence, Stack
from rnnaudit.results import NoProof
from rnnaudit.threads import few_threads

__all__ = [
    "Certificate",
    "CertificateError",
    "CertificateSet",
    "Checked",
    "CheckedStack",
    "Claim",
    "Domain",
    "StackCertificate",
    "certify",
    "certify_stack",
    "check",
    "check_file",
    "document",
    "stack_document",
]


def certify(
    recurrence: Recurrence,
    domain: Domain,
    *,
    time_budget: float | None = None,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> CertificateSet:
    """Prove how fast a recurrence forgets, by every method that applies to its cell.

    Args:
        recurrence: The cell and its initial state.
        domain: The inputs that the proofs cover.
        time_budget: Seconds; searches then end with the best that they have.
        seed: Seeds the searches; the proofs themselves draw nothing.
        progress: Called with the finished part of the search, in [0, 1].

    Returns:
        The certificates, smallest depth at ε = 1e-3 first, or the reason why there is none.
    """
    cell = recurrence.cell
    numbers = [getattr(cell, f.name) for f in fields(cell)] + [recurrence.initial.value]
    if not all(bool(torch.isfinite(v).all()) for v in numbers if isinstance(v, Tensor)):
        return CertificateSet((), NoProof("the weights hold NaN or infinity"))
    deadline = None if time_budget is None else time.monotonic() + time_budget
    search = Search(seed, deadline, progress)
    with few_threads(cell.state_size):
        prove(cell, recurrence, domain, search)
        return _ranked(search)


def certify_stack(
    stack: Stack,
    domain: Domain,
    *,
    time_budget: float | None = None,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> StackCertificate:
    """Prove how fast each recurrence of a stack forgets, and what follows for its output.

    Args:
        stack: The layers and the readout.
        domain: The inputs of the first layer that the proofs cover.
        time_budget: Seconds for all searches together.
        seed: As in `certify`.
        progress: As in `certify`.
    """
    count = sum(1 for _ in stack.recurrences())
    share = None if time_budget is None else time_budget / count

    def one(recurrence: Recurrence, inputs: Domain) -> CertificateSet:
        return certify(recurrence, inputs, time_budget=share, seed=seed, progress=progress)

    return compose(stack, domain, one)


def _ranked(search: Search) -> CertificateSet:
    found = [c for c in search.certificates if c.bound.value < 1]

    def rank(certificate: Certificate) -> tuple[float, float]:
        k = certificate.depth(1e-3)
        return (math.inf if k is None else k), certificate.bound.value

    ranked = tuple(sorted(found, key=rank))
    reason = None
    if not ranked:
        why = search.failures[0][1] if search.failures else "no method applies to this cell"
        reason = NoProof(why)
    return CertificateSet(ranked, reason, tuple(search.failures), search.dynamics, search.expired)
