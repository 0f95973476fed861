"""Inputs that make a truncation fail: what no measurement on data can rule out.

Depth j is refuted by one input sequence. Both runs start at s_start; the full one reads a
prefix first, the truncated one does not, and under the same next j inputs their outputs
stay more than ε apart. The prefix, the inputs and the distances after each input are the
witness. Gradient ascent looks for it inside the input domain, from seeded starts.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rnnaudit.cells.chain import Chain
from rnnaudit.estimators.rounding import rounding
from rnnaudit.results import EPSILONS, HORIZON

Norm = Literal["max", "2"]

PREFIX = 64
"""Steps of a prefix: enough to set what is to be remembered."""

POOL = 256  # random starts that are tried for each that is then improved
SMALLEST = 1e-7  # distances below this refute no ε that reports use
BYTES = 1 << 29  # activations that one gradient may keep
_TOKENS = 512  # rows of an embedding that are tried
ROUNDS = 4  # searches just beyond the depth reached so far
SLACK = 1 + 1e-9  # the relative error of a norm and of ε


@dataclass(frozen=True, slots=True, eq=False)
class Witness:
    """One input sequence and what it refutes.

    Attributes:
        prefix: Inputs [P, I] that only the full run reads.
        inputs: The next inputs [L, I], which both read.
        distances: Distance [L + 1] of their outputs after j of these, which is the error of
            the depth-j truncation at that position.
        norm: ``max`` or ``2``, over output units.
        rounding: What float64 may add to a distance; one must exceed ε by more.
    """

    prefix: Tensor
    inputs: Tensor
    distances: Tensor
    norm: Norm
    rounding: float = 0.0

    def refuted_below(self, eps: float) -> int:
        """Return one more than the largest depth that errs by more than ε; 0 where none does."""
        wrong = (self.distances > eps * SLACK + self.rounding).nonzero()
        return int(wrong.max()) + 1 if len(wrong) else 0


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One input sequence and what a stack of both directions makes of it, cut to several depths.

    Attributes:
        inputs: The sequence [T, I], aligned with time.
        depths: Depths that every recurrence was cut to, ascending.
        distances: Largest error [D] of each over all positions.
        norm: ``max`` or ``2``, over output units.
        rounding: What float64 may add to a distance; one must exceed ε by more.
    """

    inputs: Tensor
    depths: tuple[int, ...]
    distances: Tensor
    norm: Norm
    rounding: float = 0.0

    def refuted_below(self, eps: float) -> int:
        """Return one more than the largest depth that errs by more than ε; 0 where none does."""
        wrong = (self.distances > eps * SLACK + self.rounding).nonzero()
        return self.depths[int(wrong.max())] + 1 if len(wrong) else 0


@dataclass(frozen=True, slots=True, eq=False)
class Refutation:
    """What a search found: witnesses, up to a horizon of depths that it looked at.

    ``cut`` says that the time ended before the search did.
    """

    witnesses: tuple[Witness | Recording, ...]
    horizon: int
    cut: bool = False

    def best(self, eps: float) -> Witness | Recording | None:
        """Return the witness that refutes most depths for ε, or None where none refutes any."""
        found = max(self.witnesses, key=lambda w: w.refuted_below(eps), default=None)
        return found if found is not None and found.refuted_below(eps) > 0 else None

    def refuted_below(self, eps: float) -> int | None:
        """Return the depth below which no k holds for ε, or None where none is refuted."""
        witness = self.best(eps)
        return None if witness is None else witness.refuted_below(eps)

    def never_forgets(self, eps: float) -> bool:
        """Whether even the depth of the horizon is refuted, and that is as far as any search."""
        return (self.refuted_below(eps) or 0) > self.horizon >= HORIZON


def distances(chain: Chain, prefix: Tensor, inputs: Tensor, norm: Norm = "max") -> Tensor:
    """Return the distances [B, L + 1] of the two runs after each of ``inputs``.

    Args:
        chain: The system.
        prefix: Inputs [B, P, I] that only the full run reads.
        inputs: Inputs [B, L, I] that both read.
        norm: ``max`` or ``2``, over output units.
    """
    return _distances(
        chain,
        list(_walk(chain, torch.cat([prefix, inputs], 1), len(prefix[0])))[len(prefix[0]) - 1 :],
        norm,
    )


