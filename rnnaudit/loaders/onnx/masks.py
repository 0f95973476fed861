"""Masks that end sequences: a step that keeps its state once its number passes a length.

Whether the state is kept is then decided outside the recurrence. On sequences of full
length it never is: the mask is taken to let every step through, and a finding says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from rnnaudit.loaders.onnx.bodies import STANDARD, Region, region, resolved
from rnnaudit.loaders.onnx.contents import integer
from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.loaders.onnx.values import Knowledge

_ORDERS = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_MOVED = frozenset(
    {"Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Tile", "Transpose"}
)
_REDUCED = frozenset({"Shape", "Gather", "Slice", "ReduceMax", "ReduceMin", "ReduceSum"})
_WIDE = frozenset(
    kind.value
    for kind in (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE)
)
"""Types in which the numbers of steps keep their order."""

_NO_LENGTH = (
    "whether it keeps its state depends on the number of the step, and not on a length that is "
    "given"
)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What a loop's body is given: states and what replaces them, entries, and the step's number.

    ``numbers`` are all values that hold the number of the step, entries of a range among them,
    each with the least that it is at any step, None where that is not known.
    """

    body: ir.Graph
    states: Mapping[ir.Value, ir.Value]
    entries: Collection[ir.Value]
    numbers: Mapping[ir.Value, int | None]

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
    if not _lengths(mask, step, known):
        raise Refused(_NO_LENGTH)
    return True


def _lengths(
    mask: ir.Value, step: Step, known: Knowledge, *, negated: bool = False
) -> dict[ir.Value, bool]:
    """Say of each length that is given whether the step's number is below it where a mask holds.

    Each may be chosen, so that the mask can hold at every step, and can hold at none.

    Raises:
        Refused: None can be: the mask is a clock, or ends at a step that is fixed.
    """
    node = resolved(mask).producer()
    op = "" if node is None or node.domain not in STANDARD else node.op_type
    given = [] if node is None else [value for value in node.inputs if value is not None]
    if op in _ORDERS and len(given) == 2:
        return _compared(op, (given[0], given[1]), step, known, negated=negated)
    if op == "Not" or op in _MOVED:
        return _lengths(given[0], step, known, negated=negated != (op == "Not"))
    if op not in {"And", "Or"}:
        raise Refused(_NO_LENGTH)
    found: dict[ir.Value, bool] = {}
    for value in given:
        part = _lengths(value, step, known, negated=negated)
        if any(found.get(length, below) != below for length, below in part.items()):
            raise Refused(_NO_LENGTH)
        if op == "Or" and not part:  # what holds at every step leaves the others nothing to say
            raise Refused(_NO_LENGTH)
        found |= part
    return found


def _compared(
    op: str, sides: tuple[ir.Value, ir.Value], step: Step, known: Knowledge, *, negated: bool
) -> dict[ir.Value, bool]:
    """Do so of a comparison; one that holds at every step says nothing of a length."""
    numbers = [_origin(side, _MOVED) for side in sides]
    counting = [i for i, number in enumerate(numbers) if number in step.numbers]
    if len(counting) != 1:
        raise Refused(_NO_LENGTH)
    (at,) = counting
    below = op.startswith("Less") == (at == 0)
    bound, least = known.constant(sides[1 - at]), step.numbers[numbers[at]]
    if bound is None:
        length = _origin(sides[1 - at], _MOVED | _REDUCED)
        if length.producer() is None and known.constant(length) is None:
            return {length: below != negated}
        raise Refused(_NO_LENGTH)
    never_below = op.endswith("OrEqual") and not below and least is not None
    if never_below and not negated and bool((bound <= least).all()):
        return {}
    raise Refused(_NO_LENGTH)


def _origin(value: ir.Value, operators: Collection[str]) -> ir.Value:
    """Follow a value back through the first inputs of operators, while whole numbers stay so."""
    for _ in range(64):
        value = resolved(value)
        node = value.producer()
        if node is None or node.op_type not in operators or node.domain not in STANDARD:
            break
        narrow = node.op_type == "Cast" and integer(node, "to", 0) not in _WIDE
        if narrow or not node.inputs or node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value


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
