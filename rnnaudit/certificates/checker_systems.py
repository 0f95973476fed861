"""The checker's own account of one step: two trajectories differ by a system of channels.

Every cell is written as a linear system closed by diagonal multipliers, whose intervals are
worked out here from the weights, the domain and the box of states, rounded outward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rnnaudit.certificates.checker_intervals import (
    UNIT,
    VALUES,
    Array,
    Box,
    CertificateError,
    above,
    add,
    affine,
    growth,
    hull,
    largest,
    negative,
    one_minus,
    slope,
    times,
    value,
)
from rnnaudit.model import Activation, Cell, ElmanCell, GRUCell, LSTMCell


def array_of(v: Any) -> Array:
    """Return a tensor's numbers in float64."""
    result: Array = v.detach().cpu().numpy().astype(np.float64)
    return result


def _sizes(boxes: Mapping[str, Box]) -> Mapping[str, float]:
    return {name: float(largest(box).max(initial=0.0)) for name, box in boxes.items()}


@dataclass(frozen=True, slots=True)
class System:
    """δ' = A δ + B w, w = diag(d) v, v = C δ + D w + E Δx, d in ``sector``.

    ``image`` bounds φ(S, X), and ``sizes`` the largest size of every gate, by its letter.
    """

    A: Array
    B: Array
    C: Array
    D: Array
    E: Array
    sector: Box
    image: Box
    sizes: Mapping[str, float]

    def entrywise(self, *, of_input: bool = False) -> Array:
        """Bound |δ'| ≤ M |δ| entrywise, or |δ'| ≤ M |Δx| under one and the same state."""
        d = largest(self.sector)
        v = term = np.abs(self.E if of_input else self.C)
        for _ in range(4):  # D is nilpotent: channels feed later channels only
            term = above(np.abs(self.D), d[:, None] * term * (1 + 4 * UNIT))
            v = (v + term) * (1 + 4 * UNIT)
        if bool((term != 0).any()):
            raise CertificateError("the channels of the cell feed one another too often")
        M = above(np.abs(self.B), d[:, None] * v * (1 + 4 * UNIT)) * (1 + 2 * growth(len(d)))
        return M if of_input else (M + np.abs(self.A)) * (1 + 4 * UNIT)


def _elman(cell: ElmanCell, x: Box, s: Box) -> System:
    W, U, b = array_of(cell.W), array_of(cell.U), array_of(cell.b)
    n = len(b)
    pre = add(affine(W, s, b), affine(U, x, np.zeros(n)))
    return System(
        np.zeros((n, n)),
        np.eye(n),
        W,
        np.zeros((n, n)),
        U,
        slope(cell.activation, pre, cell.clip),
        value(cell.activation, pre, cell.clip),
        {},
    )


def _gru(cell: GRUCell, x: Box, s: Box, U_h: Box | None, *, mixed: bool) -> System:
    H = cell.hidden_size
    U, b, c = array_of(cell.U), array_of(cell.b_input), array_of(cell.b_recurrent)
    reads = affine(array_of(cell.W), x, b)
    x_r, x_z, x_n = ((reads[0][k : k + H], reads[1][k : k + H]) for k in (0, H, 2 * H))
    U_r, U_z, U_n = U[:H], U[H : 2 * H], U[2 * H :]
    u = affine(U, s, np.zeros(3 * H)) if U_h is None else U_h
    u_r, u_z, u_n = (add((u[0][k], u[1][k]), (c[k], c[k])) for k in _thirds(H))
    a_r, a_z = add(x_r, u_r), add(x_z, u_z)
    r, z = value(cell.gate, a_r, cell.clip), value(cell.gate, a_z, cell.clip)
    if cell.reset_after:
        q = u_n
        a_n = add(x_n, times(r, q))
    else:
        q = s
        a_n = add(x_n, affine(U_n, times(r, s), c[2 * H :]))
    n = value(cell.candidate, a_n, cell.clip)
    rest = one_minus(cell.gate, a_z, cell.clip)
    if cell.gate.name in ("sigmoid", "hardsigmoid"):
        image = hull(n, s)  # h' is a mean of h and n
    else:
        image = add(times(rest, n), times(z, s))
    slope_n = slope(cell.candidate, a_n, cell.clip)
    parts = [
        r,
        times(q, slope(cell.gate, a_r, cell.clip)),
        slope_n if mixed else times(rest, slope_n),
        times(add(s, negative(n)), slope(cell.gate, a_z, cell.clip)),
        z,
    ]
    eye, none = np.eye(H), np.zeros((H, H))
    C = np.concatenate([U_n if cell.reset_after else eye, U_r, none, U_z, eye])
    D = np.zeros((5 * H, 5 * H))
    D[2 * H : 3 * H, : 2 * H] = np.tile(eye if cell.reset_after else U_n, 2)
    if mixed:
        D[4 * H :, 2 * H : 3 * H] = -eye
    B = np.concatenate([none, none, eye, eye, eye], 1)
    W_r, W_z, W_n = np.split(array_of(cell.W), 3)
    E = np.concatenate([0 * W_n, W_r, W_n, W_z, 0 * W_n])
    sizes = _sizes({"r": r, "z": z, "n": n, "q": q, "h": s})
    return System(none, B, C, D, E, _beside(parts), image, sizes)