def _distances(chain: Chain, walked: Sequence[tuple[Tensor, Tensor]], norm: Norm) -> Tensor:
    """Return how far the outputs [B, L + 1] of pairs of states [B, S] are apart."""
    shown = torch.stack([chain.deviation(full - restarted) for full, restarted in walked], dim=1)
    size = shown.abs().amax(-1) if norm == "max" else shown.norm(dim=-1)
    return size.nan_to_num(nan=0.0, posinf=math.inf)


def witness(chain: Chain, prefix: Tensor, inputs: Tensor, norm: Norm = "max") -> Witness:
    """Return the witness that a prefix [P, I] and the inputs [L, I] after it are."""
    return witnesses(chain, torch.cat([prefix, inputs])[None], len(prefix), norm)[0]


def witnesses(chain: Chain, x: Tensor, prefix: int, norm: Norm) -> list[Witness]:
    """Return the witnesses that sequences x [B, T, I] are, each with ``prefix`` inputs first."""
    walked = list(_walk(chain, x, prefix))
    apart = _distances(chain, walked[prefix - 1 :], norm)
    sizes = [state.abs().amax(-1) for pair in walked for state in pair]
    largest = torch.stack([x.abs().amax((1, 2)), *sizes]).nan_to_num(nan=0.0, posinf=0.0).amax(0)
    T = x.shape[1]
    return [
        Witness(
            each[:prefix],
            each[prefix:],
            gaps,
            norm,
            rounding(chain.cells, float(size), T, chain.readout, norm),
        )
        for each, gaps, size in zip(x, apart, largest, strict=True)
    ]


