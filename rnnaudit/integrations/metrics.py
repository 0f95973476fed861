"""A report as a flat table of finite numbers, the same for every tracker.

A number's name says what stands behind it: ``k_proved``, ``k_measured`` on the user's data
and ``k_synthetic`` on synthetic inputs never share a curve. What does not exist has no name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from rnnaudit.reports import wording
from rnnaudit.results import Depth, RecurrenceReport, Report

Pairs = Iterator[tuple[str, float | None]]


def metrics(report: Report, prefix: str = "rnnaudit/") -> dict[str, float]:
    """Return λ, Λ₁ and k of the whole model, then of each recurrence by its name.

    Of the whole model, ``lambda_proved`` is the largest λ and there only where every
    recurrence has one; ``lambda_found`` and ``lyapunov`` are the largest that were found.

    Args:
        report: The audit.
        prefix: What every name begins with.
    """
    found = dict(_of_model(report))
    for name, recurrence in _named(report.recurrences):
        found |= {f"{name}/{key}": value for key, value in _of_recurrence(recurrence, report.eps)}
    return {
        prefix + key: float(value)
        for key, value in found.items()
        if value is not None and math.isfinite(value)
    }


def _of_model(report: Report) -> Pairs:
    yield "stable", report.verdict == "stable"
    yield "unstable", report.verdict == "unstable"
    bounds = [None if r.upper is None else r.upper.value for r in report.recurrences]
    proved = [bound for bound in bounds if bound is not None]
    yield "lambda_proved", max(proved) if proved and len(proved) == len(bounds) else None
    found = [r.lower.value for r in report.recurrences if r.lower is not None]
    yield "lambda_found", max(found, default=None)
    exponents = [r.lyapunov.max for r in report.recurrences if r.lyapunov is not None]
    yield "lyapunov", max(exponents, default=None)
    yield from _of_depth(report.depth)


def _of_recurrence(recurrence: RecurrenceReport, eps: float) -> Pairs:
    upper, lower, lyapunov = recurrence.upper, recurrence.lower, recurrence.lyapunov
    yield "lambda_proved", None if upper is None else upper.value
    yield "lambda_found", None if lower is None else lower.value
    if lyapunov is not None:
        yield "lyapunov", lyapunov.max
        yield "lyapunov_stderr", lyapunov.stderr
        yield "half_life", lyapunov.half_life
    depth = wording.own_depth(recurrence, eps)
    if depth is not None:
        yield from _of_depth(depth)


def _of_depth(depth: Depth) -> Pairs:
    yield "k_proved", depth.proved
    yield "k_refuted_below", depth.refuted_below
    if depth.measured is not None:
        kind = "synthetic" if depth.measured.synthetic else "measured"
        yield f"k_{kind}", depth.measured.k
        yield f"{kind}_longer_than", depth.measured.longer_than or None
        yield f"{kind}_exceed_probability", depth.measured.exceed_probability


def _named(recurrences: tuple[RecurrenceReport, ...]) -> Iterator[tuple[str, RecurrenceReport]]:
    """Name recurrences by what every tracker takes: ``rnn[0] reverse`` is ``rnn.0.reverse``."""
    taken: set[str] = set()
    for place, recurrence in enumerate(recurrences):
        name = re.sub(r"[^A-Za-z0-9_/-]+", ".", recurrence.label).strip("./")
        name = f"{name}.{place}" if name in taken else name
        taken.add(name)
        yield name, recurrence
