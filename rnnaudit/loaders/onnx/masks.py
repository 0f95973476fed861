"""Masks that end sequences: a step that keeps its state once its number passes a length.

Whether the state is kept is then decided outside the recurrence. On sequences of full
length it never is: the mask is taken to let every step through, and a finding says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from rnnaudit.loaders.onnx.bodies import Region, region, resolved
from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.loaders.onnx.values import Knowledge

_ORDERS = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_LOGIC = frozenset({"And", "Or", "Not"})
_MOVED = frozenset(
    {"Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Tile", "Transpose"}
)
_REDUCED = frozenset({"Shape", "Gather", "Slice", "ReduceMax", "ReduceMin", "ReduceSum"})


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What a loop's body is given: states and what replaces them, entries, and the step's number.

    ``numbers`` are all values that hold the number of the step, entries of a range among them.
    """

    body: ir.Graph
    states: Mapping[ir.Value, ir.Value]
    entries: Collection[ir.Value]
    numbers: Collection[ir.Value]

    def behind(self, values: Sequence[ir.Value], known: Knowledge) -> Region:
        """Return what values are made of."""
        stops = {*self.states, *self.entries, *self.numbers}
        return region(values, stops, known, self.body)

    def number_in(self, value: ir.Value, known: Knowledge, ends: Collection[ir.Value] = ()) -> bool:
        """Whether a value is made of the step's number, elsewhere than behind ``ends``."""
        stops = {*self.states, *self.entries, *self.numbers, *ends}
        made = region([value], stops, known, self.body)
        return bool({*made.given, *made.loose} & {*self.numbers})


def open_masks(step: Step, known: Knowledge) -> list[ir.Value]:
    """Take every mask that compares the step's number to let all steps through.

    Returns:
        The states that such masks keep; what the masks say is a constant from now on.

    Raises:
        Refused: A mask depends on the number of the step and on what the step reads or carries.
    """
    kept: list[ir.Value] = []
    masks: dict[ir.Value, bool] = {}
    ends = {resolved(after) for after in step.states.values()}
    rest: list[tuple[ir.Value, set[ir.Value]]] = []  # what states are on sequences of full length
    for before, after in step.states.items():
        node = resolved(after).producer()
        inputs = [] if node is None or node.op_type != "Where" else [*node.inputs]
        held = [i for i in (1, 2) if inputs and _is(inputs[i], before)]
        mask, other = (inputs[0], inputs[3 - held[0]]) if len(held) == 1 else (None, None)
        if mask is None or other is None or not counted(mask, step, known):
            rest.append((after, ends - {resolved(after)}))
            continue
        if masks.setdefault(mask, held == [2]) != (held == [2]):
            raise Refused("one mask keeps a state where it replaces another")
        kept.append(before)
        rest.append((other, ends))
    if kept and any(step.number_in(value, known, stops) for value, stops in rest):
        raise Refused("its state depends on the number of the step")
    for mask, truth in masks.items():
        known.assume(mask, np.array(truth))
    return kept


def blending(step: Step, known: Knowledge) -> ir.Value | None:
    """Return the only comparison of the step's number that the next states are made of."""
    made = step.behind([*step.states.values()], known)
    if not {*made.given, *made.loose} & {*step.numbers}:
        return None
    found = [
        node.outputs[0]
        for node in made.nodes
        if node.op_type in _ORDERS and counted(node.outputs[0], step, known)
    ]
    return found[0] if len(found) == 1 else None


def counted(mask: ir.Value, step: Step, known: Knowledge) -> bool:
    """Whether a mask compares the number of the step; False where it is known or only read.

    Raises:
        Refused: It depends on what the step reads or carries as well.
    """
    made = step.behind([mask], known)
    if not {*made.given, *made.loose} & {*step.numbers}:
        return False
    for value in made.given:
        if value in step.states:
            raise Refused(
                "whether it keeps its state depends on the number of the step and on the state"
            )
        if value not in step.numbers and not (value.dtype and value.dtype.is_integer()):
            raise Refused(
                "whether it keeps its state depends on the number of the step and on "
                f"{value.name!r}, which it reads"
            )
    if not _ends_sequences(mask, step, known):
        raise Refused(
            "whether it keeps its state depends on the number of the step, and not on a "
            "length that is given"
        )
    return True


def _ends_sequences(mask: ir.Value, step: Step, known: Knowledge) -> bool:
    """Whether some given length lets every step through: no clock, no step that is fixed."""
    if known.constant(mask) is not None:
        return True
    node = resolved(mask).producer()
    if node is None:
        return False
    if node.op_type in _ORDERS:
        return _compared(node, step, known)
    given = node.inputs if node.op_type in _LOGIC else node.inputs[:1]
    return node.op_type in _LOGIC | _MOVED and all(
        value is not None and _ends_sequences(value, step, known) for value in given
    )


def _compared(node: ir.Node, step: Step, known: Knowledge) -> bool:
    sides = [value for value in node.inputs if value is not None]
    numbers = [i for i, value in enumerate(sides) if _moved_from(value, step.numbers)]
    if len(sides) != 2 or len(numbers) != 1:
        return False
    other = sides[1 - numbers[0]]
    bound = known.constant(other)
    if bound is None:
        return _is_given(other, step, known)
    # No number of a step is below 0: such a comparison is true of all.
    return node.op_type == ("GreaterOrEqual", "LessOrEqual")[numbers[0]] and bool(
        (bound <= 0).all()
    )


def _moved_from(value: ir.Value, origins: Collection[ir.Value]) -> bool:
    for _ in range(64):
        value = resolved(value)
        node = value.producer()
        if value in origins or node is None or node.op_type not in _MOVED or not node.inputs:
            break
        if node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value in origins


def _is_given(value: ir.Value, step: Step, known: Knowledge) -> bool:
    """Whether a length comes from outside, moved or reduced, but never reckoned with."""
    for _ in range(64):
        value = resolved(value)
        node = value.producer()
        if value in step.numbers or known.constant(value) is not None:
            return False
        if node is None:
            return True
        if node.op_type not in _MOVED | _REDUCED or not node.inputs or node.inputs[0] is None:
            return False
        value = node.inputs[0]
    return False


def through(value: ir.Value, known: Knowledge) -> ir.Value:
    """Follow a value to where it is made, through Identity and masks that are known."""
    for _ in range(64):
        value = resolved(value)
        node = value.producer()
        mask = None if node is None or node.op_type != "Where" else known.constant(node.inputs[0])
        if node is None or mask is None or not mask.size or bool(mask.all()) != bool(mask.any()):
            break
        chosen = node.inputs[1 if mask.all() else 2]
        if chosen is None:
            break
        value = chosen
    return value


def _is(value: ir.Value | None, other: ir.Value) -> bool:
    return value is not None and resolved(value) is other
