"""Reports as text: pure functions from a Report to a string."""

from rnnaudit.reports.html import HtmlRenderer
from rnnaudit.reports.interface import Gatherer, Renderer
from rnnaudit.reports.json import JsonRenderer
from rnnaudit.reports.summary import SummaryRenderer
from rnnaudit.reports.terminal import TerminalRenderer

RENDERERS: tuple[Renderer, ...] = (TerminalRenderer(), JsonRenderer(), HtmlRenderer())
"""Every format of one report, in the order that ``--format`` lists them."""

GATHERERS: tuple[Gatherer, ...] = (SummaryRenderer(), JsonRenderer(), HtmlRenderer())
"""Every format of several audits."""

__all__ = [
    "GATHERERS",
    "RENDERERS",
    "Gatherer",
    "HtmlRenderer",
    "JsonRenderer",
    "Renderer",
    "SummaryRenderer",
    "TerminalRenderer",
]
