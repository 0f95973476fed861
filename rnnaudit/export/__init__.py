"""Truncated models as ONNX graphs: built from cells, or edited into a given graph."""

from rnnaudit.export import elman, gru, lstm  # noqa: F401  (registers the kinds)
from rnnaudit.export.build import assemble, build
from rnnaudit.export.choose import choose
from rnnaudit.export.files import serialize, write
from rnnaudit.export.surgery import truncate_graph

__all__ = ["assemble", "build", "choose", "serialize", "truncate_graph", "write"]
