"""A loop's counters, run as the loop would run them: plain numbers that nothing else decides."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import torch

from rnnaudit.cells.operators import OPERATORS, Value, apply
from rnnaudit.loaders.onnx.bodies import STANDARD, plain, tensor
from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.loaders.onnx.values import Knowledge

LONGEST = 100_000
"""Operators that are run to see that a condition holds to the last step."""

DEEPEST = 200
"""Operators, one behind another, that a counter may be made of."""


class Counting:
    """Counters of one loop: ``starts`` and ``sequels`` by their names' values in the body."""

    def __init__(
        self,
        known: Knowledge,
        step: ir.Value | None,
        starts: Mapping[ir.Value, ir.Value],
        sequels: Mapping[ir.Value, ir.Value],
    ) -> None:
        """Begin before the first step; ``step`` counts from 0."""
        self._known, self._step, self._sequels = known, step, sequels
        self._cost = 0
        self._now = {before: self._evaluated(start, {}) for before, start in starts.items()}
        self._count = 0

    def value(self, value: ir.Value) -> int | None:
        """Return what a value is at this step; None where the counters do not tell."""
        found = self._evaluated(value, self._given())
        if found is None or found.batched or found.tensor.numel() != 1:
            return None
        return int(found.tensor.item())

    def advance(self) -> None:
        """Take one step."""
        memory = self._given()
        self._now = {
            before: self._evaluated(after, memory) for before, after in self._sequels.items()
        }
        self._count += 1

    def _given(self) -> dict[ir.Value, Value | None]:
        given: dict[ir.Value, Value | None] = dict(self._now)
        if self._step is not None:
            given[self._step] = Value(torch.tensor(self._count), False)
        return given

    def _evaluated(
        self, value: ir.Value, memory: dict[ir.Value, Value | None], depth: int = 0
    ) -> Value | None:
        """Evaluate a value and all that it is made of; ``memory`` keeps what was evaluated."""
        if value in memory:
            return memory[value]
        memory[value] = None  # a graph may bite its tail
        stored, node = self._known.constant(value), value.producer()
        if stored is not None:
            memory[value] = Value(tensor(stored, value.name or "a value"), False)
        elif node is None or depth > DEEPEST:
            return None
        elif node.domain in STANDARD and node.op_type in OPERATORS:
            self._cost += 1
            inputs = [
                None if v is None else self._evaluated(v, memory, depth + 1) for v in node.inputs
            ]
            if self._cost < LONGEST and all(
                found is not None or v is None for v, found in zip(node.inputs, inputs, strict=True)
            ):
                try:
                    attributes = {name: plain(a) for name, a in node.attributes.items()}
                    results = apply(node.op_type, attributes, inputs, len(node.outputs))
                except (Refused, ValueError, TypeError, IndexError, RuntimeError):
                    return None
                memory |= zip(node.outputs, results, strict=False)
        return memory[value]
