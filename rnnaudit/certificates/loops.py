"""The difference of two trajectories as a linear system closed by diagonal multipliers.

Two steps under one cell, from (s₁, x₁) and from (s₂, x₂), differ *exactly* by

    δ' = A δ + B w,   v = C δ + D w + E Δx,   w = diag(d) v,   d in an interval per channel,

because a product differs by a₁b₁ − a₂b₂ = a₁Δb + b₂Δa and an activation by a difference
quotient times the difference of its argument. D is strictly block lower triangular: later
channels read earlier ones. A, B, C, D, E hold weights exactly; only d depends on where the
two points lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.certificates.intervals import Interval, affine, apply, slopes
from rnnaudit.model import SIGMOID, Activation, GRUCell, LSTMCell


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A [S, S], B [S, m], C [m, S], D [m, m], E [m, I]; channels in blocks of equal width."""

    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    E: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where one of the two points may lie: every quantity of one step as an interval [H].

    ``pre`` maps the name of a gate to its pre-activation, ``state`` the parts of the state.
    """

    pre: dict[str, Interval]
    state: dict[str, Interval]


_Channel = tuple[Tensor, dict[int, Tensor], Tensor]
"""The rows of one channel in C, its blocks of D by earlier channel, and its rows in E."""


def _build(
    states: int,
    inputs: int,
    channels: Sequence[_Channel],
    keep: Tensor | None,
    outputs: dict[int, Tensor],
) -> Loop:
    """Assemble a loop from its channels (C row, D blocks by earlier channel, E row)."""
    width = channels[0][0].shape[0]
    m = width * len(channels)
    C, E = torch.cat([c for c, _, _ in channels]), torch.cat([e for _, _, e in channels])
    D, B = C.new_zeros(m, m), C.new_zeros(states, m)
    for k, (_, earlier, _) in enumerate(channels):
        for j, block in earlier.items():
            D[k * width : (k + 1) * width, j * width : (j + 1) * width] = block
    for k, block in outputs.items():
        B[:, k * width : (k + 1) * width] = block
    return Loop(C.new_zeros(states, states) if keep is None else keep, B, C, D, E)


def lstm_loop(cell: LSTMCell) -> Loop:
    """Channels of an LSTM: f·Δc, c₂f'·Δa_f, i·g'Δa_g, g₂i'·Δa_i, o·tanh'Δc', tanh(c'₂)o'·Δa_o.

    With ``input_forget`` (f = 1 − i) the second is absent and the fourth has g₂ − c₂.
    """
    H, P = cell.cell_size, cell.hidden_size
    U_i, U_f, U_g, U_o = cell.U.split(H)
    W_i, W_f, W_g, W_o = cell.W.split(H)
    eye, none_h = torch.eye(H, dtype=cell.U.dtype), cell.U.new_zeros(H, P)
    no_x, no_c = torch.zeros_like(W_i), torch.zeros_like(eye)
    p_i, p_f, p_o = (
        (torch.diag(p) for p in cell.peephole) if cell.peephole is not None else (no_c,) * 3
    )
    U_f, W_f, p_f = (0 * U_f, 0 * W_f, 0 * p_f) if cell.input_forget else (U_f, W_f, p_f)
    c_next = dict.fromkeys(range(4), eye)
    R = eye if cell.projection is None else cell.projection
    to_c = torch.cat([cell.U.new_zeros(P, H), eye])
    to_h = torch.cat([R, no_c])
    return _build(
        P + H,
        cell.input_size,
        [
            (torch.cat([none_h, eye], 1), {}, no_x),
            (torch.cat([U_f, p_f], 1), {}, W_f),
            (torch.cat([U_g, no_c], 1), {}, W_g),
            (torch.cat([U_i, p_i], 1), {}, W_i),
            (torch.cat([none_h, no_c], 1), c_next, no_x),
            (torch.cat([U_o, no_c], 1), dict.fromkeys(range(4), p_o), W_o),
        ],
        None,
        {0: to_c, 1: to_c, 2: to_c, 3: to_c, 4: to_h, 5: to_h},
    )


def lstm_sectors(cell: LSTMCell, one: Place, two: Place) -> Interval | None:
    """Return the multipliers of ``lstm_loop`` [6H]; None where an activation jumps."""
    both = {k: one.pre[k].hull(two.pre[k]) for k in one.pre}
    ahead = one.state["c_next"].hull(two.state["c_next"])
    clip = cell.clip
    i_slope = slopes(cell.gate, both["i"], clip)
    f_slope = slopes(cell.gate, both["f"], clip)
    o_slope = slopes(cell.gate, both["o"], clip)
    g_slope = slopes(cell.candidate, both["g"], clip)
    squash_clip = clip if cell.clip_output else None
    squash_slope = slopes(cell.squash, ahead, squash_clip)
    if i_slope is None or f_slope is None or o_slope is None:
        return None
    if g_slope is None or squash_slope is None:
        return None
    i_one, o_one = apply(cell.gate, one.pre["i"], clip), apply(cell.gate, one.pre["o"], clip)
    g_two = apply(cell.candidate, two.pre["g"], clip)
    squashed_two = apply(cell.squash, two.state["c_next"], squash_clip)
    c_two = two.state["c"]
    if cell.input_forget:
        f_one = complement(cell.gate, one.pre["i"], clip)
        forget, write = Interval.point(torch.zeros_like(c_two.lo)), (g_two - c_two) * i_slope
    else:
        f_one = apply(cell.gate, one.pre["f"], clip)
        forget, write = c_two * f_slope, g_two * i_slope
    return stack(
        [f_one, forget, i_one * g_slope, write, o_one * squash_slope, squashed_two * o_slope]
    )


def gru_loop(cell: GRUCell, *, mixed: bool) -> Loop:
    """Channels of a GRU: r, q₂r' (or r, h₂r' before U_n), n', (h₂ − n₂)z', and the mixing.

    ``mixed`` keeps z·Δh + (1 − z)·Δn as Δn + z·(Δh − Δn), one z for both; otherwise z and
    1 − z are separate multipliers, as entrywise bounds want them.
    """
    H = cell.hidden_size
    U_r, U_z, U_n = cell.U.split(H)
    W_r, W_z, W_n = cell.W.split(H)
    eye, none, no_x = torch.eye(H, dtype=cell.U.dtype), torch.zeros_like(U_r), torch.zeros_like(W_r)
    if cell.reset_after:
        first: _Channel = (U_n, {}, no_x)
        candidate: _Channel = (none, {0: eye, 1: eye}, W_n)
    else:
        first = (eye, {}, no_x)
        candidate = (none, {0: U_n, 1: U_n}, W_n)
    channels: list[_Channel] = [
        first,
        (U_r, {}, W_r),
        candidate,
        (U_z, {}, W_z),
    ]
    if mixed:
        channels.append((eye, {2: -eye}, no_x))
    else:
        channels.append((eye, {}, no_x))
    return _build(H, cell.input_size, channels, None, {2: eye, 3: eye, 4: eye})


def gru_sectors(cell: GRUCell, one: Place, two: Place, *, mixed: bool) -> Interval | None:
    """Return the multipliers of ``gru_loop`` [5H]; None where an activation jumps."""
    both = {k: one.pre[k].hull(two.pre[k]) for k in one.pre}
    r_slope = slopes(cell.gate, both["r"], cell.clip)
    z_slope = slopes(cell.gate, both["z"], cell.clip)
    n_slope = slopes(cell.candidate, both["n"], cell.clip)
    if r_slope is None or z_slope is None or n_slope is None:
        return None
    r_one = apply(cell.gate, one.pre["r"], cell.clip)
    z_one = apply(cell.gate, one.pre["z"], cell.clip)
    n_two = apply(cell.candidate, two.pre["n"], cell.clip)
    inner = two.state["q"] if cell.reset_after else two.state["h"]
    if not mixed:
        n_slope = complement(cell.gate, one.pre["z"], cell.clip) * n_slope
    return stack([r_one, inner * r_slope, n_slope, (two.state["h"] - n_two) * z_slope, z_one])


def complement(gate: Activation, pre: Interval, clip: float | None) -> Interval:
    """Return a box of 1 − φ(a), which for σ is σ(−a) and keeps its digits in saturation."""
    if gate == SIGMOID:
        return apply(gate, -pre.clamp(clip), None)
    one = torch.ones_like(pre.lo)
    return Interval.point(one) - apply(gate, pre, clip)


def stack(blocks: Sequence[Interval]) -> Interval:
    """Put intervals side by side."""
    return Interval(torch.cat([b.lo for b in blocks]), torch.cat([b.hi for b in blocks]))


def drives(W: Tensor, x: Interval, b: Tensor, names: str) -> dict[str, Interval]:
    """Split the box of W x + b into gates, one letter each."""
    parts = affine(W, x, b).split(b.shape[0] // len(names))
    return dict(zip(names, parts, strict=True))
