"""What each graph input takes: which axes are batch and time, and what may stand in it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rnnaudit import runtime
from rnnaudit.model import Layer, Model
from rnnaudit.runtime import Interface, Port

if TYPE_CHECKING:
    import onnx_ir as ir

Role = Literal["batch", "time"]
Roles = tuple[Role | None, ...]
Fill = Literal["values", "tokens", "lengths", "zeros", "choices"]

_TIME = re.compile(r"time|seq|len|step|frame|sample|^t$", re.IGNORECASE)
_BATCH = re.compile(r"batch|^bs$|^n$|^b$", re.IGNORECASE)
# Operators that leave each axis of their first input where it is.
_KEEPS_AXES = frozenset(
    {"Identity", "Cast", "Add", "Sub", "Mul", "Div", "Pow", "Neg", "Abs", "Log", "Sqrt", "Clip"}
    | {"Relu", "LeakyRelu", "PRelu", "Elu", "Tanh", "Sigmoid", "Dropout", "MatMul", "Conv"}
    | {"LayerNormalization", "BatchNormalization", "InstanceNormalization"}
)
# Operators that move axes of their first input, and change no value.
_MOVES = frozenset({"Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True, slots=True)
class Slot:
    """One graph input: its axes, its type, and what is put there.

    Attributes:
        name: Of the graph input.
        dtype: ONNX's name of its type.
        roles: What each axis counts; None for features.
        sizes: The size of each axis; None where it is the caller's choice.
        fill: What synthetic inputs put there.
        tokens: Number of different integers that may stand there.
        choices: Values that decide which part of the graph runs; each is tried in turn.
        main: Whether a recurrence reads it, so that data without a name belong to it.
        traced: Whether its time axis is a recurrence's own, so that lengths count steps.
    """

    name: str
    dtype: str
    roles: Roles
    sizes: tuple[int | None, ...]
    fill: Fill = "values"
    tokens: int = 2
    choices: tuple[int, ...] = ()
    main: bool = False
    traced: bool = False

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        """Return the shape for a batch size and a length."""
        chosen = {"batch": batch, "time": length, None: 1}
        return tuple(
            chosen[role] if size is None else size
            for role, size in zip(self.roles, self.sizes, strict=True)
        )

    @property
    def features(self) -> int:
        """Numbers per batch row and time step."""
        axes = zip(self.roles, self.sizes, strict=True)
        return math.prod(size or 1 for role, size in axes if role is None)

    def fixed(self, role: Role) -> int | None:
        """Return the size of the axis with this role where the graph fixes it."""
        axes = zip(self.roles, self.sizes, strict=True)
        return next((size for r, size in axes if r == role and size is not None), None)

    def within(self, port: Port) -> Slot:
        """Return the slot with the sizes that another graph's input of this kind fixes."""
        if port.shape is None or len(port.shape) != len(self.sizes):
            return self
        both = zip(self.sizes, port.shape, strict=True)
        sizes = tuple(d if s is None and isinstance(d, int) else s for s, d in both)
        return replace(self, sizes=sizes)


def of_port(port: Port, roles: Sequence[Role | None], *, complete: bool = True) -> Slot:
    """Return the slot of an input whose axes have these roles.

    With ``complete`` a dynamic axis without one is taken by its name, else as batch, then time.
    """
    shape = port.shape or ()
    known = list(roles)
    if complete:
        for i, dim in enumerate(shape):
            if known[i] is None and isinstance(dim, str) and (role := named(dim)) not in known:
                known[i] = role
        free: list[Role] = [r for r in _ROLES if r not in known]
        for i, dim in enumerate(shape):
            if known[i] is None and isinstance(dim, str):
                known[i] = free.pop(0) if free else None
    sizes = tuple(dim if isinstance(dim, int) else None for dim in shape)
    return Slot(port.name, port.dtype, tuple(known), sizes)


_ROLES: tuple[Role, ...] = ("batch", "time")


def named(symbol: str) -> Role | None:
    """Read an axis's role from its symbolic name; None where the name says nothing."""
    if _BATCH.search(symbol):
        return "batch"
    return "time" if _TIME.search(symbol) else None


