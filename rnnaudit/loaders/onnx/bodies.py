"""From the nodes of one step to a traced cell: what it computes, with its constants."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from rnnaudit.cells.operators import OPERATORS, Value
from rnnaudit.cells.traced import evaluate
from rnnaudit.errors import LoadError
from rnnaudit.loaders.interface import brief, listed
from rnnaudit.loaders.onnx.reading import Array, array
from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.loaders.onnx.values import Knowledge
from rnnaudit.model import Operation, Port, TracedCell

STANDARD = frozenset({"", "ai.onnx"})

MAX_OPERATIONS = 5_000
"""Operators of one step; a step is run thousands of times."""

MAX_WIDTH = 2**20
"""Numbers that a step may carry or read."""

MAX_RANK = 32
"""Axes that a state or an input may have."""


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """A part of the state: the value that holds it, what replaces it, and its shape."""

    before: ir.Value
    after: ir.Value
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Entering:
    """What every step reads: the value that holds it, its shape, and its type where it is told.

    ``batch`` is the axis of the sequences, where it has at least two.
    """

    value: ir.Value
    shape: tuple[int, ...]
    dtype: ir.DataType | None = None
    batch: int = 0

    def alone(self) -> Entering:
        """Return what is read for one sequence."""
        if not self.batch < len(self.shape) > 1:
            return self
        return replace(
            self, shape=tuple(1 if i == self.batch else n for i, n in enumerate(self.shape))
        )


def resolved(value: ir.Value) -> ir.Value:
    """Follow a value to where it is made, through Identity."""
    node = value.producer()
    seen: set[ir.Node] = set()  # a graph may bite its tail
    while (
        node is not None
        and node not in seen
        and node.op_type == "Identity"
        and node.domain in STANDARD
    ):
        seen.add(node)
        source = node.inputs[0]
        if source is None:
            break
        value, node = source, source.producer()
    return value


def captured(node: ir.Node) -> Iterator[ir.Value]:
    """Yield what a node reads, values that its bodies take from outside included."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from captured(inner)


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """What a step is made of: its nodes in order, what it is given, and what nothing here makes."""

    nodes: list[ir.Node]
    given: list[ir.Value]
    loose: list[ir.Value]


def region(
    ends: Iterable[ir.Value], stops: Collection[ir.Value], known: Knowledge, graph: ir.Graph
) -> Region:
    """Collect the nodes of ``graph`` that lead to values, up to ``stops`` and constants."""
    nodes: dict[ir.Node, None] = {}
    loose: dict[ir.Value, None] = {}
    given: dict[ir.Value, None] = {}
    seen: set[ir.Value] = set()
    waiting: list[tuple[ir.Value, ir.Node | None]] = [(value, None) for value in ends]
    while waiting:
        value, finished = waiting.pop()
        if finished is not None:
            nodes[finished] = None
            continue
        if value in stops:
            given[value] = None
            continue
        if value in seen or known.constant(value) is not None:
            continue
        seen.add(value)
        node = value.producer()
        if node is None or node.graph is not graph:
            loose[value] = None
        elif node not in nodes:
            waiting.append((value, node))
            waiting.extend((source, None) for source in captured(node))
    return Region(list(nodes), list(given), list(loose))


def trace(
    states: Sequence[Carried],
    inputs: Sequence[Entering],
    known: Knowledge,
    graph: ir.Graph,
    *,
    opset: int,
    outputs: int = 1,
) -> TracedCell:
    """Make a cell of the nodes between what a step is given and what it leaves.

    Args:
        states: The parts of the state, those of the output first.
        inputs: What every step reads.
        known: The constants.
        graph: The graph that holds the step.
        opset: The opset that the model imports.
        outputs: How many of the states are the output.

    Raises:
        Refused: An operator that is not read, or a value that no step is given.
        LoadError: A constant holds NaN.
    """
    ends = [state.after for state in states]
    stops = {state.before for state in states} | {port.value for port in inputs}
    found = region(ends, stops, known, graph)
    if found.loose:
        unknown = listed([value.name or "a value" for value in found.loose])
        raise Refused(f"the step reads {unknown}, which is not known at every step")
    if len(found.nodes) > MAX_OPERATIONS:
        raise Refused(f"the step has {len(found.nodes)} operators, more than {MAX_OPERATIONS}")
    names = _Names(known)
    given = [Port(names.of(s.before), s.shape, _kind(s.before.dtype)) for s in states]
    read = [Port(names.of(i.value), i.shape, _kind(i.dtype or i.value.dtype)) for i in inputs]
    operations = tuple(_operation(node, names, opset) for node in found.nodes)
    after = tuple(names.of(value) for value in ends)
    cell = TracedCell(
        operations, names.constants, tuple(read), tuple(given), after, outputs=outputs
    )
    return _folded(cell)


def _kind(dtype: ir.DataType | None) -> Literal["float", "int", "bool"]:
    if dtype == ir.DataType.BOOL:
        return "bool"
    return "int" if dtype is not None and dtype.is_integer() else "float"


