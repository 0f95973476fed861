"""Inputs that a stack of both directions gets wrong when each recurrence is cut to k.

Such a stack has no state that a prefix could set: an output reads what comes before it and
what comes after. Depth k cuts every recurrence to the k inputs that it read last, on its
own, and is refuted by one sequence whose outputs it moves by more than ε, at any position.

The ascent looks at a window of 2k − 1 inputs instead, with recorded inputs on both sides or
with none: what the output in its middle differs by. For one layer that is the error of depth
k; for several it is cheaper, and each sequence found is then judged by the cut itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.estimators.adversary import (
    BYTES,
    PREFIX,
    ROUNDS,
    SLACK,
    SMALLEST,
    Ascent,
    Box,
    Norm,
    Recording,
    Refutation,
    Rows,
)
from rnnaudit.estimators.rounding import rounding
from rnnaudit.model import Recurrence, Stack
from rnnaudit.results import EPSILONS

AFFORDABLE = 4e10
"""Multiplications that judging one sequence at the largest depth may cost."""

WORTH = 3e11
"""What a search may cost in multiplications, so that it ends in about a minute on two cores."""

LEAST = 8
"""The shortest horizon that is worth a search."""

_DRAWN = 32  # random starts of each window
_JUDGED = 2  # sequences of each window that are cut to depths


def within_reach(stack: Stack, horizon: int, steps: int | None = None) -> int:
    """Return the largest depth up to ``horizon`` that can be judged; 0 where none is.

    No sequence has more than ``steps``, where that is given.
    """
    step = cells.multiplications(*(r.cell for r in stack.recurrences()))
    while horizon >= LEAST and (
        step * horizon * _steps(horizon) > AFFORDABLE
        or (steps is not None and _steps(horizon) > steps)
    ):
        horizon = horizon * 3 // 4
    return horizon if horizon >= LEAST else 0


def refute_both_ways(
    stack: Stack,
    low: Tensor,
    high: Tensor,
    *,
    horizon: int,
    restarts: int = 8,
    steps: int = 12,
    seed: int = 0,
    norm: Norm = "max",
    examples: Tensor | None = None,
    eps: float = 1e-3,
    budget_s: float | None = None,
    rows: Tensor | None = None,
) -> Refutation:
    """Search the box [low, high] (each [I]) for sequences that a cut to some depth gets wrong.

    Windows of 8, 16, … inputs on each side are tried in turn, as `refute` does; the arguments
    are those of it, ``examples`` [N, T, I] aligned with time.
    """
    end = None if budget_s is None else time.monotonic() + budget_s
    rng = torch.Generator().manual_seed(seed)
    box = Box(low, high, rng) if rows is None else Rows(rows, rng)
    hunt = _Hunt(stack, box, norm=norm, effort=(restarts, steps), examples=examples, end=end)
    length = min(8, horizon)
    while not hunt.over():
        reached = hunt.window(length, horizon, eps)
        if length == horizon or reached < SMALLEST:
            break
        length = min(2 * length, horizon)
    for _ in range(ROUNDS):
        known = hunt.known(eps)
        if known > horizon or hunt.over():
            break
        hunt.window(max(1, min(horizon, known + max(1, known // 16))), horizon, eps)
        if hunt.known(eps) <= known:
            break
    return Refutation(hunt.recordings(eps), horizon, cut=hunt.late())


def _beyond(k: int) -> int:
    """Return the recorded inputs on either side of a window of k on each side."""
    return min(PREFIX, 2 * k)


def _steps(k: int) -> int:
    """Return the steps of a sequence that holds such a window in its middle."""
    return 2 * (_beyond(k) + k) - 1


def _cost(stack: Stack, steps: int, rows: int) -> float:
    """Return what ``steps`` of all recurrences cost, each on so many states at once."""
    return cells.effort((r.cell for r in stack.recurrences()), steps, rows)


def _apart(stack: Stack, x: Tensor, k: int) -> Tensor:
    """Return by how much the middle output [B, O] of x [B, T, I] differs from the window's."""
    past = _beyond(k)
    whole, inside = x, x[:, past : past + 2 * k - 1]
    for layer in stack.layers:
        last = layer is stack.layers[-1]
        runs = [_run(r, whole, inside, past, middle=last) for r in layer.recurrences]
        whole, inside = (torch.cat(parts, dim=-1) for parts in zip(*runs, strict=True))
    gap = whole - inside
    return gap if stack.readout is None else gap @ stack.readout.A.mT


