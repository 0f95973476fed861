"""Where Jacobians are sampled: states that the inputs reach, in their order and in others.

Every sampled state is reached from s_start by inputs that occur in the data, so that what is
found there is below whatever is proved of all states that such inputs can reach.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.model import Recurrence

_LENGTH = 32
"""Steps of a reordered sequence."""

_JUMPS = (0.0, 0.1, 0.5, 1.0)
"""How probable it is, by sequence, that an input gives way to another of the data."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """States s [M, S] and inputs x [M, I]: the first ``on_trajectories`` lie on data.

    The others are reached by the same inputs in another order, each held for a while.
    """

    s: Tensor
    x: Tensor
    on_trajectories: int

    @property
    def reordered(self) -> int:
        """How many states were reached by reordered inputs."""
        return len(self.s) - self.on_trajectories


def sample(recurrence: Recurrence, x: Tensor, *, count: int, seed: int) -> Samples:
    """Draw at most ``count`` states on trajectories of x [N, T, I], and on reordered inputs.

    Each state comes with an input of x that may follow it.
    """
    rng = torch.Generator().manual_seed(seed)
    x = cells.reads(recurrence, x)
    before, inputs = _visited(recurrence, x)
    chosen = torch.randperm(len(before), generator=rng)[:count]
    reached, _ = _visited(recurrence, _reordered(x.flatten(0, 1), -(-count // _LENGTH), rng))
    reached = reached[torch.randperm(len(reached), generator=rng)[:count]]
    every = x.flatten(0, 1)
    follow = every[torch.randint(len(every), (len(reached),), generator=rng)]
    return Samples(
        torch.cat([before[chosen], reached]), torch.cat([inputs[chosen], follow]), len(chosen)
    )


def _visited(recurrence: Recurrence, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the finite states before each step [M, S] on x [N, T, I], and the inputs there."""
    start = recurrence.initial.value
    after = cells.trajectory(recurrence.cell, x, start)
    before = torch.cat([start.expand(len(x), 1, -1), after[:, :-1]], dim=1).flatten(0, 1)
    finite = before.isfinite().all(-1)
    return before[finite], x.flatten(0, 1)[finite]


def _reordered(inputs: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Draw sequences [count, L, I] of inputs [M, I], from constants to shuffled ones."""
    jumps = torch.tensor(_JUMPS, dtype=torch.float64)[torch.arange(count) % len(_JUMPS)]
    jump = torch.rand(count, _LENGTH, generator=rng, dtype=torch.float64) < jumps[:, None]
    steps = torch.arange(_LENGTH).expand(count, -1)
    since = torch.where(jump, steps, 0).cummax(1).values
    drawn = torch.randint(len(inputs), (count, _LENGTH), generator=rng)
    return inputs[drawn.gather(1, since)]
