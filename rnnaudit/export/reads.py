"""How many final steps of a value a graph reads, by following it to where time is cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

_ELEMENTWISE = frozenset(
    {"Identity", "Cast", "Dropout", "Neg", "Abs", "Sqrt", "Exp", "Log", "Clip", "Relu", "Tanh"}
    | {"Sigmoid", "LeakyRelu", "Elu", "Selu", "Gelu", "Erf", "Softplus", "Softsign", "HardSigmoid"}
)
_TWO_SIDED = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "PRelu", "Max", "Min"})
_RECURRENT = ("LSTM", "GRU", "RNN")
_TO_THE_END = 2**31 - 1  # what exporters write for an end without bound, or more


@dataclass(slots=True)
class Readers:
    """Follows a value; ``path`` collects the values that get shorter with it.

    ``reaches`` tells of recurrent nodes, by name, how many final steps of their input they
    read; one that is not named reads all.
    """

    reaches: Mapping[str, int] = field(default_factory=dict)
    path: list[ir.Value] = field(default_factory=list)

    def final_steps(self, value: ir.Value, axis: int, rank: int) -> int | None:
        """Return how many final steps along ``axis`` are read; None where all may be."""
        if value.is_graph_output():
            return None
        self.path.append(value)
        # Every reader is followed, so that the path is whole whatever the answer.
        found = [self._through(node, index, axis, rank) for node, index in value.uses()]
        steps = [each for each in found if each is not None]
        return max(steps, default=0) if len(steps) == len(found) else None

    def _through(self, node: ir.Node, index: int, axis: int, rank: int) -> int | None:
        kind = node.op_type
        if kind in _RECURRENT and index == 0:
            layout = node.attributes["layout"].as_int() if "layout" in node.attributes else 0
            return self.reaches.get(node.name or "") if axis == layout else None
        if index != 0 and kind not in _TWO_SIDED:
            return None
        if kind == "Slice":
            return self._slice(node, axis, rank)
        if kind == "Gather":
            return self._gather(node, axis, rank)
        if any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
            return None  # a mask, a mean: they have as many steps as the first output
        after = moved(node, index, axis, rank)
        return None if after is None else self.final_steps(node.outputs[0], *after)

    def _slice(self, node: ir.Node, axis: int, rank: int) -> int | None:
        """Read ``x[-m:]``, or go on where other axes are cut."""
        bounds = [_numbers(value) for value in node.inputs[1:]]
        starts, ends = bounds[:2] if len(bounds) >= 2 else (None, None)
        if starts is None or ends is None or None in bounds:
            return None
        axes = bounds[2] if len(bounds) > 2 else np.arange(len(starts))
        strides = bounds[3] if len(bounds) > 3 else np.ones(len(starts), np.int64)
        assert axes is not None
        assert strides is not None
        for start, end, which, stride in zip(starts, ends, axes, strides, strict=True):
            if which % rank == axis:
                late = start < 0 and stride == 1 and (end < 0 or end >= _TO_THE_END)
                return int(-start) if late else None
        return self.final_steps(node.outputs[0], axis, rank)

    def _gather(self, node: ir.Node, axis: int, rank: int) -> int | None:
        """Read ``x[-m]``, or go on where another axis is gathered."""
        stored = _stored(node.inputs[1])
        if stored is None:
            return None
        indices = stored.numpy()
        which = _attribute(node, "axis", 0) % rank
        if which == axis:
            return int(-indices.min()) if indices.size and (indices < 0).all() else None
        more = indices.ndim - 1
        return self.final_steps(node.outputs[0], axis + more * (which < axis), rank + more)


def _attribute(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _stored(value: ir.Value | None) -> ir.TensorProtocol | None:
    return None if value is None else ir.convenience.get_const_tensor(value)


def _numbers(value: ir.Value | None) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    stored = _stored(value)
    return None if stored is None else stored.numpy().astype(np.int64).reshape(-1)


def moved(node: ir.Node, index: int, axis: int, rank: int) -> tuple[int, int] | None:
    """Return the axis and rank after an operator that keeps every step apart; else None."""
    kind = node.op_type
    if kind in _ELEMENTWISE:
        return axis, rank
    if kind == "Transpose":
        backwards = list(range(rank))[::-1]
        perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else backwards
        return perm.index(axis), rank
    if kind in ("Squeeze", "Unsqueeze"):
        return _squeezed(node, axis, rank)
    if kind == "Reshape":
        shape = _numbers(node.inputs[1])
        same = shape is not None and len(shape) > axis and bool((shape[: axis + 1] == 0).all())
        return (axis, len(shape)) if shape is not None and same else None
    if kind == "MatMul" and axis < rank - 1:
        other = _stored(node.inputs[1])
        return (axis, rank) if other is not None and len(other.shape) == 2 else None
    if kind == "LayerNormalization":
        return (axis, rank) if _attribute(node, "axis", -1) % rank > axis else None
    if kind in _TWO_SIDED and len(node.inputs) == 2:
        other = _stored(node.inputs[1 - index])
        if other is None or len(other.shape) > rank:
            return None
        behind = rank - axis  # axes of the other from ours on, counted from the end
        alike = len(other.shape) < behind or other.shape[-behind] == 1
        return (axis, rank) if alike else None
    return None


def _squeezed(node: ir.Node, axis: int, rank: int) -> tuple[int, int] | None:
    axes = _numbers(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None and "axes" in node.attributes:
        axes = np.array(node.attributes["axes"].as_ints(), np.int64)
    if axes is None:
        return None
    if node.op_type == "Squeeze":
        gone = axes % rank
        return None if axis in gone else (axis - int((gone < axis).sum()), rank - len(gone))
    new = set((axes % (rank + len(axes))).tolist())
    kept = [i for i in range(rank + len(axes)) if i not in new]
    return kept[axis], rank + len(axes)
