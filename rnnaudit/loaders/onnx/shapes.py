"""How large a value is for one sequence: from declarations, constants and axes that are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from rnnaudit.loaders.onnx.contents import Spread, integer
from rnnaudit.loaders.onnx.inferred import Inference, Sizes
from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.loaders.onnx.values import Knowledge


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
        return Inference(known, _first).shape(values[0])
    return found


def fixed_length(known: Knowledge, value: ir.Value, along: int) -> int | None:
    """Return how long an axis is whatever the graph is given; None where nothing tells."""
    told = shape_of(known, value), Inference(known, _first).made(value)
    lengths = (sizes[along] for sizes in told if sizes is not None and along < len(sizes))
    return next((n for n in lengths if n is not None), None)


def _first(known: Knowledge, value: ir.Value) -> Sizes | None:
    return next(iter(_told(known, value)), None)


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
