"""Model-local functions are written out where they are called, so that what is inside is read."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
from onnx_ir.passes import PassError
from onnx_ir.passes.common import InlinePass

from rnnaudit.errors import LoadError
from rnnaudit.loaders.onnx.reading import MAX_NODES


def inline(model: ir.Model) -> bool:
    """Inline every function; return whether the graph now holds what was inside one.

    A model whose functions cannot be inlined (attributes that are graphs, another opset)
    stays as it is.

    Raises:
        LoadError: Functions that call functions make more nodes than are read, or call
            themselves.
    """
    if not model.functions:
        return False
    _check_size(model)
    try:
        return bool(InlinePass()(model).modified)
    except (PassError, ValueError, TypeError, KeyError):
        return False


def _check_size(model: ir.Model) -> None:
    """Count the nodes that inlining would make, callees before callers."""
    sizes: dict[ir.OperatorIdentifier, int] = {}
    open_: set[ir.OperatorIdentifier] = set()
    waiting: list[tuple[ir.OperatorIdentifier, bool]] = [(f, False) for f in model.functions]
    while waiting:
        name, ready = waiting.pop()
        if ready:
            open_.discard(name)
            sizes[name] = _count(model.functions[name].all_nodes(), sizes)
        elif name in open_:
            raise LoadError(
                f"a function must not call itself, and {name[1]} does",
                help="the file is damaged; export it again",
            )
        elif name not in sizes:
            open_.add(name)
            waiting.append((name, True))
            called = {node.op_identifier() for node in model.functions[name].all_nodes()}
            waiting += [(callee, False) for callee in called if callee in model.functions]
    total = _count(model.graph.all_nodes(), sizes)
    if total > MAX_NODES:
        raise LoadError(
            f"the functions of the model make {total:,} nodes, more than the {MAX_NODES:,} that "
            "are read",
            help="cut out the recurrent part, e.g. with onnx.utils.extract_model",
        )


def _count(nodes: Iterable[ir.Node], sizes: dict[ir.OperatorIdentifier, int]) -> int:
    return sum(sizes.get(node.op_identifier(), 1) for node in nodes)
