"""Reports as text: pure functions from a Report to a string."""

from rnnaudit.reports.html import HtmlRenderer
from rnnaudit.reports.interface import Gatherer, Renderer
from rnnaudit.reports.json import JsonRenderer
from rnnaudit.reports.junit import JunitRenderer
from rnnaudit.reports.markdown import MarkdownRenderer
from rnnaudit.reports.proof import ProofRenderer
from rnnaudit.reports.sarif import SarifRenderer
from rnnaudit.reports.summary import SummaryRenderer
from rnnaudit.reports.terminal import TerminalRenderer
from rnnaudit.results import Report, shown_by


def _shown(report: Report) -> str:
    """Return what a terminal shows, without colour, for ``print``."""
    if report.proof_file is not None:
        return ProofRenderer(written=False).render(report).rstrip("\n")
    return TerminalRenderer().render(report).rstrip("\n")


shown_by(_shown)

_EVERYWHERE = (
    JsonRenderer(),
    MarkdownRenderer(),
    JunitRenderer(),
    SarifRenderer(),
    HtmlRenderer(),
)

RENDERERS: tuple[Renderer, ...] = (TerminalRenderer(), *_EVERYWHERE)
"""Every format of one report, in the order that ``--format`` lists them."""

GATHERERS: tuple[Gatherer, ...] = (SummaryRenderer(), *_EVERYWHERE)
"""Every format of several audits."""

__all__ = [
    "GATHERERS",
    "RENDERERS",
    "Gatherer",
    "HtmlRenderer",
    "JsonRenderer",
    "JunitRenderer",
    "MarkdownRenderer",
    "Renderer",
    "SarifRenderer",
    "SummaryRenderer",
    "TerminalRenderer",
]