def of_graph(model: Model, interface: Interface) -> tuple[Slot, ...]:
    """Return a slot for each input of the model's own graph.

    Axes that lead to a recurrence are known from there, and so are others of the same name.

    Raises:
        ValueError: The model has no graph.
    """
    if model.graph is None:
        raise ValueError(f"a model with a graph was wanted, got the weights of {model.path}")
    graph = model.graph.graph
    layers = [layer for stack in model.stacks for layer in stack.layers]
    known = _followed(graph, layers, _Sizes(model))
    symbols = {
        dim: role
        for port in interface.inputs
        for dim, role in zip(port.shape or (), known.get(port.name, ()), strict=False)
        if isinstance(dim, str) and dim != "?" and role is not None
    }
    slots = []
    for port in interface.inputs:
        shape = port.shape or ()
        seen = known.get(port.name, (None,) * len(shape))
        seen = (*seen, *(None,) * len(shape))[: len(shape)]
        roles = [role or symbols.get(str(dim)) for role, dim in zip(seen, shape, strict=True)]
        slot = replace(of_port(port, roles), main="time" in seen, traced="time" in seen)
        slot = _as_wide(slot, layers)
        slots.append(_filled(graph, slot, _states(layers)))
    if slots and not any(slot.main for slot in slots):
        first = next((i for i, s in enumerate(slots) if s.fill in ("values", "tokens")), 0)
        slots[first] = replace(slots[first], main=True)
    return tuple(slots)


def read_as_it_is(model: Model, layer: Layer, slots: Sequence[Slot]) -> Slot | None:
    """Return the input whose values a layer reads, unchanged but for their axes; else None."""
    if model.graph is None or layer.site is None or layer.site.scope or layer.site.reads:
        return None
    value = _values(model.graph.graph).get(layer.site.x)
    while value is not None and (producer := value.producer()) is not None:
        value = producer.inputs[0] if producer.op_type in _MOVES else None
    if value is None:
        return None
    width = layer.recurrences[0].cell.input_size
    fits = (s for s in slots if s.name == value.name and s.traced and s.fill == "values")
    return next((s for s in fits if s.features == width), None)


def _as_wide(slot: Slot, layers: Sequence[Layer]) -> Slot:
    """Give a dynamic feature axis the width of the recurrence that reads it as it is."""
    for layer in layers:
        if layer.site is None or layer.site.x != slot.name or slot.roles[-1:] != (None,):
            continue
        if slot.sizes[-1] is None:
            width = layer.recurrences[0].cell.input_size
            return replace(slot, sizes=(*slot.sizes[:-1], width))
    return slot


def _states(layers: Sequence[Layer]) -> frozenset[str]:
    """Return the graph inputs that are initial states, for which an audit assumes zero."""
    return frozenset(
        name for layer in layers for r in layer.recurrences for name in r.initial.inputs
    )


class _Sizes:
    """The sizes of values, inferred when they are first asked for; None where they are unknown."""

    def __init__(self, model: Model) -> None:
        """Infer nothing yet."""
        self._model = model
        self._inferred: Mapping[str, tuple[int | None, ...]] | None = None

    def of(self, value: ir.Value) -> tuple[int | None, ...] | None:
        """Return what the graph says of a value, else what can be inferred."""
        if value.shape is not None:
            return tuple(d if isinstance(d, int) else None for d in value.shape)
        if self._inferred is None:
            self._inferred = runtime.sizes(self._model.runnable(inside=True))
        return self._inferred.get(value.name or "")


def _followed(graph: ir.Graph, layers: Sequence[Layer], sizes: _Sizes) -> Mapping[str, Roles]:
    """Follow what each layer reads back to a graph input, keeping track of its axes."""
    found: dict[str, Roles] = {}
    values = _values(graph)
    for layer in layers:
        for name, axes in _reads(layer, values, sizes):
            value: ir.Value | None = values[name]
            roles = axes
            while value is not None and (producer := value.producer()) is not None:
                value, roles = _before(producer, roles, sizes)
            if value is not None and value.name is not None:
                found.setdefault(value.name, roles)
    return found


def _values(graph: ir.Graph) -> Mapping[str | None, ir.Value]:
    """Return what nodes at the top of a graph give, and its inputs, by name."""
    return {v.name: v for node in graph for v in node.outputs} | {v.name: v for v in graph.inputs}


