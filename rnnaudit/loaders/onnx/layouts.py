"""Operators that rearrange: which axes of the value before make up each axis of the result."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from rnnaudit.loaders.onnx.axes import Atom, Axis, Layout, Size, length
from rnnaudit.loaders.onnx.contents import integer, integers, slices

if TYPE_CHECKING:
    from rnnaudit.loaders.onnx.values import Knowledge


_WHOLE = 2**31 - 1
"""An end of a Slice that no axis reaches."""


def _keep_axes(_: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    return before.axes


def _dropout_axes(known: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    """Dropout passes its input on, unless it was exported in training mode."""
    training = node.inputs[2] if len(node.inputs) > 2 else None
    if training is not None:
        mode = known.constant(training)
        if mode is None or bool(mode.any()):
            return None
    return before.axes


def _slice_axes(known: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    """Slice passes its input on where it cuts nothing off, as exporters write ``x[:, t]``."""
    cuts = slices(node, [known.constant(value) for value in node.inputs], len(before.axes))
    for i, cut in cuts.items():
        size = length(before.axes[i])
        all_ = cut.stop is not None and cut.stop >= (size if isinstance(size, int) else _WHOLE)
        if cut.start != 0 or cut.step != 1 or not all_:
            return None
    return before.axes


def _squeeze_axes(known: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    given = [known.constant(value) for value in node.inputs]
    axes = integers(node, "axes", given, 1)
    rank = len(before.axes)
    if axes is None:
        if len(node.inputs) > 1 or any(not isinstance(n, int) for n in before.sizes()):
            return None  # which axes have length 1 is only known when it runs
        axes = [i for i, n in enumerate(before.sizes()) if n == 1]
    dropped = {i % rank for i in axes}
    if any(before.axes[i] for i in dropped):
        return None
    return tuple(a for i, a in enumerate(before.axes) if i not in dropped)


def _unsqueeze_axes(known: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    axes = integers(node, "axes", [known.constant(value) for value in node.inputs], 1)
    if axes is None:
        return None
    rank = len(before.axes) + len(axes)
    new = {i % rank for i in axes}
    rest = iter(before.axes)
    return tuple(() if i in new else next(rest) for i in range(rank))


def _transpose_axes(_: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    perm = node.attributes.get("perm")
    order = [int(i) for i in perm.as_ints()] if perm else list(range(len(before.axes)))[::-1]
    if sorted(order) != list(range(len(before.axes))):
        return None
    return tuple(before.axes[i] for i in order)


def _flatten_axes(_: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    cut = integer(node, "axis", 1) % (len(before.axes) + 1)
    sides = before.axes[:cut], before.axes[cut:]
    return tuple(tuple(itertools.chain.from_iterable(side)) for side in sides)


def _reshape_axes(known: Knowledge, node: ir.Node, before: Layout) -> tuple[Axis, ...] | None:
    """Deal the atoms out again in row-major order, so that every axis gets its length."""
    target = known.content(node.inputs[1]) if len(node.inputs) > 1 else None
    if not isinstance(target, np.ndarray) or target.ndim != 1:
        return None
    wanted: list[Size | int | None] = []
    for i, entry in enumerate(target.tolist()):
        if entry == 0 and not integer(node, "allowzero", 0):
            if i >= len(before.axes):
                return None
            wanted.append(length(before.axes[i]))
        elif entry == -1 or (isinstance(entry, Size) and not entry.is_axis):
            wanted.append(None)
        else:
            wanted.append(entry)
    if wanted.count(None) > 1:
        return None
    atoms = list(itertools.chain.from_iterable(before.axes))
    cut = wanted.index(None) if None in wanted else len(wanted)
    front = [_take(atoms, size, 0) for size in wanted[:cut]]
    back = [_take(atoms, size, -1) for size in wanted[:cut:-1]][::-1]
    if None in front or None in back:
        return None
    middle = [tuple(atoms)] if cut < len(wanted) else []
    if not middle and atoms:
        return None
    return tuple(a for a in [*front, *middle, *back] if a is not None)


def _take(atoms: list[Atom], size: Size | int | None, end: int) -> Axis | None:
    """Take atoms from one end until their product is ``size``; None where none is."""
    taken: list[Atom] = []
    while size is not None and length(tuple(taken)) != size:
        if not atoms or (isinstance(size, int) and atoms[end].size is None):
            return None
        taken.append(atoms.pop(end))
    return tuple(taken[::-1] if end else taken)


LAYOUTS: dict[str, Callable[[Knowledge, ir.Node, Layout], tuple[Axis, ...] | None]] = {
    "Identity": _keep_axes,
    "Dropout": _dropout_axes,
    "Slice": _slice_axes,
    "Squeeze": _squeeze_axes,
    "Unsqueeze": _unsqueeze_axes,
    "Transpose": _transpose_axes,
    "Flatten": _flatten_axes,
    "Reshape": _reshape_axes,
}
