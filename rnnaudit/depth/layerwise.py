"""Each recurrence truncated on its own, as a graph is cut: both directions, and stacks of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.cells.chain import Chain
from rnnaudit.depth.how import Clock, How
from rnnaudit.depth.restarts import Restarts
from rnnaudit.depth.rounding import norm_of, read, resolutions
from rnnaudit.depth.study import DepthStudy, grid
from rnnaudit.model import Layer, Readout, Recurrence, Stack
from rnnaudit.results import Norm

# What a layer by layer study may cost in multiplications, at least, at most, and for each sequence:
# 5e11 take about a minute on one core.
_LEAST, _MOST, _EACH = 2e11, 5e11, 2e10


class _Direction:
    """One recurrence of a layer, each output truncated to the same depth."""

    def __init__(self, recurrence: Recurrence, x: Tensor, floor: float) -> None:
        """Run the true trajectory of inputs x [N, T, I], aligned with time."""
        self.recurrence = recurrence
        reading = cells.reads(recurrence, x)
        self.restarts = Restarts(Chain.of([recurrence]), reading, floor)

    def gap(self, depth: int) -> Tensor:
        """Return the outputs' deviations [N, T, H] at a depth not below the one before."""
        self.restarts.advance(depth)
        return cells.reads(self.recurrence, self.restarts.deviations())

    @property
    def true(self) -> Tensor:
        """The outputs [N, T, H] of the full run."""
        h = cells.output(self.recurrence.cell, self.restarts.true)
        h = h.reshape(self.restarts.T, self.restarts.N, -1).transpose(0, 1)
        return cells.reads(self.recurrence, h)

    def advance(self) -> None:
        """Bring every restart one step further."""
        self.restarts.advance(self.restarts.depth + 1)

    @property
    def merged(self) -> bool:
        """Whether no restart is left that differs from the full run."""
        return not self.restarts.blocks


def study_layer(layer: Layer, readout: Readout | None, x: Tensor, how: How) -> DepthStudy:
    """Truncate both directions of one layer to every depth, one sweep for each."""
    N, T, _ = x.shape
    directions = [_Direction(recurrence, x, how.floor) for recurrence in layer.recurrences]
    errors: list[Tensor] = []
    settled = False
    while not errors or not (settled or how.clock.over()):
        gap = torch.cat([d.gap(len(errors)) for d in directions], dim=-1)
        errors.append(norm_of(read(gap, readout), how.norm).amax(1))
        settled = len(errors) == T or all(d.merged for d in directions)
        how.report(1.0 if settled else len(errors) / T)
    return DepthStudy(
        errors=torch.stack(errors, dim=1),
        depths=tuple(range(len(errors))),
        lengths=(T,) * N,
        horizons=(T if settled else len(errors) - 1,) * N,
        norm=how.norm,
        floor=how.floor,
        resolutions=_of_layer(directions, readout, how.norm),
        whole=how.whole,
    )


def _of_layer(
    directions: Sequence[_Direction], readout: Readout | None, norm: Norm
) -> tuple[float, ...]:
    """Return the resolutions of a layer's output."""
    states = [d.restarts.true.unflatten(0, (d.restarts.T, d.restarts.N)) for d in directions]
    units = sum(d.recurrence.cell.hidden_size for d in directions)
    return resolutions(torch.cat(states, -1), units, readout, norm)


class _Layerwise:
    """A stack of which each recurrence is truncated on its own, all to the same depth."""

    def __init__(self, stack: Stack, x: Tensor, floor: float) -> None:
        """Run all layers in full on inputs x [N, T, I]."""
        self.stack, self.x, self.floor = stack, x, floor
        self.inputs = []
        for layer in range(len(stack.layers)):
            self.inputs.append(x)
            self.last = self._directions(layer, x)
            x = torch.cat([d.true for d in self.last], dim=-1)
        self.full = x

    def _directions(self, layer: int, x: Tensor) -> list[_Direction]:
        return [_Direction(r, x, self.floor) for r in self.stack.layers[layer].recurrences]

    def merged(self, over: Callable[[], bool]) -> int | None:
        """Return a depth at which no restart of any recurrence is left; None if time ends.

        From there on every layer reads and gives what the full run does.
        """
        depth = 0
        for layer, x in enumerate(self.inputs):
            for direction in self._directions(layer, x):
                while not direction.merged:
                    if over():
                        return None
                    direction.advance()
                depth = max(depth, direction.restarts.depth)
        return depth

    def deviations(self, depth: int, which: Tensor) -> Tensor:
        """Return the gaps [n, T, F] of the last layer's outputs, on the sequences ``which``."""
        x = self.x[which]
        for layer in range(len(self.stack.layers)):
            parts = self._directions(layer, x)
            x = torch.cat([d.true + d.gap(depth) for d in parts], dim=-1)
        return x - self.full[which]

    def cost(self, depth: int, sequences: int) -> float:
        """Return about what a depth costs: the full run, and every restart's steps."""
        T, all_cells = self.x.shape[1], [r.cell for r in self.stack.recurrences()]
        restarts = cells.effort(all_cells, depth, T * sequences)
        return cells.effort(all_cells, T, sequences) + restarts


