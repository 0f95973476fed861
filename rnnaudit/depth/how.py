"""How depths are measured: in which norm, in how much time, and who is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rnnaudit.results import Norm

Progress = Callable[[float], None]
"""Called with the share of the work that is done."""


class Clock:
    """A share of the time budget; without a budget it never ends."""

    def __init__(self, budget_s: float | None) -> None:
        """Start now."""
        self._end = None if budget_s is None else time.monotonic() + budget_s

    @property
    def left(self) -> float | None:
        """Seconds left."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def over(self) -> bool:
        """Whether the budget is spent."""
        return self._end is not None and time.monotonic() >= self._end


@dataclass(frozen=True, slots=True, eq=False)
class How:
    """How to measure: the norm, what counts as merged, the time, and whom to tell."""

    norm: Norm
    floor: float
    clock: Clock
    report: Progress
    unit_eps: float | None = None
    whole: bool = False

    @classmethod
    def of(
        cls,
        norm: Norm,
        floor: float,
        budget_s: float | None,
        progress: Progress | None,
        unit_eps: float | None = None,
        *,
        whole: bool = False,
    ) -> How:
        """Start the clock."""
        report = progress or (lambda share: None)
        return cls(norm, floor, Clock(budget_s), report, unit_eps, whole)
