"""Judging: every element of every output of every input must agree to ε, with rtol 0.

Whole numbers are compared exactly, however large, and texts by being equal. Pure functions of
arrays: nothing is run here.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from rnnaudit.errors import UnsupportedModelError
from rnnaudit.results import Equivalence, Location

Array = np.ndarray[Any, Any]
Outputs = Mapping[str, Array]

PERCENTILES = (90, 95, 99)

EXACT = 2.0**53
"""The size from which float64 leaves whole numbers out."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What is known of one input: its name, batch size N and length T."""

    name: str
    batch: int
    length: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on all inputs; numbers are None where they do not exist.

    ``max_abs_error`` is over all elements, ``percentiles`` too (``p90``, ``p95``, ``p99``).
    ``required_eps`` is the smallest ε that would have passed, rounded up to three digits.
    """

    passed: bool
    max_abs_error: float | None
    required_eps: float | None
    where: Location | None
    percentiles: Mapping[str, float]
    inputs_tried: int
    reason: str = ""

    @classmethod
    def failed(cls, reason: str, inputs_tried: int) -> Judgement:
        """Fail without numbers: the two could not be compared."""
        return cls(False, None, None, None, {}, inputs_tried, reason)

    def equivalence(
        self,
        eps: float,
        reference: str,
        *,
        truncation_error: float | None = None,
        conversion_error: float | None = None,
        seconds: float | None = None,
        left_out: tuple[str, ...] = (),
        known_error: float | None = None,
    ) -> Equivalence:
        """Say how it came about; the arguments are the fields of `Equivalence`."""
        return Equivalence(
            passed=self.passed,
            eps=eps,
            max_abs_error=self.max_abs_error,
            required_eps=self.required_eps,
            where=self.where,
            percentiles=self.percentiles,
            inputs_tried=self.inputs_tried,
            truncation_error=truncation_error,
            conversion_error=conversion_error,
            reference=reference,
            seconds=seconds,
            reason=self.reason,
            left_out=left_out,
            known_error=known_error,
        )


def judge(
    reference: Sequence[Outputs],
    candidate: Sequence[Outputs],
    eps: float,
    tried: Sequence[Tried] | None = None,
) -> Judgement:
    """Compare a candidate's outputs with the reference's, input by input.

    Args:
        reference: Arrays by output name, one mapping per input.
        candidate: The same, in the same order; each has every output of the reference.
        eps: Largest error that passes.
        tried: Names and sizes of the inputs, to say where the largest error sits.

    Raises:
        UnsupportedModelError: There is nothing to compare.
    """
    if len(reference) != len(candidate):
        raise ValueError(f"{len(reference)} references, {len(candidate)} candidates")
    tried = tried or [Tried(str(i), 0, 0) for i in range(len(reference))]
    errors: list[Array] = []
    worst, where, faults = -1.0, None, []
    for wanted, got, about in zip(reference, candidate, tried, strict=True):
        for name, expected in wanted.items():
            fault = _fault(expected, got.get(name))
            if fault:
                faults.append(f"{fault} in output {name} of input {about.name}")
                continue
            if expected.size == 0:
                continue
            error = _errors(expected, got[name])
            largest = int(error.argmax())
            if error.flat[largest] > worst:
                worst = float(error.flat[largest])
                where = _location(about, name, error.shape, largest)
            errors.append(error.ravel())
    count = len(reference)
    if not errors and not faults:
        raise UnsupportedModelError(
            "the two models must have outputs to compare, got none",
            help="name the same outputs in both",
            id="RA304",
        )
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        return Judgement(False, None, None, None, {}, count, faults[0] + more)
    joined = np.concatenate(errors)
    quantiles = np.quantile(joined, [p / 100 for p in PERCENTILES])
    percentiles = {f"p{p}": float(q) for p, q in zip(PERCENTILES, quantiles, strict=True)}
    return Judgement(worst <= eps, worst, round_up(worst), where, percentiles, count)


def round_up(value: float, digits: int = 3) -> float:
    """Round a number ≥ 0 up to ``digits`` significant digits: the result is never below it."""
    if value == 0 or not math.isfinite(value):
        return value
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    rounded = float(context.create_decimal(repr(value)))
    return rounded if rounded >= value else math.nextafter(rounded, math.inf)


def _fault(expected: Array, got: Array | None) -> str:
    """Say what makes two arrays incomparable; empty where nothing does."""
    if got is None:
        return "nothing"
    if expected.shape != got.shape:
        return f"shape {got.shape} instead of {expected.shape}"
    if expected.dtype.kind == got.dtype.kind == "U":
        differ = int((expected != got).sum())
        return f"{differ} of {expected.size} texts differ" if differ else ""
    for array, whose in ((got, "the candidate"), (expected, "the original")):
        if not np.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
            return f"{array.dtype} values from {whose}"
        if np.isnan(array).any():
            return f"NaN from {whose}"
    if (np.isinf(expected) | np.isinf(got)).any():
        return "infinity"
    return ""


def _errors(expected: Array, got: Array) -> Array:
    """Return |Δ| of every element; texts are equal here."""
    if expected.dtype.kind == "U":
        return np.zeros(expected.shape)
    a, b = _wide(expected), _wide(got)
    error = np.asarray(np.abs(a - b))
    if "c" not in a.dtype.kind + b.dtype.kind and {"i", "u"} & {
        expected.dtype.kind,
        got.dtype.kind,
    }:
        for i in np.flatnonzero(np.maximum(np.abs(a), np.abs(b)) >= EXACT):
            error.flat[i] = _apart(expected.flat[i].item(), got.flat[i].item())
    return error


def _apart(a: float, b: float) -> float:
    """Return how far two numbers are apart, rounded up."""
    exact = abs(Fraction(a) - Fraction(b))
    rounded = float(exact)
    return rounded if rounded >= exact else math.nextafter(rounded, math.inf)


def _wide(values: Array) -> Array:
    kind = np.complex128 if np.iscomplexobj(values) else np.float64
    return values.astype(kind)


def _location(about: Tried, output: str, shape: tuple[int, ...], index: int) -> Location:
    """Find batch row, time step and unit of a flat index, by the sizes of the axes.

    The time axis is the first whose size is T and the batch axis the first other one whose
    size is N; an output without one of them counts as 0 there.
    """
    at = [int(i) for i in np.unravel_index(index, shape)]
    axes = list(range(len(shape)))
    time = next((a for a in axes if shape[a] == about.length), None)
    batch = next((a for a in axes if a != time and shape[a] == about.batch), None)
    rest = [a for a in axes if a not in (time, batch)]
    unit = int(np.ravel_multi_index([at[a] for a in rest], [shape[a] for a in rest])) if rest else 0
    return Location(
        about.name,
        output,
        0 if batch is None else at[batch],
        0 if time is None else at[time],
        unit,
    )
