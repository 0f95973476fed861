"""Truncated models as ONNX graphs: built from cells, or edited into a given graph."""

from rnnaudit.export import elman, gru, lstm  # noqa: F401  (registers the kinds)
from rnnaudit.export.build import assemble, build, check_opset, opset_of
from rnnaudit.export.choose import choose
from rnnaudit.export.files import serialize, write
from rnnaudit.export.stepwise import obstacles
from rnnaudit.export.surgery import converted, truncate_graph, without_opset

__all__ = [
    "assemble",
    "build",
    "check_opset",
    "choose",
    "converted",
    "obstacles",
    "opset_of",
    "serialize",
    "truncate_graph",
    "without_opset",
    "write",
]
