"""Each recurrence truncated on its own, as a graph is cut: both directions, and stacks of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.cells.chain import Chain
from rnnaudit.depth.how import How
from rnnaudit.depth.restarts import Restarts
from rnnaudit.depth.rounding import norm_of, read, resolutions
from rnnaudit.depth.study import DepthStudy, grid
from rnnaudit.model import Layer, Readout, Recurrence, Stack
from rnnaudit.results import Norm

# Multiplications of a layer by layer study, for any and for many sequences; and for each.
_LEAST, _MOST, _EACH = 1e11, 3e11, 9e9


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

    def cost(self, depth: int) -> float:
        """Return about how many multiplications one sequence takes at a depth."""
        step = cells.multiplications(*(r.cell for r in self.stack.recurrences()))
        return float(step) * self.x.shape[1] * (depth + 1)


class _Search:
    """Errors by depth of a stack cut layer by layer, and how much finding them has cost."""

    def __init__(self, stack: Stack, x: Tensor, epsilons: Sequence[float], how: How) -> None:
        """Run the stack in full, and evaluate depth 0.

        ``shown`` are the depths of the curve, ``table`` the errors [N] by depth.
        """
        self.stack, self.how, self.N = stack, how, len(x)
        self.layerwise = _Layerwise(stack, x, how.floor)
        self.most = max(epsilons)
        self.spent, self.worth = 0.0, min(_MOST, max(_LEAST, _EACH * self.N))
        self.table: dict[int, Tensor] = {}
        self.exceeded = torch.zeros(self.N, dtype=torch.long)  # the largest depth that errs by more
        self.unknown = x.new_full((self.N,), math.nan)
        self.shown = frozenset(grid(x.shape[1]))
        self.last = x.shape[1] - 1
        self.look(0)

    def over(self) -> bool:
        """Whether the study has cost what it may."""
        return self.spent > self.worth or self.how.clock.over()

    def going(self, depth: int) -> Tensor:
        """Return the sequences that keep the largest ε at every larger depth evaluated."""
        return (self.exceeded < depth).nonzero().squeeze(1)

    def cost(self, depth: int) -> float:
        """Return about what evaluating a depth costs."""
        count = self.N if depth in self.shown else len(self.going(depth))
        return self.layerwise.cost(depth) * count

    def look(self, depth: int) -> bool:
        """Evaluate a depth on the sequences going, one of the curve on all; not where it is over.

        Returns whether it was evaluated.
        """
        if depth and self.over():
            return False
        which = torch.arange(self.N) if depth in self.shown else self.going(depth)
        self.spent += self.layerwise.cost(depth) * len(which)
        gap = read(self.layerwise.deviations(depth, which), self.stack.readout)
        found = norm_of(gap, self.how.norm).amax(1)
        self.table[depth] = self.unknown.index_copy(0, which, found)
        errs = which[~(found <= self.most)]
        self.exceeded[errs] = self.exceeded[errs].clamp(min=depth)
        return True

    def merged(self) -> int | None:
        """Return the depth at which all have merged, at most the last; None if that is dear."""
        self.spent += self.layerwise.cost(self.last) * self.N
        found = None if self.over() else self.layerwise.merged(self.how.clock.over)
        return None if found is None else min(found, self.last)

    def climb(self, eps: float, served: Tensor, end: int) -> None:
        """Evaluate the curve's depths below ``end``, up to one at which those ``served`` keep ε."""
        for depth in grid(end):
            if depth not in self.table and not self.look(depth):
                return
            self.how.report(depth / (self.last + 1))
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


def study_grid(
    stack: Stack, x: Tensor, epsilons: Sequence[float], how: How, *, glance: bool = False
) -> DepthStudy:
    """Truncate every recurrence of a stack on its own, at every depth that this can afford.

    A sequence is done at the first depth that exceeds the largest ε: what it needs for any
    of them is then known, and no smaller depth can change it. The most that the data can
    tell comes first, half of what they show. Then for each of ``epsilons``, the one that matters
    most first, the depths of the curve follow up to where all keep it, and what they need is
    enclosed. All other depths follow where the study affords them: else what a sequence needs
    is the smallest depth evaluated from which on all that were evaluated keep ε. Depths that
    were not reached are unknown (NaN). A ``glance`` takes the first look alone.
    """
    T = x.shape[1]
    search = _Search(stack, x, epsilons, how)
    table, top, horizon = search.table, None, T
    start = search.last if how.whole else min(search.last, (T + 1) // 2)
    if start and not search.look(start):
        table[1], horizon = search.unknown, 1
    else:
        served = search.going(start)  # what errs there can be served by none
        for eps in () if glance else epsilons:
            search.climb(eps, served, start)
            search.narrow(eps, served)
        top = None if glance else search.merged()
        rest = [k for k in range(top or 0, 0, -1) if k not in table]
        if search.spent + sum(search.cost(k) for k in rest) <= search.worth:
            for depth in rest:
                if not len(search.going(depth)) or not search.look(depth):
                    break
    how.report(1.0)
    depths = sorted(table)
    return DepthStudy(
        errors=torch.stack([table[k] for k in depths], dim=1),
        depths=tuple(depths),
        lengths=(T,) * search.N,
        horizons=(horizon,) * search.N,
        norm=how.norm,
        floor=how.floor,
        every_depth=top is not None and table.keys() >= set(range(top + 1)),
        resolutions=_of_layer(search.layerwise.last, stack.readout, how.norm),
        whole=how.whole,
    )
