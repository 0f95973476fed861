"""Boxes and balls around a centre that an LSTM's or a GRU's states never leave.

A box alone lets every unit be at its worst at once; a ball does not. The set is

    |s_i − centre_i| ≤ box_i,   ‖h − h_centre‖₂ ≤ ball,   ‖c − c_centre‖₂ ≤ ball_c,

and one step maps it into itself: ``_lstm_step`` and ``_gru_step`` bound the image of the set,
and what they bound by no more than the set itself is kept for ever. A recurrent
pre-activation then moves by at most min(|U| box, ‖row of U‖₂ ball). Products of deviations
are bounded jointly: of a∘b with |a| ≤ α, ‖a‖₂ ≤ A, |b| ≤ β, ‖b‖₂ ≤ B the 2-norm is at most
that of the entries in which β is largest, filled up with α until A is used up.

For the reachable c of one unit the gates share an input: c ≤ κ is kept once
σ(a_i) tanh(a_g) (1 + e^{a_f}) ≤ κ, whose logarithm is below a linear function of the
pre-activations (tangents of log σ and log tanh, which are concave, and the chord of
log(1 + e^a), which is convex), and a linear function has its maximum at a corner.

Everything below is a sum or product of numbers that are not negative and bound something
from above; ``_UP`` covers the rounding of up to ten thousand of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rnnaudit.cells import step
from rnnaudit.cells.activations import value
from rnnaudit.certificates.intervals import Interval, affine, apply, slopes, times_above
from rnnaudit.certificates.loops import Place
from rnnaudit.certificates.places import gru_place, lstm_place
from rnnaudit.model import SIGMOID, TANH, Activation, GRUCell, LSTMCell
from rnnaudit.norms import spectral_norm_above

_UP = 1 + 2e-12
_SOFTPLUS = Activation("softplus")

_ROUNDS = 300
"""Steps after which a set that still grows is given up."""


@dataclass(frozen=True, slots=True, eq=False)
class Balls:
    """The set: ``centre`` [S], ``box`` [S], and one radius for each part of the state."""

    centre: Tensor
    box: Tensor
    radii: tuple[float, ...]

    def states(self) -> Interval:
        """Return the set's box [S]."""
        point = Interval.point(self.centre)
        return point + Interval.symmetric(self.box)

    def inside(self, other: Balls) -> bool:
        """Say whether the other set, of the same centre, holds this one (NaN: no).

        A ball that holds its own box asks nothing of what lies in the box.
        """
        parts = other.box.split(len(self.box) // len(self.radii))
        radii = all(
            a <= b or _norm(part) <= b
            for a, b, part in zip(self.radii, other.radii, parts, strict=True)
        )
        return radii and bool((self.box <= other.box).all())

    def hull(self, other: Balls) -> Balls:
        """Return the smallest set of this kind and centre that holds both."""
        radii = tuple(max(a, b) for a, b in zip(self.radii, other.radii, strict=True))
        return Balls(self.centre, torch.maximum(self.box, other.box), radii)

    def larger(self, part: float) -> Balls:
        """Return the set with every size larger by this part, and a little."""
        radii = tuple(r * (1 + 1.5 * part) + 1e-11 for r in self.radii)
        return Balls(self.centre, self.box * (1 + part) + 1e-12, radii)


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """What every step needs of the weights, per gate: sizes of rows and of whole matrices."""

    cell: LSTMCell | GRUCell
    x: Interval
    centre: Tensor
    reads: Tensor  # |W| x̄ [gates · H]
    reads_norm: tuple[float, ...]  # ‖W_g x‖₂ over the domain, about its middle
    rows: Tensor  # ‖row of U‖₂
    norms: tuple[float, ...]  # ‖U_g‖₂
    middle: Tensor  # the domain's middle
    start: Tensor


def _norm(v: Tensor) -> float:
    return float(torch.linalg.vector_norm(v)) * _UP


def _filled(cap: Tensor, weight: Tensor, norm: float) -> float:
    """Bound ‖weight ∘ v‖₂ over |v| ≤ cap and ‖v‖₂ ≤ norm: largest weights first."""
    order = weight.argsort(descending=True)
    square = cap[order].square() * _UP
    before = (square.cumsum(0) - square).clamp(min=0) * (2 - _UP) - square.sum() * 1e-14
    room = (norm * norm * _UP - before).clamp(min=0)
    used = torch.minimum(room, square)
    return float((weight[order].square() * used).sum().sqrt()) * _UP


def _product(a: Tensor, a_norm: float, b: Tensor, b_norm: float) -> float:
    """Bound ‖a' ∘ b'‖₂ over |a'| ≤ a, ‖a'‖₂ ≤ a_norm, |b'| ≤ b, ‖b'‖₂ ≤ b_norm."""
    return min(_filled(a, b, a_norm), _filled(b, a, b_norm))


def _moves(w: _Weights, box: Tensor, ball: float) -> tuple[Tensor, Tensor, list[float]]:
    """Bound recurrent and whole moves of pre-activations [gates · H], and their norms by gate."""
    recurrent = torch.minimum(times_above(w.cell.U.abs(), box), w.rows * ball * _UP)
    moves = (w.reads + recurrent) * _UP
    norms = [
        min((x + u * ball) * _UP, _norm(part))
        for x, u, part in zip(w.reads_norm, w.norms, moves.split(len(box)), strict=True)
    ]
    return recurrent, moves, norms


def _weights(cell: LSTMCell | GRUCell, x: Interval, centre: Tensor, start: Tensor) -> _Weights:
    middle = (x.lo + x.hi) / 2
    half = torch.maximum(x.hi - middle, middle - x.lo) * _UP
    gates = len(cell.W) // cell.hidden_size
    # ‖W x‖₂ ≤ ‖W diag(x̄)‖₂ √I; the product rounds once per entry.
    reads_norm = tuple(
        spectral_norm_above(W * half) * math.sqrt(len(half)) * _UP for W in cell.W.chunk(gates)
    )
    return _Weights(
        cell,
        x,
        centre,
        times_above(cell.W.abs(), half),
        reads_norm,
        torch.linalg.vector_norm(cell.U, dim=1) * _UP,
        tuple(spectral_norm_above(U) for U in cell.U.chunk(gates)),
        middle,
        start,
    )


def _around(centre: Interval, moves: Tensor) -> Interval:
    return centre + Interval.symmetric(moves)


def _lstm_step(w: _Weights, now: Balls) -> Balls:
    """Bound what one step makes of the set."""
    cell = w.cell
    assert isinstance(cell, LSTMCell)
    H = cell.cell_size
    h_c, c_c = Interval.point(w.centre[:H]), Interval.point(w.centre[H:])
    at = affine(cell.W, Interval.point(w.middle), cell.b) + affine(cell.U, h_c)
    a_i, a_f, a_g, a_o = at.split(H)
    dh, dc = now.box[:H], now.box[H:]
    n_h, n_c = now.radii
    recurrent, moves, (n_i, n_f, n_g, n_o) = _moves(w, dh, n_h)
    v_i, v_f, v_g, v_o = moves.split(H)
    i_all, f_all, g_all, o_all = (
        _around(a, v) for a, v in zip((a_i, a_f, a_g, a_o), (v_i, v_f, v_g, v_o), strict=True)
    )
    s_i, s_f, s_g, s_o = (
        _slope(phi, box)
        for phi, box in ((SIGMOID, i_all), (SIGMOID, f_all), (TANH, g_all), (SIGMOID, o_all))
    )
    i_c, f_c, o_c = (apply(SIGMOID, a) for a in (a_i, a_f, a_o))
    g_c = apply(TANH, a_g)
    # Deviations of gates: per unit and in the 2-norm.
    e_i, e_f, e_g, e_o = s_i * v_i * _UP, s_f * v_f * _UP, s_g * v_g * _UP, s_o * v_o * _UP
    m_i, m_f, m_g, m_o = (
        _filled(v, s, n)
        for v, s, n in ((v_i, s_i, n_i), (v_f, s_f, n_f), (v_g, s_g, n_g), (v_o, s_o, n_o))
    )
    # c' − c_c = f_c δc + δf δc + c_c δf + i_c δg + δi δg + g_c δi + (the centre's own move).
    drift = (f_c * c_c + i_c * g_c - c_c).size
    c_norm = (
        _filled(dc, f_c.size, n_c)
        + _product(e_f, m_f, dc, n_c)
        + _filled(e_f, c_c.size, m_f)
        + _filled(e_g, i_c.size, m_g)
        + _product(e_i, m_i, e_g, m_g)
        + _filled(e_i, g_c.size, m_i)
        + _norm(drift)
    ) * _UP
    c_box = _kept(w, (a_i, a_f, a_g), (v_i, v_f, v_g), recurrent, (i_all, f_all, g_all))
    dc_next = (c_box - c_c).size
    # h' − h_c = o_c δt + δo δt + t_c δo + (the centre's own move), δt ≤ slope · δc'.
    t_c = apply(TANH, c_c)
    s_t = _slope(TANH, _around(c_c, torch.maximum(dc_next, dc)))
    c_norm = min(c_norm, _norm(dc_next))
    h_norm = (
        _filled(dc_next, o_c.size * s_t * _UP, c_norm)
        + _product(e_o, m_o, s_t * dc_next * _UP, _filled(dc_next, s_t, c_norm))
        + _filled(e_o, t_c.size, m_o)
        + _norm((o_c * t_c - h_c).size)
    ) * _UP
    h_box = apply(SIGMOID, o_all) * apply(TANH, c_box)
    dh_next = (h_box - h_c).size
    return Balls(w.centre, torch.cat([dh_next, dc_next]), (min(h_norm, _norm(dh_next)), c_norm))


def _slope(phi: Activation, box: Interval) -> Tensor:
    found = slopes(phi, box)
    assert found is not None
    return found.size


def _kept(
    w: _Weights,
    centres: tuple[Interval, Interval, Interval],
    moves: tuple[Tensor, Tensor, Tensor],
    recurrent: Tensor,
    gates: tuple[Interval, Interval, Interval],
) -> Interval:
    """Bound every reachable c by its start and by sup i g / (1 − f), one x for all gates."""
    H = len(moves[0])
    i_all, f_all, g_all = gates
    keep = apply(SIGMOID, -f_all).lo  # 1 − f from below
    written = apply(SIGMOID, i_all) * apply(TANH, g_all)
    keep = keep.clamp(min=1e-300)
    plain = Interval(-(-written.lo).clamp(min=0) / keep * _UP, written.hi.clamp(min=0) / keep * _UP)
    hi = torch.minimum(plain.hi, _joint(w, centres, moves, recurrent[: 3 * H], 1.0))
    lo = torch.maximum(plain.lo, -_joint(w, centres, moves, recurrent[: 3 * H], -1.0))
    return Interval(lo, hi).hull(Interval.point(w.start[H:]))


def _joint(
    w: _Weights,
    centres: tuple[Interval, Interval, Interval],
    moves: tuple[Tensor, Tensor, Tensor],
    recurrent: Tensor,
    sign: float,
) -> Tensor:
    """Bound sup σ(a_i) tanh(± a_g) (1 + e^{a_f}) where ± a_g > 0, per unit."""
    H = len(moves[0])
    W_i, W_f, W_g, _ = w.cell.W.split(H)
    half = torch.maximum(w.x.hi - w.middle, w.middle - w.x.lo) * _UP
    r_i, r_f, r_g = recurrent.split(H)
    c_i, c_f = centres[0].hi, centres[1].hi
    c_g = centres[2].hi if sign > 0 else -centres[2].lo
    v_i, v_f, v_g = moves
    top = c_g + v_g
    lo_f, hi_f = c_f - v_f, c_f + v_f
    # Torch's own is a itself above 20, which is less than log(1 + e^a) by up to 2e-9.
    softplus = partial(value, _SOFTPLUS)
    chord = (softplus(hi_f) - softplus(lo_f)) / (hi_f - lo_f).clamp(min=1e-12)
    chord = torch.where(hi_f - lo_f < 1e-9, torch.ones_like(chord), chord) * (1 + 1e-9)
    at_i, at_g = c_i, top.clamp(min=1e-3) / 2 + 5e-4
    best = torch.full_like(c_i, math.inf)
    for _ in range(3):
        k_i, k_g = torch.sigmoid(-at_i), 2 / torch.sinh(2 * at_g)
        row = k_i[:, None] * W_i + chord[:, None] * W_f + sign * k_g[:, None] * W_g
        size = k_i[:, None] * W_i.abs() + chord[:, None] * W_f.abs() + k_g[:, None] * W_g.abs()
        parts = [
            torch.nn.functional.logsigmoid(at_i),
            k_i * (c_i - at_i + r_i),
            torch.log(torch.tanh(at_g)),
            k_g * (c_g - at_g + r_g),
            softplus(lo_f),
            chord * (c_f - lo_f + r_f),
            row.abs() @ half,
        ]
        # The logarithm is a sum of terms of these sizes, and so are the errors of its tangents.
        scale = 1 + (size @ half) + k_i * (c_i.abs() + at_i.abs() + v_i)
        scale = scale + k_g * (c_g.abs() + at_g + v_g) + chord * (c_f.abs() + lo_f.abs() + v_f)
        total = sum(parts[1:], parts[0]) + 1e-12 * (scale + parts[0].abs() + parts[2].abs())
        best = torch.minimum(best, total)
        corner = torch.sign(row) * half
        at_i = c_i + (W_i * corner).sum(1) + r_i
        at_g = (c_g + sign * (W_g * corner).sum(1) + r_g).clamp(min=1e-3)
    bound = torch.exp(best) * (1 + 1e-11)
    return torch.where(top > 0, bound, torch.zeros_like(bound))


def _gru_step(w: _Weights, now: Balls) -> Balls:
    """Bound what one step makes of the set."""
    cell = w.cell
    assert isinstance(cell, GRUCell)
    H = cell.hidden_size
    h_c = Interval.point(w.centre)
    x_c = affine(cell.W, Interval.point(w.middle), cell.b_input)
    x_r, x_z, x_n = x_c.split(H)
    u_c = affine(cell.U, h_c, cell.b_recurrent)
    u_r, u_z, q_c = u_c.split(H)
    a_r, a_z = x_r + u_r, x_z + u_z
    dh, (n_h,) = now.box, now.radii
    recurrent, moves, (n_r, n_z, _) = _moves(w, dh, n_h)
    v_r, v_z, _ = moves.split(H)
    r_all, z_all = _around(a_r, v_r), _around(a_z, v_z)
    s_r, s_z = _slope(SIGMOID, r_all), _slope(SIGMOID, z_all)
    e_r, e_z = s_r * v_r * _UP, s_z * v_z * _UP
    m_r, m_z = _filled(v_r, s_r, n_r), _filled(v_z, s_z, n_z)
    r_c, z_c, keep = apply(SIGMOID, a_r), apply(SIGMOID, a_z), apply(SIGMOID, -a_z)
    reads, reads_norm = w.reads[2 * H :], w.reads_norm[2]
    if cell.reset_after:
        # δa_n = W_n Δx + r_c δq + δr δq + q_c δr, with δq = U_n δh.
        d_q, n_q = recurrent[2 * H :], min(w.norms[2] * n_h * _UP, _norm(recurrent[2 * H :]))
        inner = (r_c.size * d_q + e_r * d_q + q_c.size * e_r) * _UP
        n_inner = (
            _filled(d_q, r_c.size, n_q) + _product(e_r, m_r, d_q, n_q) + _filled(e_r, q_c.size, m_r)
        )
    else:
        # δa_n = W_n Δx + U_n (r_c δh + δr δh + h_c δr).
        d_q = (r_c.size * dh + e_r * dh + h_c.size * e_r) * _UP
        n_q = _filled(dh, r_c.size, n_h) + _product(e_r, m_r, dh, n_h) + _filled(e_r, h_c.size, m_r)
        n_q = min(n_q * _UP, _norm(d_q))
        U_n = cell.U[2 * H :]
        inner = torch.minimum(times_above(U_n.abs(), d_q), w.rows[2 * H :] * n_q * _UP)
        n_inner = w.norms[2] * n_q
        q_c = affine(U_n, r_c * h_c, cell.b_recurrent[2 * H :])
    a_n = x_n + (r_c * q_c if cell.reset_after else q_c)
    v_n = (reads + inner) * _UP
    n_n = min((reads_norm + n_inner) * _UP, _norm(v_n))
    n_all = _around(a_n, v_n)
    if cell.reset_after:
        q_all = _around(q_c, d_q)
        n_all = n_all.meet(_around(x_n, reads) + apply(SIGMOID, r_all) * q_all)
        v_n = torch.minimum(v_n, (n_all - a_n).size)
    s_n = _slope(TANH, n_all)
    e_n, m_n = s_n * v_n * _UP, _filled(v_n, s_n, n_n)
    n_c = apply(TANH, a_n)
    # h' − h_c = (1 − z_c) δn + z_c δh + δz (δh − δn) + δz (h_c − n_c) + (the centre's move).
    apart = (h_c - n_c).size
    drift = (keep * n_c + z_c * h_c - h_c).size
    norm = (
        _filled(e_n, keep.size, m_n)
        + _filled(dh, z_c.size, n_h)
        + _product(e_z, m_z, (dh + e_n) * _UP, (n_h + m_n) * _UP)
        + _filled(e_z, apart, m_z)
        + _norm(drift)
    ) * _UP
    # h' is a mean of h and n, so that a unit leaves its box only if n does.
    box = (apply(TANH, n_all) - h_c).size
    return Balls(w.centre, box, (min(norm, _norm(torch.maximum(box, dh))),))


def find_balls(cell: LSTMCell | GRUCell, x: Interval, start: Tensor) -> Balls | None:
    """Grow a set around a centre from the initial state until one step keeps it; None if not.

    Plain cells with σ gates and tanh only.
    """
    if not _plain(cell) or not x.finite or not len(start):
        return None
    middle = (x.lo + x.hi) / 2
    centre = start
    for _ in range(300):
        centre = step(cell, centre, middle)
    if not bool(torch.isfinite(centre).all()):
        return None
    weights = _weights(cell, x, centre, start)
    advance: Callable[[_Weights, Balls], Balls]
    advance = _lstm_step if isinstance(cell, LSTMCell) else _gru_step
    H = cell.hidden_size
    off = (start - centre).abs() * _UP + 1e-15
    first = Balls(centre, off, tuple(_norm(part) + 1e-15 for part in off.split(H)))
    now = first
    for _ in range(_ROUNDS):
        after = advance(weights, now).hull(first)
        if not all(math.isfinite(r) for r in after.radii):
            return None
        grown = now.hull(after)
        close = float((grown.box - now.box).max()) < 1e-9
        now = grown
        if close:
            break
    # A set that is what one step makes of it and a little more is kept with room to spare.
    for part in (1e-7, 1e-5, 1e-3):
        kept = now.larger(part)
        for _ in range(_ROUNDS):
            after = advance(weights, kept).hull(first)
            if not all(math.isfinite(r) for r in after.radii):
                break
            if after.inside(kept):
                return kept
            kept = after.larger(part)
    return None


def _plain(cell: LSTMCell | GRUCell) -> bool:
    if cell.clip is not None or cell.gate != SIGMOID or cell.candidate != TANH:
        return False
    if isinstance(cell, GRUCell):
        return True
    return (
        cell.squash == TANH
        and cell.peephole is None
        and cell.projection is None
        and not cell.input_forget
    )


def place_in(cell: LSTMCell | GRUCell, x: Interval, balls: Balls, states: Interval) -> Place:
    """Bound every quantity of one step from a state of the set that lies in ``states`` too."""
    H = cell.hidden_size
    weights = _weights(cell, x, balls.centre, balls.centre)
    recurrent, _, _ = _moves(weights, balls.box[:H], balls.radii[0])
    parts = states.split(H)
    h = parts[0]
    around = _around(affine(cell.U, Interval.point(balls.centre[:H])), recurrent)
    around = around.meet(affine(cell.U, h))
    if isinstance(cell, GRUCell):
        return gru_place(cell, x, h, around)
    c = parts[1]
    place = lstm_place(cell, x, h, c, around)
    return Place(place.pre, {"h": h, "c": c, "c_next": c})
