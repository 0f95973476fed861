"""The checker's own proof that a box with balls in it holds every state of a plain gated cell.

The set |s − centre| ≤ box, ‖h − centre_h‖₂ ≤ r_h, ‖c − centre_c‖₂ ≤ r_c keeps itself when
bounds on its image do not exceed it. Everything is a sum or product of bounds that are not
negative; ``_MORE`` covers the rounding of ten thousand of them.
"""

from __future__ import annotations

import numpy as np

from rnnaudit.certificates.checker_intervals import (
    Array,
    Box,
    CertificateError,
    above,
    add,
    affine,
    largest,
    negative,
    slope,
    times,
    value,
)
from rnnaudit.model import SIGMOID, TANH, Activation, GRUCell, LSTMCell

_MORE = 1 + 3e-12


def _length(v: Array) -> float:
    return float(np.sqrt((v * v).sum())) * _MORE


def _about(centre: Box, by: Array) -> Box:
    return add(centre, (-by, by))


def _split(box: Box, H: int) -> list[Box]:
    return [(box[0][k : k + H], box[1][k : k + H]) for k in range(0, len(box[0]), H)]


def _spectral(A: Array) -> float:
    """Bound ‖A‖₂ by its computed value and the residual of the computed factors.

    With A = U S V + E for any U, S, V: ‖A‖ ≤ ‖U‖ ‖S‖ ‖V‖ + ‖E‖, and a computed orthogonal
    factor has ‖U‖² ≤ 1 + ‖UᵀU − I‖_F.
    """
    U, S, V = np.linalg.svd(A, full_matrices=False)
    n = max(A.shape)
    rounding = 1.1 * (2 * n + 8) * 2.0**-53
    left = np.linalg.norm(U.T @ U - np.eye(U.shape[1])) + rounding * U.shape[1]
    right = np.linalg.norm(V @ V.T - np.eye(V.shape[0])) + rounding * V.shape[0]
    off = np.linalg.norm(A - (U * S) @ V) + rounding * float(S.sum() + np.linalg.norm(A))
    return float((S.max() * np.sqrt((1 + left) * (1 + right)) + off) * _MORE)


def _most(cap: Array, weight: Array, length: float) -> float:
    """Bound ‖weight ∘ v‖₂ over |v| ≤ cap, ‖v‖₂ ≤ length: the largest weights are used first."""
    order = np.argsort(-weight)
    square = cap[order] ** 2 * _MORE
    total = np.cumsum(square)
    spent = np.concatenate([[0.0], total[:-1]]) * (2 - _MORE) - total[-1] * 1e-14
    left = np.maximum(length * length * _MORE - np.maximum(spent, 0), 0)
    used = np.minimum(square, left)
    return float(np.sqrt((weight[order] ** 2 * used).sum())) * _MORE


def _pair(a: Array, a_length: float, b: Array, b_length: float) -> float:
    return min(_most(a, b, a_length), _most(b, a, b_length))


def _quotient(f: Activation, box: Box) -> Array:
    return largest(slope(f, box, None))


def _sigma(box: Box) -> Box:
    return value(SIGMOID, box, None)


def _tanh(box: Box) -> Box:
    return value(TANH, box, None)


