"""Boxes that hold every state a gated cell can reach, and what its gates can then be.

A bound on all states up to now gives one on the next (``image``); a
box that holds the initial state and its own image therefore holds every reachable state.
Starting from a box that is known to hold them, every further image does too.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from rnnaudit.certificates.intervals import Interval, affine, apply, raised, settled
from rnnaudit.certificates.loops import Place, complement, drives
from rnnaudit.model import GRUCell, LSTMCell

_ROUNDS = 200

MIXING = frozenset({"sigmoid", "hardsigmoid"})
"""Gates whose values stay in [0, 1], so that z a + (1 − z) b is a mean of a and b."""


def halves(cell: LSTMCell, box: Interval) -> tuple[Interval, Interval]:
    """Return h [P] and c [H] of a box of an LSTM's states."""
    h, c = box.split([cell.hidden_size, cell.cell_size])
    return h, c


def lstm_place(
    cell: LSTMCell, x: Interval, h: Interval, c: Interval, recurrent: Interval | None = None
) -> Place:
    """Bound every quantity of one LSTM step from boxes of x [I], h [P] and c [H].

    ``recurrent`` is a box of U h [4H] where a better one than that of h is known.
    """
    drive = affine(cell.W, x, cell.b) + (affine(cell.U, h) if recurrent is None else recurrent)
    pre = dict(zip("ifgo", drive.split(cell.cell_size), strict=True))
    if cell.peephole is not None:
        p_i, p_f, p_o = (Interval.point(p) for p in cell.peephole)
        pre["i"], pre["f"] = pre["i"] + p_i * c, pre["f"] + p_f * c
    i, f = apply(cell.gate, pre["i"], cell.clip), apply(cell.gate, pre["f"], cell.clip)
    g = apply(cell.candidate, pre["g"], cell.clip)
    if cell.input_forget:
        f = complement(cell.gate, pre["i"], cell.clip)
    c_next = f * c + i * g
    if cell.peephole is not None:
        pre["o"] = pre["o"] + p_o * c_next
    return Place(pre, {"h": h, "c": c, "c_next": c_next})


def _lstm_image(cell: LSTMCell, x: Interval, start: Tensor, box: Interval) -> Interval:
    """Bound all states when those before lie in ``box``."""
    (h, c), (h_start, c_start) = halves(cell, box), halves(cell, Interval.point(start))
    place = lstm_place(cell, x, h, c)
    i, g = (
        apply(cell.gate, place.pre["i"], cell.clip),
        apply(cell.candidate, place.pre["g"], cell.clip),
    )
    if cell.input_forget and cell.gate.name in MIXING:
        accumulated = g.hull(c_start)  # c' is a mean of c and g
    else:
        f = (
            complement(cell.gate, place.pre["i"], cell.clip)
            if cell.input_forget
            else apply(cell.gate, place.pre["f"], cell.clip)
        )
        accumulated = _accumulated(f, i * g, c_start)
    # The step's own image holds as well, but for the first state.
    if box.finite:
        accumulated = accumulated.meet(place.state["c_next"].hull(c_start))
    clip = cell.clip if cell.clip_output else None
    o = apply(cell.gate, place.pre["o"], cell.clip)
    out = o * apply(cell.squash, accumulated, clip)
    if cell.projection is not None:
        out = affine(cell.projection, out)
    h_next = out.hull(h_start)
    return Interval(torch.cat([h_next.lo, accumulated.lo]), torch.cat([h_next.hi, accumulated.hi]))


def _lstm_step(cell: LSTMCell, x: Interval, start: Tensor, box: Interval) -> Interval:
    """Bound the states one step after ``box``, and the initial state."""
    h, c = halves(cell, box)
    place = lstm_place(cell, x, h, c)
    c_next = place.state["c_next"]
    o = apply(cell.gate, place.pre["o"], cell.clip)
    out = o * apply(cell.squash, c_next, cell.clip if cell.clip_output else None)
    if cell.projection is not None:
        out = affine(cell.projection, out)
    after = Interval(torch.cat([out.lo, c_next.lo]), torch.cat([out.hi, c_next.hi]))
    return after.hull(Interval.point(start))


