"""What callers give the functions of the API, checked by name before anything is read."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeGuard, TypeVar

from rnnaudit.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

NEVER_NONE = frozenset({"eps", "confidence", "seed", "max_depth", "form", "norm"})
"""Settings that mean nothing without a value, of functions that do not name theirs."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function refuse arguments of the wrong kind in one line, and take NumPy's numbers."""
    signature = inspect.signature(function)
    free = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    optional = {p.name for p in signature.parameters.values() if p.default is None}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs)
        extra = given.arguments.get(free, {}) if free else {}
        for values, may_be_none in (
            (given.arguments, optional),
            (extra, extra.keys() - NEVER_NONE),
        ):
            for name in CHECKS.keys() & values.keys():
                if values[name] is not None or name not in may_be_none:
                    values[name] = CHECKS[name](name, values[name])
        return function(*given.args, **given.kwargs)

    return call


def _real(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and type(value).__name__ != "bool"


def _number(name: str, value: object) -> float:
    if _real(value):
        return float(value)
    example = {"eps": 1e-3, "time_budget": 60}.get(name, 0.05)
    raise _refuse(name, "a number", value, f"for example {name}={example}")


def _whole(name: str, value: object) -> int:
    if isinstance(value, numbers.Integral) and type(value).__name__ != "bool":
        return int(value)
    example = {"seed": 0, "opset": 17}.get(name, 64)
    raise _refuse(name, "a whole number", value, f"for example {name}={example}")


def _text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise _refuse(name, "a text", value, f"for example {name}='rnn[0]'")


def _path(name: str, value: object) -> str | os.PathLike[str]:
    if isinstance(value, str) or (
        isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)
    ):
        return value
    raise _refuse(name, "a path", value, "give a str or a pathlib.Path")


def _one_of(*wanted: str) -> Callable[[str, object], str]:
    listed = f"{', '.join(wanted[:-1])} or {wanted[-1]}"

    def check(name: str, value: object) -> str:
        if isinstance(value, str) and value in wanted:
            return value
        raise _refuse(f"the {name}", listed, value, "choose one of them")

    return check


def _bounds(name: str, value: object) -> tuple[float, float] | str:
    if isinstance(value, str) and value == "one-hot":
        return value
    ends = (
        list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else []
    )
    if len(ends) == 2 and all(_real(end) and math.isfinite(end) for end in ends):
        low, high = map(float, ends)
        if low < high:
            return low, high
    raise _refuse(
        name,
        "a pair of finite numbers, the lower one first, or 'one-hot'",
        value,
        f"for example {name}=(-1, 1)",
    )


def _refuse(name: str, wanted: str, value: object, advice: str) -> UsageError:
    return UsageError(f"{name} must be {wanted}, got {reprlib.repr(value)}", help=advice)


CHECKS: Mapping[str, Callable[[str, object], object]] = {
    **dict.fromkeys(("eps", "confidence", "exceed", "time_budget"), _number),
    **dict.fromkeys(("seed", "depth", "max_depth", "steps", "opset"), _whole),
    **dict.fromkeys(("output", "witness", "candidate", "certificate", "weights"), _path),
    "layer": _text,
    "factory": _text,
    "input_range": _bounds,
    "norm": _one_of("max", "2"),
    "evidence": _one_of("proved", "measured"),
    "form": _one_of("auto", "window", "chunk", "last", "filter"),
}
