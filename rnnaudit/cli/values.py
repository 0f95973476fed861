"""What the value of an option must be, told by the option's own name.

Each check is an option's callback: it returns the value, or refuses it with a `UsageError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import typer

from rnnaudit.errors import UsageError


def positive(param: typer.CallbackParam, value: float | None) -> float | None:
    """Let through finite numbers above 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UsageError(f"{_flag(param)} must be a finite number above 0, got {value:g}")
    return value


def limit(param: typer.CallbackParam, value: float | None) -> float | None:
    """Let through finite numbers, 0 or more."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{_flag(param)} must be a finite number, 0 or more, got {value:g}")
    return value


def share(param: typer.CallbackParam, value: float | None) -> float | None:
    """Let through what lies between 0 and 1."""
    if value is not None and not 0 < value < 1:
        raise UsageError(f"{_flag(param)} must lie between 0 and 1, got {value:g}")
    return value


def count(param: typer.CallbackParam, value: int | None) -> int | None:
    """Let through 1 and more."""
    if value is not None and value < 1:
        raise UsageError(f"{_flag(param)} must be at least 1, got {value}")
    return value


def seed(param: typer.CallbackParam, value: int) -> int:
    """Let through what seeds a generator of PyTorch."""
    if not 0 <= value < 2**63:
        raise UsageError(f"{_flag(param)} must be from 0 to 2⁶³ − 1, got {value}")
    return value


def _flag(param: typer.CallbackParam) -> str:
    return str(param.opts[0])


def path(value: str | None) -> str | None:
    """Name a path relative to the working folder where it lies inside it."""
    folder = Path.cwd()
    if value is None or not Path(value).is_relative_to(folder):
        return value
    return Path(value).relative_to(folder).as_posix()


def paths(values: Sequence[str]) -> list[str]:
    """Name every path so."""
    return [path(value) or value for value in values]
