"""A plan: which recurrence is cut to which depth, on what evidence; nothing is changed yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rnnaudit.errors import UsageError
from rnnaudit.model import Model
from rnnaudit.results import Evidence, Truncation


@dataclass(frozen=True, slots=True)
class Plan:
    """Truncations, in the order of the model's recurrences, and the form they are written in."""

    truncations: tuple[Truncation, ...]
    form: Literal["window"] = "window"

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
