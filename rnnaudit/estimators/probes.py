"""Synthetic inputs: what a model may meet when nobody says what it will meet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rnnaudit.data import InputRange

KINDS = ("standard normal", "uniform", "saturating", "constant", "pulse")
"""The kinds in turn: sequence n is of kind ``KINDS[n % 5]``."""

PULSE = 4
"""Steps after which a pulse is over."""

LARGE = 10.0
"""Magnitude of saturating inputs where no box limits them."""

_HOLD = 0.15  # chance that a saturating input jumps: plateaus of about seven steps


def synthetic(
    input_size: int,
    *,
    sequences: int,
    length: int,
    seed: int,
    low: Tensor | float | None = None,
    high: Tensor | float | None = None,
) -> Tensor:
    """Return inputs [N, T, I] in float64, equal parts of each of ``KINDS`` in turn.

    Standard normal, uniform on ±1, piecewise constant at ±``LARGE``, constant over time, and
    a pulse of ±``LARGE`` followed by zeros, which shows whether a model holds what it saw.
    In a box [low, high] (each [I], or one number for all) they are scaled to its middle and
    half-width and clipped to it, and the saturating ones sit in its corners.
    """
    rng = torch.Generator().manual_seed(seed)
    shape = (sequences, length, input_size)
    normal = torch.randn(shape, generator=rng, dtype=torch.float64)
    uniform = 2 * torch.rand(shape, generator=rng, dtype=torch.float64) - 1
    sign = torch.where(torch.rand(shape, generator=rng) < 0.5, -1.0, 1.0).double()
    jump = torch.rand(shape, generator=rng) < _HOLD
    jump[:, :1] = True
    steps = torch.arange(length).view(1, -1, 1)
    held = torch.where(jump, steps, torch.zeros_like(steps)).cummax(1).values
    saturating = sign.gather(1, held)
    if low is None or high is None:
        saturating = LARGE * saturating
    constant = normal[:, :1].expand(shape)
    kind = (torch.arange(sequences) % len(KINDS)).view(-1, 1, 1)
    x = torch.where(kind == 0, normal, uniform)
    x = torch.where(kind == 2, saturating, x)
    x = torch.where(kind == 3, constant, x)
    x = torch.where(kind == 4, torch.where(steps < PULSE, saturating, 0.0), x)
    if low is not None and high is not None:
        x = (low + high) / 2 + x * (high - low) / 2
        ends = [torch.as_tensor(end, dtype=x.dtype) for end in (low, high)]
        x = x.clamp(*ends)
    return x


def synthetic_within(
    input_size: int, *, sequences: int, length: int, seed: int, input_range: InputRange | None
) -> Tensor:
    """Return the same within a range; one-hot ones take the largest feature of each step."""
    if input_range == "one-hot":
        x = synthetic(input_size, sequences=sequences, length=length, seed=seed)
        return torch.eye(input_size, dtype=x.dtype)[x.argmax(-1)]
    low, high = (None, None) if input_range is None else input_range
    return synthetic(input_size, sequences=sequences, length=length, seed=seed, low=low, high=high)


def is_one_hot(groups: Sequence[Tensor]) -> bool:
    """Whether every input of these [N, T, I] has one feature of 1 and no other, of two or more."""
    return all(
        x.shape[-1] > 1 and bool(((x == 0) | (x == 1)).all()) and bool((x.sum(-1) == 1).all())
        for x in groups
    )
