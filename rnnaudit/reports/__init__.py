"""Reports as text: pure functions from a Report to a string."""

from rnnaudit.reports.interface import Renderer
from rnnaudit.reports.json import JsonRenderer
from rnnaudit.reports.terminal import TerminalRenderer

RENDERERS: tuple[Renderer, ...] = (TerminalRenderer(), JsonRenderer())
"""Every format, in the order that ``--format`` lists them."""

__all__ = ["RENDERERS", "JsonRenderer", "Renderer", "TerminalRenderer"]
