"""How large a value is for one sequence: from declarations, constants and axes that are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from rnnaudit.loaders.onnx.contents import Spread, integer
from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.loaders.onnx.values import Knowledge

Sizes = list[int | None]

_MOST = 100
"""Values whose sizes are followed to tell one."""

_ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Tanh", "Sigmoid", "Relu", "LeakyRelu", "Elu", "Neg", "Identity"}
)


def shape_of(known: Knowledge, *values: ir.Value | None) -> Sizes | None:
    """Return the axes' lengths, None where only the run decides; None where the rank is unknown.

    Several values of one shape may be given: what any of them tells is told.
    """
    found: Sizes | None = None
    for value in values:
        for sizes in [] if value is None else _told(known, value):
            if found is None:
                found = sizes
            elif len(sizes) == len(found):
                found = [a if a is not None else b for a, b in zip(found, sizes, strict=True)]
    if found is None and values and values[0] is not None:
        return _followed(known, values[0], {})
    return found


def _told(known: Knowledge, value: ir.Value) -> list[Sizes]:
    told: list[Sizes] = []
    if value.shape is not None:
        told.append([d if isinstance(d, int) else None for d in value.shape])
    content = known.content(value)
    if isinstance(content, np.ndarray):
        told.append(list(content.shape))
    else:
        layout = known.layout(value)
        if layout is not None:
            told.append(_numbers(layout.sizes()))
    node = value.producer()
    if isinstance(content, Spread) and node is not None:
        wanted = known.content(node.inputs[-1])
        if node.op_type in {"ConstantOfShape", "Expand"} and isinstance(wanted, np.ndarray):
            told.append(_numbers(wanted.tolist()))
    return told


def _followed(
    known: Knowledge, value: ir.Value, seen: dict[ir.Value, Sizes | None]
) -> Sizes | None:
    """Return what the operators before a value tell, where nothing tells it directly."""
    if value not in seen:
        told = _told(known, value)
        seen[value] = told[0] if told else None  # a graph may bite its tail
        node = value.producer()
        if not told and node is not None and len(seen) < _MOST:
            seen[value] = _reshaped(known, node)
            given = [_followed(known, v, seen) for v in node.inputs if v is not None]
            sizes = [shape for shape in given if shape is not None]
            if seen[value] is None and sizes and len(sizes) == len(given):
                seen[value] = _result(node, sizes)
    return seen[value]


def _reshaped(known: Knowledge, node: ir.Node) -> Sizes | None:
    wanted = known.content(node.inputs[1]) if node.op_type == "Reshape" else None
    if not isinstance(wanted, np.ndarray):
        return None
    return [n if isinstance(n, int) and n > 0 else None for n in wanted.tolist()]


def _result(node: ir.Node, given: list[Sizes]) -> Sizes | None:
    if node.domain not in {"", "ai.onnx"}:
        return None
    if node.op_type in _ELEMENTWISE:
        return _broadcast(given)
    if node.op_type == "MatMul" and len(given) == 2 and min(map(len, given)) > 1:
        (*front, rows, _), (*others, _, columns) = given
        return [*_broadcast([front, others]), rows, columns]
    if node.op_type == "Gemm" and [len(sizes) for sizes in given[:2]] == [2, 2]:
        a, b = given[:2]
        return [a[integer(node, "transA", 0)], b[1 - integer(node, "transB", 0)]]
    return None


def _broadcast(given: list[Sizes]) -> Sizes:
    """Return the sizes of values that are stretched to one shape; ends are aligned."""
    rank = max(map(len, given))
    columns = zip(*([*[1] * (rank - len(sizes)), *sizes] for sizes in given), strict=True)
    return [
        next((n for n in column if n not in {1, None}), None if None in column else 1)
        for column in columns
    ]


def _numbers(sizes: Sequence[object]) -> Sizes:
    return [n if isinstance(n, int) else None for n in sizes]


def for_one(known: Knowledge, *values: ir.Value, lengths: Sequence[int] = ()) -> tuple[int, ...]:
    """Return a value's shape for one sequence: 1 for each axis that only the run decides.

    Given ``lengths``, the first such axis is as long as the first of them, and so on.

    Raises:
        Refused: Nothing tells it.
    """
    sizes = shape_of(known, *values) or _multiplied(known, values[0])
    if sizes is None:
        raise Refused(f"the shape of {values[0].name!r} is not known")
    return filled(sizes, lengths)


def filled(sizes: Sizes, lengths: Sequence[int]) -> tuple[int, ...]:
    """Replace the lengths that are not known by these, and by 1 where there are no more."""
    left = iter(lengths)
    return tuple(next(left, 1) if n is None else n for n in sizes)


def _multiplied(known: Knowledge, value: ir.Value) -> Sizes | None:
    """Return the shape of rows that are multiplied by a stored matrix."""
    for use in value.uses():
        if use.node.op_type in {"MatMul", "Gemm"} and use.idx == 0:
            weight = known.constant(use.node.inputs[1])
            if weight is not None and weight.ndim == 2:
                return [None, weight.shape[integer(use.node, "transB", 0)]]
    return None