class BallSet:
    """The set that a certificate states, and whether one step keeps it."""

    def __init__(
        self,
        cell: LSTMCell | GRUCell,
        x: Box,
        *,
        start: Array,
        centre: Array,
        box: Array,
        radii: tuple[float, ...],
    ) -> None:
        plain = cell.clip is None and (cell.gate, cell.candidate) == (SIGMOID, TANH)
        if isinstance(cell, LSTMCell):
            plain = plain and cell.squash == TANH and not cell.input_forget
            plain = plain and cell.peephole is None and cell.projection is None
        self.parts = 2 if isinstance(cell, LSTMCell) else 1
        numbers = np.concatenate([*x, box, centre, np.array(radii, dtype=np.float64)])
        if not plain or len(radii) != self.parts or not bool(np.isfinite(numbers).all()):
            raise CertificateError("balls are for plain cells, one for each part of the state")
        self.cell, self.start, self.centre, self.radii = cell, start, centre, radii
        self.H = cell.hidden_size
        self.box = box
        self.middle = (x[0] + x[1]) / 2
        self.half = np.maximum(x[1] - self.middle, self.middle - x[0]) * _MORE
        self.W, self.U = cell.W.numpy(), cell.U.numpy()
        gates = len(self.W) // self.H
        self.U_gates, self.W_gates = np.split(self.U, gates), np.split(self.W, gates)
        self.reads = above(np.abs(self.W), self.half)
        root = np.sqrt(len(self.half)) * _MORE
        self.reads_length = [_spectral(W * self.half) * root for W in self.W_gates]
        self.lengths = [_spectral(U) for U in self.U_gates]
        self.rows = np.sqrt((self.U**2).sum(1)) * _MORE

    def _holds_start(self) -> bool:
        off = np.abs(self.start - self.centre) * _MORE
        parts = np.split(off, self.parts)
        return bool((off <= self.box).all()) and all(
            _length(part) <= r for part, r in zip(parts, self.radii, strict=True)
        )

    def _moves(self) -> Array:
        """Bound |U (h − centre_h)| per row."""
        reach = above(np.abs(self.U), self.box[: self.H])
        moves: Array = np.minimum(reach, self.rows * self.radii[0] * _MORE)
        return moves

    def recurrent(self) -> Box:
        """Bound U h over the set."""
        c = self.centre[: self.H]
        return _about(affine(self.U, (c, c), np.zeros(len(self.U))), self._moves())

    def keeps_itself(self) -> bool:
        """Prove that the set holds the initial state and that one step maps it into itself."""
        if not self._holds_start():
            return False
        box: Array
        radii: tuple[float, ...]
        if isinstance(self.cell, LSTMCell):
            box, radii = self._lstm(self.cell)
        else:
            box, radii = self._gru(self.cell)
        kept = bool((box <= self.box).all())
        for part, r, mine in zip(np.split(self.box, self.parts), radii, self.radii, strict=True):
            kept = kept and (r <= mine or _length(part) <= mine)
        return kept

    def _gates(self) -> tuple[Array, list[Array], list[float]]:
        rec = self._moves()
        moves = np.split((self.reads + rec) * _MORE, len(self.lengths))
        lengths = [
            min((x + u * self.radii[0]) * _MORE, _length(m))
            for x, u, m in zip(self.reads_length, self.lengths, moves, strict=True)
        ]
        return rec, moves, lengths

    def _lstm(self, cell: LSTMCell) -> tuple[Array, tuple[float, float]]:
        H, m = self.H, self.middle
        h, c = self.centre[:H], self.centre[H:]
        hc, cc = (h, h), (c, c)
        at = add(affine(self.W, (m, m), cell.b.numpy()), affine(self.U, hc, np.zeros(4 * H)))
        centres = _split(at, H)
        rec, moves, lengths = self._gates()
        dc, n_c = self.box[H:], self.radii[1]
        around = [_about(a, v) for a, v in zip(centres, moves, strict=True)]
        kinds = (SIGMOID, SIGMOID, TANH, SIGMOID)
        quotients = [_quotient(f, box) for f, box in zip(kinds, around, strict=True)]
        e_i, e_f, e_g, e_o = (q * v * _MORE for q, v in zip(quotients, moves, strict=True))
        m_i, m_f, m_g, m_o = (
            _most(v, q, n) for v, q, n in zip(moves, quotients, lengths, strict=True)
        )
        i, f, g, o = (value(k, a, None) for k, a in zip(kinds, centres, strict=True))
        drift = largest(add(add(times(f, cc), times(i, g)), negative(cc)))
        r_c = (
            _most(dc, largest(f), n_c)
            + _pair(e_f, m_f, dc, n_c)
            + _most(e_f, np.abs(c), m_f)
            + _most(e_g, largest(i), m_g)
            + _pair(e_i, m_i, e_g, m_g)
            + _most(e_i, largest(g), m_i)
            + _length(drift)
        ) * _MORE
        reach = self._accumulated(centres, moves, rec, around)
        box_c = largest(add(reach, negative(cc)))
        r_c = min(r_c, _length(box_c))
        t = _tanh(cc)
        q_t = _quotient(TANH, _about(cc, np.maximum(box_c, dc)))
        r_h = (
            _most(box_c, largest(o) * q_t * _MORE, r_c)
            + _pair(e_o, m_o, q_t * box_c * _MORE, _most(box_c, q_t, r_c))
            + _most(e_o, largest(t), m_o)
            + _length(largest(add(times(o, t), negative(hc))))
        ) * _MORE
        box_h = largest(add(times(_sigma(around[3]), _tanh(reach)), negative(hc)))
        return np.concatenate([box_h, box_c]), (min(r_h, _length(box_h)), r_c)

    def _accumulated(
        self, centres: list[Box], moves: list[Array], rec: Array, around: list[Box]
    ) -> Box:
        """Bound c by its start and by κ, kept once i g ≤ κ (1 − f); from below alike."""
        keep = np.maximum(_sigma(negative(around[1]))[0], 1e-300)
        write = times(_sigma(around[0]), _tanh(around[2]))
        hi = np.maximum(write[1], 0) / keep * _MORE
        lo = np.maximum(-write[0], 0) / keep * _MORE
        hi = np.minimum(hi, self._joint(centres, moves, rec, 1.0))
        lo = np.minimum(lo, self._joint(centres, moves, rec, -1.0))
        first = self.start[self.H :]
        return np.minimum(-lo, first), np.maximum(hi, first)

    def _joint(self, centres: list[Box], moves: list[Array], rec: Array, sign: float) -> Array:
        """Bound sup σ(a_i) tanh(± a_g)(1 + e^{a_f}) by tangents and a chord of its logarithm.

        log σ and log tanh are concave and log(1 + e^a) is convex, so that a linear function
        of the pre-activations lies above their sum; its largest value over the inputs is at
        a corner. Any point may carry a tangent.
        """
        W_i, W_f, W_g = self.W_gates[:3]
        r_i, r_f, r_g = np.split(rec, 4)[:3]
        c_i, c_f = centres[0][1], centres[1][1]
        c_g = centres[2][1] if sign > 0 else -centres[2][0]
        v_i, v_f, v_g = moves[:3]
        top, low, high = c_g + v_g, c_f - v_f, c_f + v_f

        def log1pexp(a: Array) -> Array:
            result: Array = np.maximum(a, 0) + np.log1p(np.exp(-np.abs(a)))
            return result

        wide = high - low
        chord = np.where(
            wide < 1e-9, 1.0, (log1pexp(high) - log1pexp(low)) / np.maximum(wide, 1e-12)
        ) * (1 + 1e-9)
        p, q = c_i, np.maximum(top, 1e-3) / 2 + 5e-4
        best = np.full_like(c_i, np.inf)
        for _ in range(3):
            k_i, k_g = 1 / (1 + np.exp(p)), 2 / np.sinh(2 * q)
            row = k_i[:, None] * W_i + chord[:, None] * W_f + sign * k_g[:, None] * W_g
            size = (
                k_i[:, None] * np.abs(W_i)
                + chord[:, None] * np.abs(W_f)
                + k_g[:, None] * np.abs(W_g)
            )
            parts = [-log1pexp(-p), np.log(np.tanh(q)), log1pexp(low)]
            moved = k_i * (c_i - p + r_i) + k_g * (c_g - q + r_g) + chord * (c_f - low + r_f)
            scale = 1 + size @ self.half + sum(np.abs(part) for part in parts)
            scale = scale + k_i * (np.abs(c_i) + np.abs(p) + v_i)
            scale = scale + k_g * (np.abs(c_g) + q + v_g)
            scale = scale + chord * (np.abs(c_f) + np.abs(low) + v_f)
            total = sum(parts) + moved + np.abs(row) @ self.half + 1e-12 * scale
            best = np.minimum(best, total)
            corner = np.sign(row) * self.half
            p = c_i + (W_i * corner).sum(1) + r_i
            q = np.maximum(c_g + sign * (W_g * corner).sum(1) + r_g, 1e-3)
        bound: Array = np.where(top > 0, np.exp(best) * (1 + 1e-11), 0.0)
        return bound

    def _gru(self, cell: GRUCell) -> tuple[Array, tuple[float]]:
        H, m, h = self.H, self.middle, self.centre
        hc = (h, h)
        x_r, x_z, x_n = _split(affine(self.W, (m, m), cell.b_input.numpy()), H)
        u_r, u_z, q = _split(affine(self.U, hc, cell.b_recurrent.numpy()), H)
        rec, (v_r, v_z, _), (n_r, n_z, _) = self._gates()
        a_r, a_z = add(x_r, u_r), add(x_z, u_z)
        all_r, all_z = _about(a_r, v_r), _about(a_z, v_z)
        q_r, q_z = _quotient(SIGMOID, all_r), _quotient(SIGMOID, all_z)
        e_r, e_z = q_r * v_r * _MORE, q_z * v_z * _MORE
        m_r, m_z = _most(v_r, q_r, n_r), _most(v_z, q_z, n_z)
        r, z, rest = _sigma(a_r), _sigma(a_z), _sigma(negative(a_z))
        dh, n_h = self.box, self.radii[0]
        reads, U_n = self.reads[2 * H :], self.U_gates[2]
        if cell.reset_after:
            d = rec[2 * H :]
            n_d = min(self.lengths[2] * n_h * _MORE, _length(d))
            v_n = reads + (largest(r) + e_r) * d + largest(q) * e_r
            n_n = _most(d, largest(r), n_d) + _pair(e_r, m_r, d, n_d) + _most(e_r, largest(q), m_r)
            a_n = add(x_n, times(r, q))
            all_n = _about(a_n, v_n * _MORE)
            other = add(_about(x_n, reads), times(_sigma(all_r), _about(q, d)))
            all_n = np.maximum(all_n[0], other[0]), np.minimum(all_n[1], other[1])
            v_n = np.minimum(v_n * _MORE, largest(add(all_n, negative(a_n))))
        else:
            d = ((largest(r) + e_r) * dh + np.abs(h) * e_r) * _MORE
            n_d = _most(dh, largest(r), n_h) + _pair(e_r, m_r, dh, n_h) + _most(e_r, np.abs(h), m_r)
            n_d = min(n_d * _MORE, _length(d))
            v_n = reads + np.minimum(above(np.abs(U_n), d), self.rows[2 * H :] * n_d * _MORE)
            n_n = self.lengths[2] * n_d
            a_n = add(x_n, affine(U_n, times(r, hc), cell.b_recurrent.numpy()[2 * H :]))
            v_n = v_n * _MORE
            all_n = _about(a_n, v_n)
        n_n = min((self.reads_length[2] + n_n) * _MORE, _length(v_n))
        q_n = _quotient(TANH, all_n)
        e_n, m_n = q_n * v_n * _MORE, _most(v_n, q_n, n_n)
        n = _tanh(a_n)
        drift = largest(add(add(times(rest, n), times(z, hc)), negative(hc)))
        radius = (
            _most(e_n, largest(rest), m_n)
            + _most(dh, largest(z), n_h)
            + _pair(e_z, m_z, (dh + e_n) * _MORE, (n_h + m_n) * _MORE)
            + _most(e_z, largest(add(hc, negative(n))), m_z)
            + _length(drift)
        ) * _MORE
        # h' is a mean of h and n: a unit leaves its box only if n does.
        return largest(add(_tanh(all_n), negative(hc))), (radius,)