class _Names:
    """A name for every value of a step, and the constants among them."""

    def __init__(self, known: Knowledge) -> None:
        self.known = known
        self.constants: dict[str, Tensor] = {}
        self._names: dict[ir.Value, str] = {}
        self._taken: set[str] = set()

    def of(self, value: ir.Value) -> str:
        if value not in self._names:
            wanted = value.name or "value"
            name, count = wanted, 1
            while name in self._taken:
                count += 1
                name = f"{wanted}_{count}"
            self._names[value] = name
            self._taken.add(name)
            stored = self.known.constant(value)
            if stored is not None:
                self.constants[name] = tensor(stored, name)
        return self._names[value]


def tensor(stored: Array, name: str) -> Tensor:
    """Keep floats as float64, whole numbers as int64, and truth values."""
    if stored.dtype == bool:
        return torch.from_numpy(stored.copy())
    if stored.dtype.kind in "iu":
        return torch.from_numpy(stored.astype(np.int64))
    exact = torch.from_numpy(np.array(stored, dtype=np.float64))
    if bool(exact.isnan().any()):
        raise LoadError(
            f"weights must be finite, and {name!r} holds NaN",
            help="take an earlier checkpoint",
            id="RA104",
        )
    return exact


def _operation(node: ir.Node, names: _Names, opset: int) -> Operation:
    if node.domain not in STANDARD or node.op_type not in OPERATORS:
        raise Refused(f"the step holds {_called(node)}, an operator that is not read there")
    if node.op_type == "Dropout" and len(node.inputs) > 2:
        training = names.known.constant(node.inputs[2])
        if training is None or bool(training.any()):
            raise Refused("the step holds a Dropout in training mode")
    attributes = {name: plain(attribute) for name, attribute in node.attributes.items()}
    if node.op_type == "Softmax" and opset < 13:
        attributes = {"axis": 1, **attributes, "flattened": 1}
    return Operation(
        node.op_type,
        tuple("" if value is None else names.of(value) for value in node.inputs),
        tuple(names.of(value) for value in node.outputs),
        attributes,
    )


def _called(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def plain(attribute: ir.Attr) -> object:
    """Return an attribute as numbers, a text or a tensor.

    Raises:
        Refused: It is a graph, or a function's parameter.
    """
    if attribute.is_ref() or attribute.type in {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}:
        raise Refused(f"the step holds an operator whose {attribute.name} is not a plain value")
    if attribute.type == ir.AttributeType.TENSOR:
        return tensor(array(attribute.as_tensor(), attribute.name), attribute.name)
    value = attribute.value
    return tuple(value) if isinstance(value, list | tuple) else value


def _folded(cell: TracedCell) -> TracedCell:
    """Run the step once: keep what does not depend on its inputs as constants, check shapes."""
    shapes = [port.shape for port in (*cell.states, *cell.inputs)]
    rank = max(len(shape) for shape in shapes)
    if (
        min(port.size for port in cell.states) < 1
        or any(n < 0 for shape in shapes for n in shape)
        or max(cell.state_size, cell.input_size) > MAX_WIDTH
        or rank > MAX_RANK
    ):
        raise Refused(
            f"a step may carry 1 to {MAX_WIDTH:,} numbers, and read as many, in at most {MAX_RANK} "
            f"axes; it carries {cell.state_size:,} and reads {cell.input_size:,} in {rank} axes"
        )
    s = torch.full((2, cell.state_size), 0.125, dtype=torch.float64)
    x = torch.full((2, cell.input_size), 0.25, dtype=torch.float64)
    try:
        values = evaluate(cell, s, x)
    except KeyError as error:
        raise Refused(f"the step reads {error}, which is made of itself") from None
    except (ValueError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        raise Refused(f"the step does not run ({brief(error)})") from None
    for state, after in zip(cell.states, cell.next_states, strict=True):
        if values[after].shape != state.shape:
            raise Refused(
                f"the state {state.name} has shape {list(state.shape)} before a step and "
                f"{list(values[after].shape)} after it"
            )
    live = tuple(
        _chosen(operation, values)
        for operation in cell.operations
        if any(values[name].batched for name in operation.outputs)
    )
    used = {name for operation in live for name in operation.inputs} | set(cell.next_states)
    constants = {
        name: value.tensor.contiguous()
        for name, value in values.items()
        if not value.batched and name in used
    }
    return replace(cell, operations=live, constants=constants)


def _chosen(operation: Operation, values: Mapping[str, Value]) -> Operation:
    """Replace a choice that is always the same by what is chosen."""
    if operation.op != "Where" or values[operation.inputs[0]].batched:
        return operation
    mask = values[operation.inputs[0]].tensor.bool()
    taken = operation.inputs[1 if bool(mask.all()) else 2]
    if bool(mask.any()) and not bool(mask.all()):
        return operation
    if not values[taken].batched or values[taken].shape != values[operation.outputs[0]].shape:
        return operation
    return Operation("Identity", (taken,), operation.outputs, {})
