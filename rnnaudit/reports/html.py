"""The report to look at: one HTML page with its pictures, that loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from rnnaudit.errors import UsageError
from rnnaudit.reports import charts, numbers, wording
from rnnaudit.reports.commands import shell
from rnnaudit.results import Outcome, Refusal, Report

if TYPE_CHECKING:  # `--help` needs no page
    from jinja2 import Environment

OPEN = 3
"""Recurrences whose pictures show at once; where there are more, all are folded."""

COMMAND_WIDTH = 76


class HtmlRenderer:
    """A self-contained page for each report."""

    @property
    def name(self) -> str:
        """The format's name."""
        return "html"

    def render(self, report: Report) -> str:
        """Return the page of one report.

        Raises:
            UsageError: matplotlib or jinja2 is not installed.
        """
        return page([report])

    def render_all(self, outcomes: Sequence[Outcome]) -> str:
        """Return one page of every audit, and of every file that could not be audited.

        Raises:
            UsageError: matplotlib or jinja2 is not installed.
        """
        return page(outcomes)


def require() -> None:
    """Refuse to make a page where what draws it is not installed.

    Raises:
        UsageError: matplotlib or jinja2 is missing.
    """
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the HTML report needs {' and '.join(missing)}, which is not installed",
            help="pip install 'rnnaudit[report]'",
        )


def page(outcomes: Sequence[Outcome]) -> str:
    """Return one page that shows every audit, and every file that could not be audited.

    Raises:
        UsageError: matplotlib or jinja2 is not installed.
    """
    require()
    models = [_model(outcome, f"m{i}") for i, outcome in enumerate(outcomes, 1)]
    return _environment().get_template("report.html").render(models=models) + "\n"


def _model(outcome: Outcome, prefix: str) -> dict[str, Any]:
    """Gather what the template shows of one file beside its report or refusal."""
    path = outcome.path if isinstance(outcome, Refusal) else outcome.model.path
    shown = _refused(outcome) if isinstance(outcome, Refusal) else _audited(outcome, prefix)
    return {"id": prefix, "name": PurePath(path).name, "path": path, **shown}


def _refused(refusal: Refusal) -> dict[str, Any]:
    said = wording.Settled("ERROR", f": {refusal.message}")
    return {"refusal": refusal, "report": None, "settled": said}


def _audited(report: Report, prefix: str) -> dict[str, Any]:
    compared = report.equivalence
    command, advice = wording.next_command(report)
    return {
        "report": report,
        "settings": [(k, _setting(v)) for k, v in report.settings.items() if v is not None],
        "settled": wording.verdict(report) if compared is None else wording.judgement(compared),
        "command": None if command is None else shell(command, COMMAND_WIDTH),
        "advice": advice,
        "depths": charts.depth_table(f"Depth k for each ε, {report.scope}", report.table),
        "charts": [
            charts.charts(report, recurrence, f"{prefix}r{i}")
            for i, recurrence in enumerate(report.recurrences)
        ],
        "open": len(report.recurrences) <= OPEN,
        "findings": wording.grouped(report.findings),
    }


def _setting(value: object) -> str:
    if isinstance(value, float):
        return numbers.exact(value)
    return ":".join(map(_setting, value)) if isinstance(value, (list, tuple)) else str(value)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rnnaudit.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.globals |= {"numbers": numbers, "wording": wording}
    return environment


def _shown(value: object) -> object:
    """Let through what may stand on a page: text without what steers, whole numbers, markup."""
    if hasattr(value, "__html__"):
        return value
    if isinstance(value, str):
        return numbers.clean(value)
    if isinstance(value, int):
        return value
    raise TypeError(f"a page shows text and whole numbers, got {value!r}")
