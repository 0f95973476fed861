"""Where Jacobians are sampled: states that the data reach, and the box that no state leaves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.cells.activations import value
from rnnaudit.model import Activation, Cell, ElmanCell, GRUCell, LSTMCell, Recurrence

_BOUNDED = frozenset({"tanh", "sigmoid", "hardsigmoid", "softsign", "scaledtanh"})
_GATES = frozenset({"sigmoid", "hardsigmoid"})  # values in [0, 1]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """States s [M, S] and inputs x [M, I]: the first ``on_trajectories`` lie on data.

    The others were drawn from an invariant box of the cell; where none is known there are
    no others.
    """

    s: Tensor
    x: Tensor
    on_trajectories: int

    @property
    def in_box(self) -> int:
        """How many states were drawn from the invariant box."""
        return len(self.s) - self.on_trajectories


def _range(activation: Activation, clip: float | None) -> tuple[float, float] | None:
    """Return the values that a monotone activation can take, or None where it is unbounded."""
    if clip is None and activation.name not in _BOUNDED:
        return None
    if activation.name == "thresholdedrelu":
        return None
    end = 1e300 if clip is None else clip
    ends = value(activation, torch.tensor([-end, end], dtype=torch.float64))
    return float(ends.min()), float(ends.max())


def box(recurrence: Recurrence, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return an invariant box [low, high] of the states under inputs x [N, T, I], or None.

    Elman: the activation's range. GRU: that of the candidate, h being a mean of it and the
    state before. LSTM: |c| ≤ sup i|g| / (1 − sup f), |h| ≤ sup o |tanh c| (through a
    projection by its row sums), infinite where f rounds to 1. Each is widened to hold
    s_start.
    """
    cell = recurrence.cell
    start = recurrence.initial.value
    reach = _reach(cell, x, start)
    if reach is None:
        return None
    return torch.minimum(reach[0], start), torch.maximum(reach[1], start)


def _reach(cell: Cell, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor] | None:
    if isinstance(cell, ElmanCell):
        ends = _range(cell.activation, cell.clip)
    elif isinstance(cell, GRUCell):
        ends = _range(cell.candidate, cell.clip) if cell.gate.name in _GATES else None
    else:
        return _lstm_reach(cell, x, start)
    if ends is None:
        return None
    return torch.full_like(start, ends[0]), torch.full_like(start, ends[1])


def _lstm_reach(cell: LSTMCell, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor] | None:
    candidate, squash = _range(cell.candidate, cell.clip), _range(cell.squash, None)
    if candidate is None or squash is None or cell.gate.name not in _GATES:
        return None
    P = cell.hidden_size
    h = start.new_full((cell.cell_size,), max(map(abs, squash)))
    if cell.projection is not None:
        h = cell.projection.abs() @ h
    h = torch.maximum(h, start[:P].abs())
    g = max(map(abs, candidate))
    if cell.input_forget:
        c = torch.full_like(start[P:], g)
    elif cell.peephole is not None:
        return None
    else:
        a = cells.drive(cell, x).flatten(0, -2).amax(0) + cell.U.abs() @ h
        if cell.clip is not None:
            a = a.clamp(-cell.clip, cell.clip)
        i, f, _, _ = value(cell.gate, a).split(cell.cell_size)
        c = i * g / (1 - f)
        c = torch.where(f < 1, c, torch.inf)
    c = torch.maximum(c, start[P:].abs())
    return torch.cat([-h, -c]), torch.cat([h, c])


def sample(recurrence: Recurrence, x: Tensor, *, count: int, seed: int) -> Samples:
    """Draw ``count`` states on the trajectories of x [N, T, I] and as many from the box.

    Inputs come from x. Walls of the box beyond twice what the data reach are drawn in, and states
    are shrunk by log-uniform factors down to 1/100: slopes are largest near the middle,
    saturation sits at the walls.
    """
    rng = torch.Generator().manual_seed(seed)
    x = cells.reads(recurrence, x)
    start = recurrence.initial.value
    after = cells.trajectory(recurrence.cell, x, start)
    before = torch.cat([start.expand(len(x), 1, -1), after[:, :-1]], dim=1).flatten(0, 1)
    inputs = x.flatten(0, 1)
    finite = before.isfinite().all(-1)
    before, inputs = before[finite], inputs[finite]
    chosen = torch.randperm(len(before), generator=rng)[:count]
    walls = box(recurrence, x)
    if walls is None or not len(before):
        return Samples(before[chosen], inputs[chosen], len(chosen))
    # A part of an invariant set is in it: walls far beyond the data are drawn in.
    near = (2 * before.abs().amax(0)).clamp(min=1)
    low, high = torch.maximum(walls[0], -near), torch.minimum(walls[1], near)
    uniform = 2 * torch.rand(count, len(start), generator=rng, dtype=torch.float64) - 1
    shrink = 10 ** (-2 * torch.rand(count, 1, generator=rng, dtype=torch.float64))
    s = (low + high) / 2 + (high - low) / 2 * uniform * shrink
    any_input = torch.randint(len(inputs), (count,), generator=rng)
    return Samples(
        torch.cat([before[chosen], s]), torch.cat([inputs[chosen], inputs[any_input]]), len(chosen)
    )
