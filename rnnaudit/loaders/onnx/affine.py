"""Linear maps after a recurrence: MatMul, Gemm and Add of constants, as A and b."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from rnnaudit.loaders.onnx.axes import Atom, Axis, Layout, axis, length
from rnnaudit.loaders.onnx.contents import integer
from rnnaudit.loaders.onnx.reading import Array

if TYPE_CHECKING:
    from rnnaudit.loaders.onnx.values import Knowledge


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """``source``, rearranged to have ``features`` last, times A plus b; ``units`` is its axis."""

    source: ir.Value
    features: Axis
    units: Axis
    name: str
    A: Array
    b: Array


def _matmul(known: Knowledge, node: ir.Node) -> None:
    before = known.layout(node.inputs[0])
    if before is None or before.origin not in known.recurrent or len(before.axes) < 2:
        return
    weight = known.constant(node.inputs[1])
    if weight is None or weight.ndim != 2 or length(before.axes[-1]) != weight.shape[0]:
        return
    _remember(known, node, before, weight.T, np.zeros(weight.shape[1], weight.dtype))


def _gemm(known: Knowledge, node: ir.Node) -> None:
    before = known.layout(node.inputs[0])
    if before is None or before.origin not in known.recurrent or len(before.axes) != 2:
        return
    weight = known.constant(node.inputs[1])
    if weight is None or weight.ndim != 2 or integer(node, "transA", 0):
        return
    A = (weight if integer(node, "transB", 0) else weight.T).astype(np.float64)
    b = np.zeros(A.shape[0])
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        stored = known.constant(node.inputs[2])
        if (
            stored is None
            or stored.size not in {1, A.shape[0]}
            or stored.shape[:-1] not in {(), (1,)}
        ):
            return
        b = b + _scale(node, "beta") * stored.astype(np.float64).reshape(-1)
    if length(before.axes[-1]) == A.shape[1]:
        _remember(known, node, before, _scale(node, "alpha") * A, b)


def _scale(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return 1.0 if attribute is None else float(attribute.as_float())


def _remember(known: Knowledge, node: ir.Node, before: Layout, A: Array, b: Array) -> None:
    out = node.outputs[0]
    unit = Atom(f"{out.name}:units", A.shape[0])
    known.track(out, Layout(out, (*before.axes[:-1], axis(unit))))
    name = node.name or out.name or node.op_type
    known.linear[out] = Linear(before.origin, before.axes[-1], axis(unit), name, A, b)


def _add(known: Knowledge, node: ir.Node) -> None:
    for value, other in (node.inputs, node.inputs[::-1]):
        before = known.layout(value)
        if before is None or before.origin not in known.linear:
            continue
        linear, shift = known.linear[before.origin], known.constant(other)
        if shift is None or not before.axes or before.axes[-1] != linear.units:
            continue
        if math.prod(shift.shape[:-1]) != 1 or shift.ndim > len(before.axes):
            continue
        if shift.size not in {1, linear.A.shape[0]}:
            continue
        b = linear.b.astype(np.float64) + shift.astype(np.float64).reshape(-1)
        out = node.outputs[0]
        known.track(out, Layout(out, before.axes))
        known.linear[out] = replace(linear, b=b)
        return


LINEAR: dict[str, Callable[[Knowledge, ir.Node], None]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Add": _add,
}
