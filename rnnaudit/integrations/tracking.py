"""A report as the files that a tracker keeps beside its numbers."""

from __future__ import annotations

from rnnaudit.reports import HtmlRenderer, JsonRenderer
from rnnaudit.results import Report


def documents(report: Report, *, html: bool) -> dict[str, str]:
    """Return the text of each file by name: ``report.json``, and ``report.html`` if wanted.

    Raises:
        UsageError: The HTML page is wanted, and what draws it is not installed.
    """
    wanted = (JsonRenderer(), HtmlRenderer()) if html else (JsonRenderer(),)
    return {f"report.{renderer.name}": renderer.render(report) for renderer in wanted}