def _accumulated(f: Interval, write: Interval, start: Interval) -> Interval:
    """Bound every c of c' = f c + write that begins in ``start``: sup write / (1 − sup f)."""
    # With |c| ≤ m for all c so far, |c'| ≤ F m + |write|, and m = |write| / (1 − F) is kept.
    F = f.size
    room = torch.nextafter(1 - F, -torch.ones_like(F))
    open_ = (room > 0) & torch.isfinite(write.size)

    def limit(v: Tensor) -> Tensor:
        return torch.where(open_, raised(raised(v / room)), torch.full_like(v, math.inf))

    if bool((f.lo >= 0).all()):
        # Signs are kept: an upper end of max(start, sup write⁺ / (1 − F)) is kept by itself.
        hi = torch.maximum(start.hi.clamp(min=0), limit(write.hi.clamp(min=0)))
        lo = torch.minimum(start.lo.clamp(max=0), -limit((-write.lo).clamp(min=0)))
        return Interval(lo, hi)
    most = torch.maximum(start.size, limit(write.size))
    return Interval(-most, most)


def gru_place(cell: GRUCell, x: Interval, h: Interval, recurrent: Interval | None = None) -> Place:
    """Bound every quantity of one GRU step from boxes of x [I] and h [H].

    ``recurrent`` is a box of U h [3H] where a better one than that of h is known.
    """
    H = cell.hidden_size
    drive = drives(cell.W, x, cell.b_input, "rzn")
    U_h = affine(cell.U, h) if recurrent is None else recurrent
    parts = U_h + Interval.point(cell.b_recurrent)
    u_r, u_z, q = parts.split(H)
    pre = {"r": drive["r"] + u_r, "z": drive["z"] + u_z}
    r = apply(cell.gate, pre["r"], cell.clip)
    if not cell.reset_after:
        q = affine(cell.U[2 * H :], r * h, cell.b_recurrent[2 * H :])
        pre["n"] = drive["n"] + q
    else:
        pre["n"] = drive["n"] + r * q
    return Place(pre, {"h": h, "q": q})


def _gru_image(cell: GRUCell, x: Interval, start: Tensor, box: Interval) -> Interval:
    """Bound all states when those before lie in ``box``."""
    place = gru_place(cell, x, box)
    n = apply(cell.candidate, place.pre["n"], cell.clip)
    first = Interval.point(start)
    if cell.gate.name in MIXING:
        return n.hull(first)  # h' is a mean of h and n
    z = apply(cell.gate, place.pre["z"], cell.clip)
    return (complement(cell.gate, place.pre["z"], cell.clip) * n + z * box).hull(first)


def image(cell: LSTMCell | GRUCell, x: Interval, start: Tensor, box: Interval) -> Interval:
    """Bound all states [S] when those before lie in ``box``."""
    if isinstance(cell, GRUCell):
        return _gru_image(cell, x, start, box)
    return _lstm_image(cell, x, start, box)


def reachable_box(cell: LSTMCell | GRUCell, x: Interval, start: Tensor) -> Interval:
    """Return a box [S] that holds every reachable state; infinite where none was found."""
    after = partial(image, cell, x, start)
    step = after if isinstance(cell, GRUCell) else partial(_lstm_step, cell, x, start)
    everything = Interval.symmetric(torch.full_like(start, math.inf))
    box = everything
    for _ in range(_ROUNDS):
        smaller = after(box).meet(box)
        if smaller.finite and bool(((box.hi - box.lo) - (smaller.hi - smaller.lo)).max() < 1e-9):
            return settled(smaller, step)
        if not smaller.finite and smaller.inside(box) and box.inside(smaller):
            break
        box = smaller
    if box.finite:
        return box
    box = Interval.point(start)
    for _ in range(_ROUNDS):
        larger = after(box)
        if larger.inside(box):
            return box
        if not larger.finite or float(larger.size.max()) > 1e9:
            break
        middle, half = (larger.lo + larger.hi) / 2, (larger.hi - larger.lo) / 2
        box = box.hull(Interval(middle - half * 1.02 - 1e-9, middle + half * 1.02 + 1e-9))
    return everything
