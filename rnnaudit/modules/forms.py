"""One direction of a layer, cut to depth k: as a window, or in blocks side by side.

Steps come first: x [T, N, I]. A window that reaches the start of the sequence starts from
the state that the caller gives, every other one from zero, so that outputs with t ≤ k are
exact. These are the maps that an exported ONNX model computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rnnaudit.modules.steps import State, Weights, drive, fused, step


@dataclass(frozen=True, slots=True)
class Cut:
    """Depth k, and the steps C that each block gives: 1 is the window form."""

    depth: int
    block: int = 1


def truncated(
    mode: str, weights: Weights, x: Tensor, start: State | None, cut: Cut | None
) -> tuple[Tensor, State]:
    """Run one direction over x [T, N, I]; return h [T, N, H] and the final state.

    ``start`` [N, width] is the state before the first step, zero without. Without a ``cut``
    the direction runs in full.
    """
    if cut is None:
        return fused(mode, weights, x, start or _zeros(mode, weights, x, x.shape[1]))
    if cut.block == 1:
        return _window(mode, weights, x, start, cut.depth)
    if torch.compiler.is_compiling():
        return _unrolled(mode, weights, x, start, cut)
    return _batched(mode, weights, x, start, cut)


def _zeros(mode: str, weights: Weights, x: Tensor, *batch: int) -> State:
    return tuple(x.new_zeros(*batch, w) for w in weights.widths[: 2 if mode == "LSTM" else 1])


def _window(
    mode: str, weights: Weights, x: Tensor, start: State | None, depth: int
) -> tuple[Tensor, State]:
    """Apply the cell k times to all steps at once, each time to the state of the step before."""
    T, N = x.shape[:2]
    z = drive(mode, weights, x)
    first = start or _zeros(mode, weights, x, N)
    s = _zeros(mode, weights, x, T, N)
    # A short sequence is exact after T times; a graph of any length takes all k.
    for _ in range(depth if torch.compiler.is_compiling() else min(depth, T)):
        s = step(mode, weights, _one_later(first, s), z)
    return s[0], tuple(part[-1] for part in s)


def _one_later(first: State, s: State) -> State:
    """Return the states [T, N, width] before each step, from those after it."""
    parts = zip(first, s, strict=True)
    return tuple(torch.cat([start.unsqueeze(0), part])[:-1] for start, part in parts)


def _in_blocks(values: Tensor, cut: Cut) -> Tensor:
    """Return steps [T, N, F] as B overlapping blocks [B, N, F, k − 1 + C].

    Zeros fill up the last one. A graph of any length has B ≥ 2, so that it needs no case for 1.
    """
    C, L = cut.block, cut.depth - 1 + cut.block
    compiling = torch.compiler.is_compiling()
    fill = L + C - 1 if compiling else max(L - values.shape[0], C - 1)
    return pad(values, (0, 0, 0, 0, 0, fill)).unfold(0, L, C)


def _starts(mode: str, weights: Weights, x: Tensor, start: State | None, count: int) -> State:
    """Return the states [B, N, width] before each block: the first block's is the caller's."""
    if start is None:
        return _zeros(mode, weights, x, count, x.shape[1])
    return tuple(pad(part.unsqueeze(0), (0, 0, 0, 0, 0, count - 1)) for part in start)


def _in_time(y: Tensor, steps: int, cut: Cut) -> Tensor:
    """Put the states [k − 1 + C, B, N, H] after each step of the blocks into the order of time.

    The first block gives its warm-up steps too, every other one its last C.
    """
    w = cut.depth - 1
    if not torch.compiler.is_compiling():
        return torch.cat([y[:w, 0], *y[w:].unbind(1)])[:steps]
    rows = torch.cat([y[:w, 0], y[w:].transpose(0, 1).flatten(0, 1)])
    # Of a slice it could not be proved that it is no longer.
    return rows.index_select(0, torch.arange(steps, device=rows.device))


def _unrolled(
    mode: str, weights: Weights, x: Tensor, start: State | None, cut: Cut
) -> tuple[Tensor, State]:
    """Run the blocks step by step, in operators that any graph can hold."""
    T = x.shape[0]
    z = _in_blocks(drive(mode, weights, x), cut)
    s = _starts(mode, weights, x, start, z.shape[0])
    states = []
    for i in range(cut.depth - 1 + cut.block):
        s = step(mode, weights, s, z[..., i])
        states.append(s)
    in_time = [_in_time(torch.stack(parts), T, cut) for parts in zip(*states, strict=True)]
    return in_time[0], tuple(part[-1] for part in in_time)


def _batched(
    mode: str, weights: Weights, x: Tensor, start: State | None, cut: Cut
) -> tuple[Tensor, State]:
    """Run the blocks as one batch of PyTorch's own fused kernel.

    It gives no c but that of the steps filled in: the last k inputs are run again for it.
    """
    T, N = x.shape[:2]
    rows = _in_blocks(x, cut).permute(3, 0, 1, 2)
    B = rows.shape[1]
    starts = _starts(mode, weights, x, start, B)
    y, _ = fused(mode, weights, rows.flatten(1, 2), tuple(part.flatten(0, 1) for part in starts))
    h = _in_time(y.unflatten(1, (B, N)), T, cut)
    if mode != "LSTM":
        return h, (h[-1],)
    end = start if start is not None and cut.depth >= T else _zeros(mode, weights, x, N)
    return h, (h[-1], fused(mode, weights, x[-cut.depth :], end)[1][1])