def _run(
    recurrence: Recurrence, whole: Tensor, inside: Tensor, past: int, *, middle: bool
) -> tuple[Tensor, Tensor]:
    """Return the outputs on a sequence and on the window inside it, or those in the middle only.

    Nothing is written in place, so that the gradient is cheap.
    """
    cell, B = recurrence.cell, len(whole)
    z, z_inside = (cells.drive(cell, cells.reads(recurrence, x)).unbind(1) for x in (whole, inside))
    start = recurrence.initial.value.to(whole).expand(B, -1)
    s, before = start, []
    for t in range(past):
        s = cells.advance(cell, s, z[t])
        before.append(s)
    both, during = torch.cat([s, start]), []
    shared = (len(z_inside) + 1) // 2 if middle else len(z_inside)
    for t in range(shared):
        both = cells.advance(cell, both, torch.cat([z[past + t], z_inside[t]]))
        during.append(both)
    if middle:
        return cells.output(cell, both[:B]), cells.output(cell, both[B:])
    s, after = both[:B], []
    for t in range(past + shared, len(z)):
        s = cells.advance(cell, s, z[t])
        after.append(s)
    runs = [*before, *(both[:B] for both in during), *after], [both[B:] for both in during]
    first, second = (
        cells.reads(recurrence, cells.output(cell, torch.stack(states, dim=1))) for states in runs
    )
    return first, second


