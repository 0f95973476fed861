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
from rnnaudit.loaders.onnx.indices import WIDE
from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.loaders.onnx.values import Knowledge
from rnnaudit.model import TracedCell

_ORDERS = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_MOVED = frozenset(
    {"Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Tile", "Transpose"}
)
_REDUCED = frozenset({"Gather", "Slice", "ReduceMax", "ReduceMin", "ReduceSum"})
_NO_LENGTH = (
    "whether it keeps its state depends on the number of the step, and not on a length that is "
    "given"
)
_TURNED = (
    "it keeps its state as long as the number of the step is below a length that is given, and "
    "not past it"
)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What a loop's body is given: states and what replaces them, entries, and the step's number.

    ``numbers`` are all values that hold the number of the step, entries of a range among them,
    each with the least that it is at any step, None where that is not known. ``wholes`` are the
    values outside that entries are picked from.
    """

    body: ir.Graph
    states: Mapping[ir.Value, ir.Value]
    entries: Collection[ir.Value]
    numbers: Mapping[ir.Value, int | None]
    wholes: Collection[ir.Value] = ()

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
        truth = None if mask is None or other is None else opened(mask, step, known)
        if mask is None or other is None or truth is None:
            rest.append((after, ends - {resolved(after)}))
            continue
        if truth != (held == [2]):
            raise Refused(_TURNED)
        masks[mask] = truth
        kept.append(before)
        rest.append((other, ends))
    if kept and any(step.number_in(value, known, stops) for value, stops in rest):
        raise Refused("its state depends on the number of the step")
    for mask, truth in masks.items():
        known.assume(mask, np.array(truth))
    return kept


def blending(step: Step, known: Knowledge) -> tuple[ir.Value, bool] | None:
    """Return the only comparison of the step's number that the next states are made of.

    With it comes what it says on sequences of full length.
    """
    made = step.behind([*step.states.values()], known)
    if not {*made.given, *made.loose} & {*step.numbers}:
        return None
    found = [
        (node.outputs[0], truth)
        for node in made.nodes
        if node.op_type in _ORDERS and (truth := opened(node.outputs[0], step, known)) is not None
    ]
    return found[0] if len(found) == 1 else None


def keeps(cell: TracedCell) -> bool:
    """Whether a step leaves every state as it is: nothing is added, and all that scales is 1."""
    same = {port.name: port.name for port in cell.states}
    zero = {name for name, stored in cell.constants.items() if not stored.any()}
    one = {name for name, stored in cell.constants.items() if bool((stored == 1).all())}
    for operation in cell.operations:
        op, left = operation.op, [name for name in operation.inputs if name not in zero]
        if (op == "Mul" and len(left) < 2) or (op in {"Add", "Identity"} and not left):
            zero.update(operation.outputs)
            continue
        if op == "Mul":
            left = [name for name in left if name not in one]
        whole = op in {"Add", "Mul", "Identity"} or (op == "Sub" and left == [operation.inputs[0]])
        if whole and len(left) == 1 and left[0] in same:
            same |= dict.fromkeys(operation.outputs, same[left[0]])
    after = zip(cell.states, cell.next_states, strict=True)
    return all(same.get(name) == port.name for port, name in after)


def opened(mask: ir.Value, step: Step, known: Knowledge) -> bool | None:
    """Return what a mask says at every step that is below all lengths that are given.

    None where the mask does not compare the number of the step, or is known.

    Raises:
        Refused: It depends on what the step reads or carries as well, or on no length.
    """
    made = step.behind([mask], known)
    if not {*made.given, *made.loose} & {*step.numbers}:
        return None
    for value in made.given:
        if value in step.states:
            raise Refused(
                "whether it keeps its state depends on the number of the step and on the state"
            )
        if value not in step.numbers:
            raise Refused(
                "whether it keeps its state depends on the number of the step and on "
                f"{value.name!r}, which it reads"
            )
    truths = {*_lengths(mask, step, known).values()}
    if len(truths) != 1:
        raise Refused(_NO_LENGTH)
    (truth,) = truths
    if not truth:  # what is then not so must be so at every step
        _lengths(mask, step, known, negated=True)
    return truth


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
        length = _length(sides[1 - at], step, known)
        if length is None:
            raise Refused(_NO_LENGTH)
        return {length: below != negated}
    never_below = op.endswith("OrEqual") and not below and least is not None
    if never_below and not negated and bool((bound <= least).all()):
        return {}
    raise Refused(_NO_LENGTH)


def _length(value: ir.Value, step: Step, known: Knowledge) -> ir.Value | None:
    """Return what a length is made of; None where that is what the step reads, or is computed."""
    origin = _origin(value, _MOVED | _REDUCED)
    node = origin.producer()
    if node is not None and node.op_type == "Shape" and node.domain in STANDARD:
        return node.inputs[0]
    if node is not None or known.constant(origin) is not None or origin in step.wholes:
        return None
    return None if step.behind([value], known).given else origin


def _origin(value: ir.Value, operators: Collection[str]) -> ir.Value:
    """Follow a value back through the first inputs of operators, while whole numbers stay so."""
    for _ in range(64):
        value = resolved(value)
        node = value.producer()
        if node is None or node.op_type not in operators or node.domain not in STANDARD:
            break
        narrow = node.op_type == "Cast" and integer(node, "to", 0) not in WIDE
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
