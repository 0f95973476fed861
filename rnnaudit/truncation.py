"""A plan: which recurrence is cut to which depth, on what evidence; nothing is changed yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rnnaudit.errors import UsageError
from rnnaudit.model import Model
from rnnaudit.results import Evidence, Truncation

FormName = Literal["window", "chunk", "last", "filter"]

ALIKE = 1.1
"""Estimated times within this factor of one another tell no difference."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a truncated layer is written.

    Attributes:
        name: ``window``: k layers over the whole sequence, each shifting the state by a step.
            ``chunk``: blocks of steps side by side in the batch, each warmed up by k − 1 steps.
            ``last``: only as many of the last steps as the graph's own use of them needs.
            ``filter``: one convolution of k taps, for a linear cell.
        block: Steps C that each block of the chunk form gives; 1 in the others.
        keep_ops: Whether chunk and last run the runtime's own LSTM, GRU or RNN operator.
        final: Of how many final steps the last form gives the outputs.
        past: Whether the layer keeps its last k − 1 inputs from call to call.
        why: What chose it.
        cost: Estimated microseconds that it takes, for the steps that are expected.
        operator: The same of the recurrence as it was; None where it was no operator.
    """

    name: FormName
    block: int = 1
    keep_ops: bool = False
    final: int = 1
    past: bool = False
    why: str = ""
    cost: float | None = None
    operator: float | None = None

    def describe(self) -> str:
        """Name the form in a few words."""
        kind = f"chunk of {self.block}" if self.name == "chunk" else self.name
        if self.past:
            kind = "streaming"
        return f"{kind} with recurrent operators" if self.keep_ops else kind


WINDOW = Form("window")


@dataclass(frozen=True, slots=True)
class Shape:
    """How the model is to be written: the form that is wanted of every layer, and the rest.

    Attributes:
        form: ``auto`` takes ``last`` where the graph reads final outputs only, else what
            costs least.
        keep_ops: Let chunk and last run the runtime's own recurrent operators.
        steps: Length of the sequences that the model will run on, where it is known.
        opset: Opset of the written model; without, that of the source.
        guard: Whether the model tells how much of its depth live inputs use.
        streaming: Whether the model takes a block of new steps per call and keeps the inputs
            before them in a buffer, which comes in and goes out.
    """

    form: FormName | Literal["auto"] = "auto"
    keep_ops: bool = False
    steps: int | None = None
    opset: int | None = None
    guard: bool = False
    streaming: bool = False


AUTO = Shape()


@dataclass(frozen=True, slots=True)
class Plan:
    """Truncations, in the order of the model's recurrences."""

    truncations: tuple[Truncation, ...]

    @property
    def depths(self) -> Mapping[str, int]:
        """Depth by ``Recurrence.label``, as export and the cells take it."""
        return {t.recurrence: t.depth for t in self.truncations}

    @property
    def evidence(self) -> Evidence | None:
        """The weakest evidence that the plan rests on; None for an empty plan."""
        order: tuple[Evidence, ...] = ("chosen", "synthetic", "measured", "proved")
        return min((t.evidence for t in self.truncations), key=order.index, default=None)

    def metadata(self, eps: float) -> Mapping[str, str]:
        """Return what the written model says of how it was made."""
        return {
            "eps": repr(eps),
            "evidence": json.dumps({t.recurrence: t.evidence for t in self.truncations}),
        }


def plan(model: Model, depths: Mapping[str, int], evidence: Mapping[str, Evidence]) -> Plan:
    """Cut recurrences to the given depths; both directions of a layer go together.

    Args:
        model: The model; it is not touched.
        depths: Depth by ``Recurrence.label``; a recurrence without one stays.
        evidence: What chose each depth, by the same labels.

    Raises:
        UsageError: A depth is below 1, names no recurrence, or is given for one direction of a
            layer only.
    """
    known = [r.label for r in model.recurrences()]
    for label, depth in depths.items():
        if label not in known:
            raise UsageError(f"a depth must name one of {', '.join(known)}, got {label}")
        if depth < 1:
            raise UsageError(
                f"a depth must be at least 1, got {depth} for {label}",
                help="a model of depth k sees its last k inputs",
            )
    for stack in model.stacks:
        for layer in stack.layers:
            missing = [r.label for r in layer.recurrences if r.label not in depths]
            if missing and len(missing) < len(layer.recurrences):
                raise UsageError(
                    f"both directions of a layer need a depth, got none for {missing[0]}",
                    help="name both, or leave the layer as it is",
                )
    return Plan(tuple(Truncation(n, depths[n], evidence[n]) for n in known if n in depths))