def _thirds(H: int) -> tuple[slice, slice, slice]:
    return slice(0, H), slice(H, 2 * H), slice(2 * H, 3 * H)


def _lstm(cell: LSTMCell, x: Box, s: Box, U_h: Box | None) -> System:
    H, P = cell.cell_size, cell.hidden_size
    U, b = array_of(cell.U), array_of(cell.b)
    h, c = (s[0][:P], s[1][:P]), (s[0][P:], s[1][P:])
    pre = add(affine(array_of(cell.W), x, b), affine(U, h, np.zeros(4 * H)) if U_h is None else U_h)
    a_i, a_f, a_g, a_o = ((pre[0][k * H : k * H + H], pre[1][k * H : k * H + H]) for k in range(4))
    peephole = np.zeros((3, H)) if cell.peephole is None else array_of(cell.peephole)
    p_i, p_f, p_o = ((p, p) for p in peephole)
    if cell.peephole is not None:
        a_i, a_f = add(a_i, times(p_i, c)), add(a_f, times(p_f, c))
    i, g = value(cell.gate, a_i, cell.clip), value(cell.candidate, a_g, cell.clip)
    f = (
        one_minus(cell.gate, a_i, cell.clip)
        if cell.input_forget
        else value(cell.gate, a_f, cell.clip)
    )
    # In balls that keep themselves, the next state is where every state is.
    c_next = add(times(f, c), times(i, g)) if U_h is None else c
    if cell.input_forget and cell.gate.name in ("sigmoid", "hardsigmoid"):
        mean = hull(g, c)  # c' is a mean of c and g
        c_next = np.maximum(c_next[0], mean[0]), np.minimum(c_next[1], mean[1])
    if cell.peephole is not None:
        a_o = add(a_o, times(p_o, c_next))
    o = value(cell.gate, a_o, cell.clip)
    squash_clip = cell.clip if cell.clip_output else None
    squashed = value(cell.squash, c_next, squash_clip)
    out = times(o, squashed)
    R = np.eye(H) if cell.projection is None else array_of(cell.projection)
    if cell.projection is not None:
        out = affine(R, out, np.zeros(P))
    slope_i = slope(cell.gate, a_i, cell.clip)
    zero = np.zeros(H)
    parts = [
        f,
        (zero, zero) if cell.input_forget else times(c, slope(cell.gate, a_f, cell.clip)),
        times(i, slope(cell.candidate, a_g, cell.clip)),
        times(add(g, negative(c)) if cell.input_forget else g, slope_i),
        times(o, slope(cell.squash, c_next, squash_clip)),
        times(squashed, slope(cell.gate, a_o, cell.clip)),
    ]
    S, keep = P + H, 0.0 if cell.input_forget else 1.0
    C, D, B = np.zeros((6 * H, S)), np.zeros((6 * H, 6 * H)), np.zeros((S, 6 * H))
    C[:H, P:] = np.eye(H)
    for row, gate, p in (
        (1, 1, keep * peephole[1]),
        (2, 2, zero),
        (3, 0, peephole[0]),
        (5, 3, zero),
    ):
        scale = keep if row == 1 else 1.0
        C[row * H : (row + 1) * H, :P] = scale * U[gate * H : (gate + 1) * H]
        C[row * H : (row + 1) * H, P:] = np.diag(p)
    D[4 * H : 5 * H, : 4 * H] = np.tile(np.eye(H), 4)
    D[5 * H :, : 4 * H] = np.tile(np.diag(peephole[2]), 4)
    B[P:, : 4 * H] = np.tile(np.eye(H), 4)
    B[:P, 4 * H :] = np.tile(R, 2)
    image = np.concatenate([out[0], c_next[0]]), np.concatenate([out[1], c_next[1]])
    W_i, W_f, W_g, W_o = np.split(array_of(cell.W), 4)
    E = np.concatenate([0 * W_f, keep * W_f, W_g, W_i, 0 * W_o, W_o])
    sizes = _sizes({"i": i, "f": f, "g": g, "o": o, "c": c, "squashed": squashed})
    return System(np.zeros((S, S)), B, C, D, E, _beside(parts), image, sizes)


def _beside(parts: list[Box]) -> Box:
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def system(cell: Cell, x: Box, s: Box, U_h: Box | None = None, *, mixed: bool) -> System:
    """Bound one step from states in s [S] under inputs in x [I].

    Args:
        cell: The cell.
        x: The domain.
        s: A box of states.
        U_h: A box of the recurrent products of a gated cell, where a better one is known.
        mixed: Take one z for both parts of a GRU's z h + (1 − z) n.
    """
    if isinstance(cell, ElmanCell):
        _continuous(cell.activation)
        return _elman(cell, x, s)
    if isinstance(cell, GRUCell):
        _continuous(cell.gate, cell.candidate)
        return _gru(cell, x, s, U_h, mixed=mixed)
    if isinstance(cell, LSTMCell):
        _continuous(cell.gate, cell.candidate, cell.squash)
        return _lstm(cell, x, s, U_h)
    raise CertificateError(f"certificates are for Elman, GRU and LSTM cells, not {cell.kind} ones")


def _continuous(*activations: Activation) -> None:
    for f in activations:
        if f.name not in VALUES:
            raise CertificateError(f"{f.name} jumps, so nothing bounds its slope")