@dataclass(slots=True, eq=False)
class _Judged:
    """A sequence [1, T, I], its outputs in full, and the errors of depths that were tried."""

    stack: Stack
    norm: Norm
    x: Tensor
    full: Tensor
    rounding: float = 0.0
    errors: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, stack: Stack, norm: Norm, x: Tensor) -> _Judged:
        """Run the stack in full, and bound what rounding adds to the errors of its cuts."""
        y, largest = x, float(x.abs().max())
        for layer in stack.layers:
            y = cells.run_layer(layer, y)
            largest = max(largest, float(y.abs().nan_to_num(nan=0.0, posinf=0.0).max()))
        every = [r.cell for r in stack.recurrences()]
        may_add = rounding(every, largest, x.shape[1], stack.readout, norm)
        return cls(stack, norm, x, cells.readout(stack, y), may_add)

    def errs(self, error: float, eps: float) -> bool:
        """Whether an error is more than ε and rounding."""
        return error > eps * SLACK + self.rounding

    def error(self, depth: int) -> float:
        """Return the largest error over positions with every recurrence cut to ``depth``."""
        if depth not in self.errors:
            depths = {r.label: depth for r in self.stack.recurrences()}
            gap = cells.run_stack(self.stack, self.x, depths) - self.full
            size = gap.abs().amax(-1) if self.norm == "max" else gap.norm(dim=-1)
            # Where both overflow there is no evidence.
            self.errors[depth] = float(size.nan_to_num(nan=0.0, posinf=0.0).max())
        return self.errors[depth]

    def refuted_below(self, eps: float) -> int:
        """Return one more than the largest depth tried that errs by more than ε; 0 for none."""
        return max((k + 1 for k, e in self.errors.items() if self.errs(e, eps)), default=0)

    def raise_to(
        self, eps: float, known: int, horizon: int, afford: Callable[[float], bool]
    ) -> None:
        """Look for the largest depth from ``known`` to ``horizon`` that errs, if that one does.

        Errors mostly fall with the depth, which halving relies on; each it tries is judged,
        while ``afford`` allows its cost.
        """
        low, high = known, horizon + 1
        if low > horizon or not self._found(low, eps, afford):
            return
        while high - low > 1:
            middle = min((low + high) // 2, 2 * low + 8)
            low, high = (middle, high) if self._found(middle, eps, afford) else (low, middle)

    def _found(self, depth: int, eps: float, afford: Callable[[float], bool]) -> bool:
        """Say whether a depth is found to err by more than ε; not where that is too dear."""
        if depth not in self.errors and not afford(_cost(self.stack, depth, self.x.shape[1])):
            return False
        return self.errs(self.error(depth), eps)

    def recording(self) -> Recording:
        """Return the sequence as a witness."""
        depths = tuple(sorted(self.errors))
        distances = torch.tensor([self.errors[k] for k in depths], dtype=torch.float64)
        return Recording(self.x[0], depths, distances, self.norm, self.rounding)


def recording(stack: Stack, x: Tensor, depth: int, norm: Norm) -> Recording:
    """Cut a stack to one depth on a sequence [T, I]."""
    judged = _Judged.of(stack, norm, x[None])
    judged.error(depth)
    return judged.recording()


class _Hunt:
    """Windows of several lengths, each begun where the one before ended."""

    def __init__(
        self,
        stack: Stack,
        box: Box,
        *,
        norm: Norm,
        effort: tuple[int, int],
        examples: Tensor | None,
        end: float | None,
    ) -> None:
        """Start with nothing found; ``effort`` is sequences at once and steps of ascent."""
        self.stack, self.box, self.norm, self.end = stack, box, norm, end
        self.restarts, self.steps = effort
        self.examples = None if examples is None else box.clip(examples[: 4 * _DRAWN])
        self.best = box.low.new_zeros(0, 1, len(box.low))
        self.judged: list[_Judged] = []
        self.worth = WORTH

    def late(self) -> bool:
        """Whether the time has ended."""
        return self.end is not None and time.monotonic() >= self.end

    def over(self) -> bool:
        """Whether the time has ended, or the search has cost what it is worth."""
        return self.worth <= 0 or self.late()

    def afford(self, cost: float) -> bool:
        """Take a judgement's multiplications from what is left, or say that it is over."""
        if self.over():
            return False
        self.worth -= cost
        return True

    def known(self, eps: float) -> int:
        """Return the depth below which none holds for ε, as far as was found."""
        return max((each.refuted_below(eps) for each in self.judged), default=0)

    def window(self, k: int, horizon: int, eps: float) -> float:
        """Search windows of k inputs on each side; return the largest difference found."""
        T = _steps(k)

        def gap(x: Tensor) -> Tensor:
            self.worth -= _cost(self.stack, T, 2 * len(x)) * (3 if x.requires_grad else 1)
            return _apart(self.stack, x, k)

        search = Ascent(gap, self.box, self.over)
        warm = _fitted(self.best, T)
        if len(warm):
            apart = search.value(warm).exp()
            if float(apart.max()) > max(EPSILONS):  # they stay apart by themselves
                self.best = warm[apart.argsort(descending=True)]
                self._judge(self.best[:1], horizon, eps)
                return float(apart.max())
        pool = [warm, self.box.draw(_DRAWN, T)]
        if self.examples is not None and len(self.examples):
            pool.append(_fitted(self.examples, T)[:_DRAWN])
        starts = torch.cat(pool)
        values = torch.cat([search.value(part) for part in starts.split(64)])
        values[: len(warm) // 2] = torch.inf  # keep the best half of what was found before
        chosen = values.topk(min(self._affordable(T), len(starts))).indices
        x, value = search.ascend(starts[chosen], self.steps)
        order = value.argsort(descending=True)
        self.best = x[order]
        for each in self.best[:_JUDGED]:
            self._judge(each[None], horizon, eps)
        return float(value.max().exp())

    def _affordable(self, T: int) -> int:
        """Return how many sequences one gradient can hold in memory, up to the restarts."""
        per_step = 8 * 4 * sum(5 * r.cell.state_size for r in self.stack.recurrences())
        return max(2, min(self.restarts, BYTES // (per_step * 2 * T)))

    def _judge(self, x: Tensor, horizon: int, eps: float) -> None:
        """Cut the stack to the depths that this sequence may be the first to refute."""
        judged = _Judged.of(self.stack, self.norm, x)
        for each in sorted({*EPSILONS, eps}):  # the smallest first: it needs the largest depth
            if self.over():
                break
            judged.raise_to(each, self.known(each), horizon, self.afford)
        if judged.errors:
            self.judged.append(judged)

    def recordings(self, eps: float) -> tuple[Recording, ...]:
        """Return the fewest sequences that are best for some ε."""
        best = {
            id(top): top
            for each in (*EPSILONS, eps)
            if self.judged and (top := _top(self.judged, each)).refuted_below(each)
        }
        return tuple(each.recording() for each in best.values())


def _top(judged: Sequence[_Judged], eps: float) -> _Judged:
    return max(judged, key=lambda each: each.refuted_below(eps))


def _fitted(x: Tensor, T: int) -> Tensor:
    """Bring sequences [B, t, I] to T steps around their middle: cut, or hold the ends."""
    t = x.shape[1]
    first = (t - T) // 2
    places = torch.arange(first, first + T).clamp(0, t - 1)
    return x[:, places]
