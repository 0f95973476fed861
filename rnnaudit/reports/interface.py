"""A renderer turns a report into text; it decides nothing and prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rnnaudit.results import Outcome, Report


class Renderer(Protocol):
    """One output format."""

    @property
    def name(self) -> str:
        """The format's name, as ``--format`` takes it."""
        ...

    def render(self, report: Report) -> str:
        """Return the whole text, ending in a newline."""
        ...


class Gatherer(Protocol):
    """One output format of several audits at once."""

    @property
    def name(self) -> str:
        """The format's name, as ``--format`` takes it."""
        ...

    def render_all(self, outcomes: Sequence[Outcome]) -> str:
        """Return the whole text, ending in a newline."""
        ...