def _walk(chain: Chain, x: Tensor, prefix: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the states [B, S] of the full and of the restarted run after each input.

    The restarted one waits for the end of the prefix.
    """
    B, T, _ = x.shape
    z = chain.drive(x).unbind(1)  # one gradient for all steps, where z[:, t] would have T
    restarted = chain.start.to(x).expand(B, -1)
    full = restarted
    for t in range(prefix):
        full = chain.advance(full, z[t])
        yield full, restarted
    both = torch.cat([full, restarted])
    for t in range(prefix, T):
        both = chain.advance(both, z[t].repeat(2, 1))
        yield both[:B], both[B:]


class Box:
    """Inputs [low, high], each [I], and ways to draw sequences from it."""

    def __init__(self, low: Tensor, high: Tensor, rng: torch.Generator) -> None:
        """Keep the middle and the half-width."""
        self.low, self.high, self.rng = low, high, rng
        self.middle, self.half = (low + high) / 2, (high - low) / 2

    def _uniform(self, *shape: int) -> Tensor:
        return 2 * torch.rand(*shape, generator=self.rng, dtype=torch.float64) - 1

    def draw(self, count: int, length: int) -> Tensor:
        """Draw sequences [count, length, I]: corners held for a while, constants, noise."""
        size = (count, length, len(self.low))
        jump = torch.rand(count, length, 1, generator=self.rng) < torch.tensor(
            [0.05, 0.3, 1.0]
        ).double()[torch.randint(3, (count,), generator=self.rng)].view(-1, 1, 1)
        jump[:, :1] = True
        steps = torch.arange(length).view(1, -1, 1)
        held = torch.where(jump, steps, torch.zeros_like(steps)).cummax(1).values.expand(size)
        corners = self._uniform(*size).sign().gather(1, held)
        constant = self._uniform(count, 1, len(self.low)).expand(size)
        scale = torch.rand(count, 1, 1, generator=self.rng, dtype=torch.float64)
        noise = constant * scale + 0.1 * self._uniform(*size)
        kind = torch.randint(4, (count, 1, 1), generator=self.rng)
        unit = torch.where(kind == 0, corners, self._uniform(*size))
        unit = torch.where(kind == 2, constant * scale, unit)
        unit = torch.where(kind == 3, noise, unit)
        return self.clip(self.middle + self.half * unit)

    def clip(self, x: Tensor) -> Tensor:
        """Bring inputs back into the box."""
        return torch.minimum(torch.maximum(x, self.low), self.high)

    def moved(self, x: Tensor, slope: Tensor, size: Tensor) -> Tensor:
        """Step uphill by ``size`` [B, 1, 1]: half of x along the slope's sign, half along it."""
        by_sign = (torch.arange(len(x)) % 2 == 0).view(-1, 1, 1)
        slope = slope * self.half
        direction = slope / slope.abs().amax((1, 2), keepdim=True).clamp(min=1e-300)
        direction = torch.where(by_sign, direction.sign(), direction)
        return self.clip(x + size * self.half * direction)


class Rows(Box):
    """Inputs that are rows [V, I] of an embedding, or one-hot: tokens are drawn and exchanged."""

    def __init__(self, rows: Tensor, rng: torch.Generator) -> None:
        """Keep at most ``_TOKENS`` rows, drawn at random."""
        super().__init__(rows.amin(0), rows.amax(0), rng)
        self.rows = rows[torch.randperm(len(rows), generator=rng)[:_TOKENS]]

    def draw(self, count: int, length: int) -> Tensor:
        """Draw tokens [count, length] as rows: new at each step, or held for a while."""
        token = torch.randint(len(self.rows), (count, length), generator=self.rng)
        often = torch.tensor([0.0, 0.05, 0.3, 1.0])
        rate = often[torch.randint(4, (count, 1), generator=self.rng)]
        new = torch.rand(count, length, generator=self.rng) < rate
        since = torch.where(new, torch.arange(length), 0).cummax(1).values
        return self.rows[token.gather(1, since)]

    def clip(self, x: Tensor) -> Tensor:
        """Replace each input by the nearest row."""
        near = [torch.cdist(part, self.rows).argmin(-1) for part in x]
        return self.rows[torch.stack(near)] if near else x

    def moved(self, x: Tensor, slope: Tensor, size: Tensor) -> Tensor:
        """Exchange tokens at the share ``size`` of positions where the slope promises most."""
        promise, token = (slope @ self.rows.mT).max(-1)
        promise = promise - (slope * x).sum(-1)
        rank = promise.argsort(dim=1, descending=True).argsort(dim=1)
        chosen = (rank < (size[..., 0] * x.shape[1]).ceil()) & (promise > 0)
        return torch.where(chosen.unsqueeze(-1), self.rows[token], x)


class Ascent:
    """Gradient ascent on the size of what ``gap`` maps sequences [B, T, I] to, [B, O]."""

    def __init__(self, gap: Callable[[Tensor], Tensor], box: Box, over: Callable[[], bool]) -> None:
        """Keep what every ascent shares."""
        self.gap, self.box, self.over = gap, box, over

    def value(self, x: Tensor) -> Tensor:
        """Return the log of the size [B] (2-norm, so that every unit pulls)."""
        with torch.no_grad():
            return self._value(x)

    def _value(self, x: Tensor) -> Tensor:
        square = self.gap(x).square().sum(-1)
        return 0.5 * (square + 1e-300).log().nan_to_num(nan=-math.inf, posinf=-math.inf)

    def _gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        value = self._value(x)
        (slope,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), slope.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def ascend(self, x: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Improve x by backtracking steps."""
        value, slope = self._gradient(x)
        size = x.new_full((len(x), 1, 1), 0.5)
        for _ in range(steps):
            if self.over():
                break
            tried = self.box.moved(x, slope, size)
            found, its_slope = self._gradient(tried)
            better = found > value
            x = torch.where(better.view(-1, 1, 1), tried, x)
            slope = torch.where(better.view(-1, 1, 1), its_slope, slope)
            value = torch.maximum(value, found)
            size = torch.where(better.view(-1, 1, 1), (1.3 * size).clamp(max=2), 0.5 * size)
            if float(size.max()) < 1e-4:
                break
        return x, value


def refute(
    chain: Chain,
    low: Tensor,
    high: Tensor,
    *,
    horizon: int = 256,
    restarts: int = 64,
    steps: int = 40,
    prefix: int = PREFIX,
    seed: int = 0,
    norm: Norm = "max",
    examples: Tensor | None = None,
    eps: float = 1e-3,
    budget_s: float | None = None,
    rows: Tensor | None = None,
) -> Refutation:
    """Search the box [low, high] (each [I]) for inputs that a truncation gets wrong.

    Windows of 8, 16, … inputs are tried in turn, each from the best of the one before and
    from fresh starts, as long as distances stay large enough to refute an ε; then windows
    just beyond the depth that is refuted for ``eps``. Where the two runs stay far apart by
    themselves, the window is only lengthened.

    Args:
        chain: The system, in its own reading order.
        low: Smallest value of each input.
        high: Largest value of each input.
        horizon: The largest depth that is tried.
        restarts: Sequences that are improved at once.
        steps: Ascent steps for each window.
        prefix: Inputs before the window.
        seed: For the starts.
        norm: ``max`` or ``2``, over output units.
        examples: Further starts [N, T, I], e.g. data; clipped to the box.
        eps: The ε that matters most.
        budget_s: Stop after this many seconds.
        rows: Where inputs are discrete, all that there are [V, I], inside the box; no other
            input is then tried, and of more than ``_TOKENS`` a random choice.
    """
    end = None if budget_s is None else time.monotonic() + budget_s
    rng = torch.Generator().manual_seed(seed)
    box = Box(low, high, rng) if rows is None else Rows(rows, rng)

    def last(x: Tensor) -> Tensor:
        full, restarted = deque(_walk(chain, x, prefix), maxlen=1).pop()
        return chain.deviation(full - restarted)

    search = Ascent(last, box, lambda: end is not None and time.monotonic() >= end)
    hunt = _Hunt(
        chain, prefix, search, norm=norm, effort=(restarts, steps), examples=examples, eps=eps
    )
    length = min(8, horizon)
    while not search.over():
        reached = hunt.window(length)
        if length == horizon or reached < min(SMALLEST, eps):
            break
        length = min(2 * length, horizon)
    for _ in range(ROUNDS):
        known = hunt.refutation(horizon).refuted_below(eps) or 0
        if known > horizon or search.over():
            break
        hunt.window(min(horizon, known + max(1, known // 16)))
        if (hunt.refutation(horizon).refuted_below(eps) or 0) <= known:
            break
    return replace(hunt.refutation(horizon), cut=search.over())


class _Hunt:
    """Windows of several lengths, each begun where the one before ended."""

    def __init__(
        self,
        chain: Chain,
        prefix: int,
        search: Ascent,
        *,
        norm: Norm,
        effort: tuple[int, int],
        examples: Tensor | None,
        eps: float,
    ) -> None:
        """Start with nothing found; ``effort`` is sequences at once and steps of ascent."""
        self.chain, self.prefix, self.search, self.norm = chain, prefix, search, norm
        self.epsilons = sorted({*EPSILONS, eps}, reverse=True)
        (self.restarts, self.steps), self.examples = effort, examples
        self.best = search.box.low.new_zeros(0, prefix, len(search.box.low))
        self.found: list[Witness] = []

    def window(self, length: int) -> float:
        """Search windows of this length; return the largest distance at their end."""
        search, P = self.search, self.prefix
        warm = self._fitted(self.best, length)
        if len(warm):
            apart = self._keep(warm)
            if apart > max(EPSILONS):  # they stay apart by themselves
                return apart
        count = max(4, min(self.restarts, self._affordable(length)))
        pool = [warm, search.box.draw(POOL, P + length)]
        if self.examples is not None and len(self.examples):
            pool.append(self._fitted(search.box.clip(self.examples), length)[:POOL])
        starts = torch.cat(pool)
        values = torch.cat([search.value(part) for part in starts.split(64)])
        values[: len(warm) // 2] = math.inf  # keep the best half of what was found before
        chosen = values.topk(min(count, len(starts))).indices
        x, value = search.ascend(starts[chosen], self.steps)
        self.best = x[value.topk(min(16, len(x))).indices]
        return self._keep(self.best)

    def _fitted(self, x: Tensor, length: int) -> Tensor:
        """Bring sequences [B, T, I] to P + length steps: cut the front or hold the last input."""
        T = self.prefix + length
        if x.shape[1] >= T:
            return x[:, x.shape[1] - T :] if x.shape[1] != T else x
        return torch.cat([x, x[:, -1:].expand(-1, T - x.shape[1], -1)], dim=1)

    def _affordable(self, length: int) -> int:
        """Return how many sequences one gradient can hold in memory."""
        per_step = 8 * 4 * sum(5 * cell.state_size for cell in self.chain.cells)
        return BYTES // (per_step * (self.prefix + 2 * length))

    def _keep(self, x: Tensor) -> float:
        """Add the witnesses that refute most, for any ε; return the largest final distance."""
        made = witnesses(self.chain, x, self.prefix, self.norm)
        for eps in self.epsilons:
            first = max(made, key=lambda w: w.refuted_below(eps))
            known = max((w.refuted_below(eps) for w in self.found), default=0)
            if first.refuted_below(eps) > known:
                self.found.append(first)
        return max(float(each.distances[-1]) for each in made)

    def refutation(self, horizon: int) -> Refutation:
        """Return the fewest witnesses that are best for some ε."""
        everything = Refutation(tuple(self.found), horizon)
        best = {id(w): w for eps in self.epsilons if (w := everything.best(eps)) is not None}
        return Refutation(tuple(best.values()), horizon)