def _reads(
    layer: Layer, values: Mapping[str | None, ir.Value], sizes: _Sizes
) -> Iterator[tuple[str, Roles]]:
    """Yield each value of the graph that a layer reads, with its axes."""
    site = layer.site
    if site is None:
        return
    if not site.reads and site.x in values:
        yield site.x, ("batch", "time", None) if site.layout == 1 else ("time", "batch", None)
    for reading in site.reads:
        if reading.value in values and (known := sizes.of(values[reading.value])) is not None:
            of: dict[int | None, Role] = {reading.batch: "batch", reading.time: "time"}
            if reading.time is not None:
                yield reading.value, tuple(of.get(axis) for axis in range(len(known)))


def _before(node: ir.Node, roles: Roles, sizes: _Sizes) -> tuple[ir.Value | None, Roles]:
    """Step from a node's output to the input its axes come from; None where they do not."""
    source = node.inputs[0] if node.inputs else None
    if node.op_type == "Transpose" and "perm" in node.attributes:
        perm = list(node.attributes["perm"].as_ints())
        if len(perm) != len(roles):
            return None, roles
        return source, tuple(roles[perm.index(axis)] for axis in range(len(perm)))
    if node.op_type in ("Reshape", "Squeeze", "Unsqueeze") and source is not None:
        moved = _moved(sizes.of(source), sizes.of(node.outputs[0]), roles)
        return (None, roles) if moved is None else (source, moved)
    if node.op_type == "Gather" and source is not None and source.is_initializer():
        return node.inputs[1], roles[:-1]  # an embedding: its last axis is the width
    if node.op_type in _KEEPS_AXES:
        return next((v for v in node.inputs if v and not v.is_initializer()), None), roles
    return None, roles


def _moved(
    before: Sequence[int | None] | None, after: Sequence[int | None] | None, roles: Roles
) -> Roles | None:
    """Give the axes before a change of shape the roles after it, where only axes of 1 moved.

    None where a size is unknown, or another axis was split or joined.
    """
    if before is None or after is None or len(after) != len(roles):
        return None
    if [n for n in before if n != 1] != [n for n in after if n != 1] or None in before:
        return None
    both = list(zip(after, roles, strict=True))
    wide = iter([role for n, role in both if n != 1])
    ones = iter([role for n, role in both if n == 1 and role is not None])
    return tuple(next(ones, None) if n == 1 else next(wide) for n in before)


def _filled(graph: ir.Graph, slot: Slot, states: frozenset[str]) -> Slot:
    """Decide what is put into an input, from who reads it."""
    if slot.name in states:
        return replace(slot, fill="zeros", main=False)
    if slot.dtype.startswith(("float", "double", "bfloat")):
        return slot
    value = next(v for v in graph.inputs if v.name == slot.name)
    if "time" not in slot.roles and (choices := _choices(slot, value)):
        return replace(slot, fill="choices", choices=choices)
    for node, index in _readers(value):
        if node.op_type in ("LSTM", "GRU", "RNN") and index == 4:
            return replace(slot, fill="lengths")
        if node.op_type == "Gather" and index == 1 and node.inputs[0] is not None:
            table = node.inputs[0].shape
            if table is not None and isinstance(table[0], int):
                return replace(slot, fill="tokens", tokens=table[0])
    if re.search("len", slot.name, re.IGNORECASE):
        return replace(slot, fill="lengths")
    return replace(slot, fill="tokens" if "time" in slot.roles else "zeros")


def _choices(slot: Slot, value: ir.Value) -> tuple[int, ...]:
    """Return values that send a graph both ways: true and false, or about what is compared."""
    if slot.dtype == "bool":
        return (0, 1)
    found: set[int] = set()
    for node, index in _readers(value):
        if node.op_type in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"):
            other = node.inputs[1 - index]
            constant = None if other is None else ir_value(other)
            if constant is not None and constant.size == 1:
                c = int(constant.reshape(()))
                found |= {c} if node.op_type == "Equal" else {c - 1, c, c + 1}
    return tuple(sorted({0, *found})) if found else ()


def ir_value(value: ir.Value) -> np.ndarray[Any, Any] | None:
    """Return the array that a value always holds: an initializer's or a Constant's; else None."""
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    if node is not None and node.op_type == "Constant" and "value" in node.attributes:
        array: np.ndarray[Any, Any] = node.attributes["value"].as_tensor().numpy()
        return array
    return None


def _readers(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Yield who reads a value, through casts."""
    for node, index in value.uses():
        if node.op_type in ("Cast", "Identity"):
            yield from _readers(node.outputs[0])
        else:
            yield node, index