class Search:
    """Errors by depth of a stack cut layer by layer, and how much finding them has cost.

    Every recurrence is truncated on its own, at every depth that this can afford. A sequence is
    done at the first depth that exceeds the largest ε: what it needs for any of them is then
    known, and no smaller depth can change it. Depths that were not reached are unknown (NaN).
    """

    def __init__(self, stack: Stack, x: Tensor, epsilons: Sequence[float], how: How) -> None:
        """Run the stack in full, and evaluate depth 0 and the most that the data can tell.

        That is half of what they show. ``shown`` are the depths of the curve, ``table`` the
        errors [N] by depth.
        """
        self.stack, self.how, self.N = stack, how, len(x)
        self.layerwise = _Layerwise(stack, x, how.floor)
        self.epsilons, self.most = epsilons, max(epsilons)
        self.spent, self.worth = 0.0, min(_MOST, max(_LEAST, _EACH * self.N))
        self.table: dict[int, Tensor] = {}
        self.exceeded = torch.zeros(self.N, dtype=torch.long)  # the largest depth that errs by more
        self.unknown = x.new_full((self.N,), math.nan)
        self.T = x.shape[1]
        self.shown = frozenset(grid(self.T))
        self.last = self.T - 1
        self.start = self.last if how.whole else min(self.last, (self.T + 1) // 2)
        self.top: int | None = None  # the depth at which all have merged
        self.look(0)
        self.begun = not self.start or self.look(self.start)

    def over(self) -> bool:
        """Whether the study has cost what it may."""
        return self.spent > self.worth or self.how.clock.over()

    def going(self, depth: int) -> Tensor:
        """Return the sequences that keep the largest ε at every larger depth evaluated."""
        return (self.exceeded < depth).nonzero().squeeze(1)

    def cost(self, depth: int) -> float:
        """Return about what evaluating a depth costs."""
        count = self.N if depth in self.shown else len(self.going(depth))
        return self.layerwise.cost(depth, count)

    def look(self, depth: int) -> bool:
        """Evaluate a depth on the sequences going, one of the curve on all; not where it is over.

        Returns whether it was evaluated.
        """
        if depth and self.over():
            return False
        which = torch.arange(self.N) if depth in self.shown else self.going(depth)
        self.spent += self.layerwise.cost(depth, len(which))
        gap = read(self.layerwise.deviations(depth, which), self.stack.readout)
        found = norm_of(gap, self.how.norm).amax(1)
        self.table[depth] = self.unknown.index_copy(0, which, found)
        errs = which[~(found <= self.most)]
        self.exceeded[errs] = self.exceeded[errs].clamp(min=depth)
        return True

    def merged(self) -> int | None:
        """Return the depth at which all have merged, at most the last; None if that is dear."""
        self.spent += self.layerwise.cost(self.last, self.N)
        found = None if self.over() else self.layerwise.merged(self.how.clock.over)
        return None if found is None else min(found, self.last)

    def climb(self, eps: float, served: Tensor, end: int) -> None:
        """Evaluate the curve's depths below ``end``, up to one at which those ``served`` keep ε."""
        for depth in grid(end):
            if depth not in self.table and not self.look(depth):
                return
            self.how.report(depth / self.T)
            if not self._errs(depth, eps, served):
                return

    def _errs(self, depth: int, eps: float, which: Tensor) -> bool:
        return not bool((self.table[depth][which] <= eps).all())

    def narrow(self, eps: float, served: Tensor) -> None:
        """Halve between the depths that enclose what the sequences ``served`` need for ε."""
        low = max((k for k in self.table if self._errs(k, eps, served)), default=None)
        high = min((k for k in self.table if low is not None and k > low), default=None)
        while low is not None and high is not None and high - low > 1:
            middle = (low + high) // 2
            if not self.look(middle):
                return
            low, high = (middle, high) if self._errs(middle, eps, served) else (low, middle)

    def study(self) -> DepthStudy:
        """Return what is known so far."""
        table = self.table if self.begun else {**self.table, 1: self.unknown}
        depths = sorted(table)
        every = self.top is not None and table.keys() >= set(range(self.top + 1))
        return DepthStudy(
            errors=torch.stack([table[k] for k in depths], dim=1),
            depths=tuple(depths),
            lengths=(self.T,) * self.N,
            horizons=(self.T if self.begun else 1,) * self.N,
            norm=self.how.norm,
            floor=self.how.floor,
            every_depth=every,
            resolutions=_of_layer(self.layerwise.last, self.stack.readout, self.how.norm),
            whole=self.how.whole,
        )

    def finish(self, clock: Clock) -> DepthStudy:
        """Evaluate the other depths that decide, in the time that a clock leaves.

        For each ε, the one that matters most first, the depths of the curve follow up to where all
        keep it, and what they need is enclosed. All other depths follow where the study affords
        them: else what a sequence needs is the smallest depth evaluated from which on all that were
        evaluated keep ε.
        """
        self.how = replace(self.how, clock=clock)
        self.begun = self.begun or self.look(self.start)
        if self.begun:
            served = self.going(self.start)  # what errs there can be served by none
            for eps in self.epsilons:
                self.climb(eps, served, self.start)
                self.narrow(eps, served)
            self.top = self.merged()
            self._complete()
        self.how.report(1.0)
        return self.study()

    def _complete(self) -> None:
        """Evaluate all depths below the one at which all have merged, where that is affordable."""
        rest = [k for k in range(self.top or 0, 0, -1) if k not in self.table]
        if self.spent + sum(self.cost(k) for k in rest) > self.worth:
            return
        for depth in rest:
            if not len(self.going(depth)) or not self.look(depth):
                return
