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

_MOST = 2e11  # multiplications of a layer by layer study, beyond which it says less


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
        step = sum(cells.multiplications(r.cell) for r in self.stack.recurrences())
        return float(step) * self.x.shape[1] * (depth + 1)


def study_grid(stack: Stack, x: Tensor, epsilons: Sequence[float], how: How) -> DepthStudy:
    """Truncate every recurrence to each depth, from where all have merged downward.

    A sequence is done at the first depth that exceeds the largest ε: what it needs for any
    of them is then known, and no smaller depth can change it. A grid of small depths is
    added for the curve. Where the time budget or ``_MOST`` ends the descent, depths below
    are unknown (NaN), and what a sequence needs is at most the last one that was reached.
    """
    N, T, _ = x.shape
    layerwise = _Layerwise(stack, x, how.floor)
    unknown = x.new_full((N,), math.nan)
    most = max(epsilons)
    spent = 0.0

    def evaluate(depth: int, which: Tensor) -> Tensor:
        nonlocal spent
        spent += layerwise.cost(depth) * len(which)
        gap = read(layerwise.deviations(depth, which), stack.readout)
        return unknown.index_copy(0, which, norm_of(gap, how.norm).amax(1))

    def over() -> bool:
        return spent > _MOST or how.clock.over()

    table = {0: evaluate(0, torch.arange(N))}
    top = layerwise.merged(how.clock.over)
    horizon = T
    if top is None:
        table[1], horizon = unknown, 1
    else:
        top = min(top, T - 1)
        going = torch.arange(N)
        half = (T + 1) // 2
        if (
            top > half and not how.whole
        ):  # what errs here needs more than the data can show, whatever the rest
            table[half] = evaluate(half, going)
            going = (table[half] <= most).nonzero().squeeze(1)
        shown = [k for k in grid(top) if 0 < k < top]
        for depth in range(top, 0, -1):
            if not len(going):
                break
            if over():
                table[depth] = unknown
                break
            which = torch.arange(N) if depth in shown else going
            table[depth] = found = evaluate(depth, which)
            going = going[found[going] <= most]
            how.report((top - depth) / top)
        for depth in shown:
            if depth not in table and not over():
                table[depth] = evaluate(depth, torch.arange(N))
    how.report(1.0)
    depths = sorted(table)
    return DepthStudy(
        errors=torch.stack([table[k] for k in depths], dim=1),
        depths=tuple(depths),
        lengths=(T,) * N,
        horizons=(horizon,) * N,
        norm=how.norm,
        floor=how.floor,
        every_depth=depths == list(range(len(depths))),
        resolutions=_of_layer(layerwise.last, stack.readout, how.norm),
        whole=how.whole,
    )
