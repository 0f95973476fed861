"""An independent checker of certificates: small, numpy only, no code of the search that found them.

A certificate is a plain document. The checker reads the weights, rebuilds what the document
claims of them (the box of states keeps itself, the multipliers' intervals, the matrix
inequality or the comparison matrix) and derives the depths anew. Every quantity that
decides is rounded the safe way; where rounding leaves a doubt, the document is refused.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rnnaudit.certificates.checker_balls import BallSet
from rnnaudit.certificates.checker_intervals import (
    TINY,
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
    negative,
    one_minus,
    slope,
    times,
    value,
)
from rnnaudit.model import (
    Activation,
    ElmanCell,
    GRUCell,
    LSTMCell,
    Recurrence,
    fingerprint,
)

SCHEMA = "rnnaudit.certificate/1"

_DEEPEST = 1_000_000


@dataclass(frozen=True, slots=True)
class Claim:
    """The output h, per unit (``max``) or in the 2-norm, errs by at most ε at depths k and more."""

    eps: float
    norm: str
    k: int


@dataclass(frozen=True, slots=True)
class Checked:
    """What was proved again: the rate of contraction and the depths that follow."""

    recurrence: str
    method: str
    rate: float
    domain: str
    claims: tuple[Claim, ...]


def check(document: Mapping[str, Any], recurrence: Recurrence) -> Checked:
    """Prove again what a certificate claims of a recurrence.

    Raises:
        CertificateError: It is of another model, was changed, or proves less than it claims.
    """
    proof = _Proof(document, recurrence)
    claims = []
    for wanted in proof.read("claims", list):
        claim = Claim(float(wanted["eps"]), str(wanted["norm"]), int(wanted["k"]))
        k = proof.depth(claim.eps, claim.norm)
        if k is None or k > claim.k:
            raise CertificateError(
                f"the certificate claims k = {claim.k} for ε = {claim.eps:g}; proved is {k}",
                help="it was changed, or is of another version; certify the model again",
            )
        claims.append(claim)
    return Checked(
        str(document.get("recurrence", "")), proof.method, proof.rate, proof.domain, tuple(claims)
    )


def derive(
    document: Mapping[str, Any], recurrence: Recurrence, wanted: Iterable[tuple[float, str]]
) -> tuple[Claim, ...]:
    """Return the depths that a certificate proves for pairs of ε and norm, whatever it claims.

    Raises:
        CertificateError: It proves no rate at all.
    """
    proof = _Proof(document, recurrence)
    found = [(eps, norm, proof.depth(eps, norm)) for eps, norm in wanted]
    return tuple(Claim(eps, norm, k) for eps, norm, k in found if k is not None)


def pack(v: Array) -> dict[str, Any]:
    """Write an array as a JSON-able mapping: its shape and its little-endian float64 bytes."""
    return {
        "shape": list(v.shape),
        "float64": base64.b64encode(np.ascontiguousarray(v, dtype="<f8").tobytes()).decode("ascii"),
    }


def _array(v: Any) -> Array:
    result: Array = v.detach().cpu().numpy().astype(np.float64)
    return result


@dataclass(frozen=True, slots=True)
class _System:
    """δ' = A δ + B w, w = diag(d) v, v = C δ + D w, d in ``sector``; ``image`` bounds φ(S, X)."""

    A: Array
    B: Array
    C: Array
    D: Array
    sector: Box
    image: Box


def _elman(cell: ElmanCell, x: Box, s: Box) -> _System:
    W, U, b = _array(cell.W), _array(cell.U), _array(cell.b)
    n = len(b)
    pre = add(affine(W, s, b), affine(U, x, np.zeros(n)))
    return _System(
        np.zeros((n, n)),
        np.eye(n),
        W,
        np.zeros((n, n)),
        slope(cell.activation, pre, cell.clip),
        value(cell.activation, pre, cell.clip),
    )


def _gru(cell: GRUCell, x: Box, s: Box, U_h: Box | None, *, mixed: bool) -> _System:
    H = cell.hidden_size
    U, b, c = _array(cell.U), _array(cell.b_input), _array(cell.b_recurrent)
    reads = affine(_array(cell.W), x, b)
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
    return _System(none, B, C, D, _beside(parts), image)


def _thirds(H: int) -> tuple[slice, slice, slice]:
    return slice(0, H), slice(H, 2 * H), slice(2 * H, 3 * H)


def _lstm(cell: LSTMCell, x: Box, s: Box, U_h: Box | None) -> _System:
    H, P = cell.cell_size, cell.hidden_size
    U, b = _array(cell.U), _array(cell.b)
    h, c = (s[0][:P], s[1][:P]), (s[0][P:], s[1][P:])
    pre = add(affine(_array(cell.W), x, b), affine(U, h, np.zeros(4 * H)) if U_h is None else U_h)
    a_i, a_f, a_g, a_o = ((pre[0][k * H : k * H + H], pre[1][k * H : k * H + H]) for k in range(4))
    peephole = np.zeros((3, H)) if cell.peephole is None else _array(cell.peephole)
    p_i, p_f, p_o = ((p, p) for p in peephole)
    if cell.peephole is not None:
        a_i, a_f = add(a_i, times(p_i, c)), add(a_f, times(p_f, c))
    i, g = value(cell.gate, a_i, cell.clip), value(cell.candidate, a_g, cell.clip)
    f = (
        one_minus(cell.gate, a_i, cell.clip)
        if cell.input_forget
        else value(cell.gate, a_f, cell.clip)
    )
    if cell.input_forget and cell.gate.name in ("sigmoid", "hardsigmoid"):
        c_next = hull(g, c)  # c' is a mean of c and g
    else:
        # In balls that keep themselves, the next state is where every state is.
        c_next = add(times(f, c), times(i, g)) if U_h is None else c
    if cell.peephole is not None:
        a_o = add(a_o, times(p_o, add(times(f, c), times(i, g))))
    o = value(cell.gate, a_o, cell.clip)
    squash_clip = cell.clip if cell.clip_output else None
    squashed = value(cell.squash, c_next, squash_clip)
    out = times(o, squashed)
    R = np.eye(H) if cell.projection is None else _array(cell.projection)
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
    return _System(np.zeros((S, S)), B, C, D, _beside(parts), image)


def _beside(parts: list[Box]) -> Box:
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _positive(M: Array, error: float) -> bool:
    """Prove that every symmetric matrix within ``error`` of M in the 2-norm is ≻ 0.

    M = LLᵀ + E, so λ_min(M) ≥ λ_min(E), and E is computed with a bound on its rounding.
    """
    n = len(M)
    if not (np.isfinite(M).all() and math.isfinite(error) and (M == M.T).all()):
        return False
    shift = 5 * growth(n + 4) * float(np.trace(M)) + 2 * error
    try:
        L = np.tril(np.linalg.cholesky(M - shift * np.eye(n)))
    except np.linalg.LinAlgError:
        return False
    S = M - L @ L.T
    rounding = 1.02 * growth(n + 2) * float((L**2).sum() + np.linalg.norm(M)) + n * n * TINY
    middle = float(S.diagonal().min())
    spread = 1.02 * float(np.linalg.norm(S - middle * np.eye(n))) + 8 * UNIT * n * abs(middle)
    return bool(0.99 * middle > spread + rounding + error)


def _scale(M: Array) -> Array:
    """Return powers of two that bring the diagonal of M near 1; scaling by them is exact."""
    exponent = np.frexp(np.clip(np.diagonal(M), 1e-90, 1e90))[1]
    scale: Array = np.exp2(-np.floor(exponent / 2))
    return scale


def _proves_form(M: Array, error: Array) -> bool:
    """Prove M ≻ 0 for every symmetric matrix that is within ``error`` of M entrywise."""
    s = _scale(M)
    slack = 1.02 * float(np.linalg.norm(s[:, None] * error * s)) + len(M) * 1e-200
    return _positive(s[:, None] * M * s, slack)


class _Proof:
    """One certificate, proved again for a recurrence; ``depth`` derives what follows."""

    def __init__(self, document: Mapping[str, Any], recurrence: Recurrence) -> None:
        self.document, self.cell = document, recurrence.cell
        self._constants: dict[str, float] = {}
        if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
            raise CertificateError(
                f"a certificate has the schema {SCHEMA}, and this has "
                f"{document.get('schema') if isinstance(document, Mapping) else document!r}",
                help="give a file that `rnnaudit certify` wrote",
            )
        if self.read("fingerprint", str) != fingerprint(recurrence):
            raise CertificateError(
                "the certificate is of another model: the fingerprint of its weights differs",
                help="certify this model",
            )
        self.method, self.rate = self.read("method", str), self.number("rate")
        domain = self.read("domain", Mapping)
        self.domain = str(domain.get("name", ""))
        size = self.cell.input_size
        self.x = (self.array(domain["lo"], (size,)), self.array(domain["hi"], (size,)))
        states = self.read("states", Mapping)
        S = self.cell.state_size
        self.s = (self.array(states["lo"], (S,)), self.array(states["hi"], (S,)))
        self.start = _array(recurrence.initial.value)
        if not (0 < self.rate < 1 and (self.x[0] <= self.x[1]).all()):
            raise CertificateError("the rate must lie between 0 and 1, and the domain hold inputs")
        form = self.read("form", str)
        mixed = form == "metric"
        with np.errstate(all="ignore"):
            self.system = self._system(self.s, mixed=mixed)
            self._keeps_states()
            if document.get("balls") is not None:
                # Both hold every reachable state, and so does what they have in common.
                recurrent = self._balls()
                self.system = self._system(self.s, recurrent, mixed=mixed)
            self._bounds()
            if form == "metric":
                self._metric()
            elif form == "comparison":
                self._comparison()
            else:
                raise CertificateError(f"the form of a proof is metric or comparison, not {form!r}")

    def read(self, key: str, kind: type) -> Any:
        """Return an entry of the document, of the kind that it must have."""
        value = self.document.get(key)
        if not isinstance(value, kind):
            raise CertificateError(f"the certificate has no {key!r} that is a {kind.__name__}")
        return value

    def number(self, key: str) -> float:
        """Return a finite number of the document."""
        value = self.document.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CertificateError(f"the certificate has no number {key!r}")
        if not math.isfinite(value):
            raise CertificateError(f"{key!r} must be finite, got {value}")
        return float(value)

    def array(self, packed: Any, shape: tuple[int, ...]) -> Array:
        """Unpack an array of the shape that it must have; NaN is refused."""
        try:
            raw = base64.b64decode(packed["float64"], validate=True)
            v = np.frombuffer(raw, dtype="<f8").astype(np.float64).reshape(packed["shape"])
        except (TypeError, KeyError, ValueError) as error:
            raise CertificateError(
                f"an array of the certificate cannot be read ({error})"
            ) from error
        if v.shape != shape or np.isnan(v).any():
            raise CertificateError(f"an array must have shape {shape} and no NaN, got {v.shape}")
        return v

    def _system(self, s: Box, U_h: Box | None = None, *, mixed: bool) -> _System:
        for f in _activations(self.cell):
            if f.name not in VALUES:
                raise CertificateError(f"{f.name} jumps, so nothing bounds its slope")
        if isinstance(self.cell, ElmanCell):
            return _elman(self.cell, self.x, s)
        if isinstance(self.cell, GRUCell):
            return _gru(self.cell, self.x, s, U_h, mixed=mixed)
        return _lstm(self.cell, self.x, s, U_h)

    def _keeps_states(self) -> None:
        """Check that the box holds the initial state and its own image."""
        image = self.system.image
        inside = (image[0] >= self.s[0]) & (image[1] <= self.s[1])
        begins = (self.start >= self.s[0]) & (self.start <= self.s[1])
        if not bool(inside.all() and begins.all()):
            raise CertificateError("the box of states does not hold its own image")

    def _balls(self) -> Box:
        """Check that box and balls keep themselves; return what they bound U h by."""
        if isinstance(self.cell, ElmanCell):
            raise CertificateError("balls are for gated cells")
        stated = self.read("balls", Mapping)
        centre = self.array(stated.get("centre"), self.start.shape)
        radii = stated.get("radii")
        if not isinstance(radii, list) or not all(isinstance(r, float) for r in radii):
            raise CertificateError("balls need radii, a list of numbers")
        box = self.array(stated.get("box"), self.start.shape)
        balls = BallSet(
            self.cell, self.x, start=self.start, centre=centre, box=box, radii=tuple(radii)
        )
        if not balls.keeps_itself():
            raise CertificateError("the balls of states do not hold their own image")
        within = add((centre, centre), (-box, box))
        self.s = np.maximum(self.s[0], within[0]), np.minimum(self.s[1], within[1])
        P = self.cell.hidden_size
        U = _array(self.cell.U)
        direct = affine(U, (self.s[0][:P], self.s[1][:P]), np.zeros(len(U)))
        around = balls.recurrent()
        return np.maximum(direct[0], around[0]), np.minimum(direct[1], around[1])

    def _bounds(self) -> None:
        """Work out how far states are from the initial one, and how far one step takes it."""
        sector = self.system.sector
        if not bool(np.isfinite(sector[0]).all() and np.isfinite(sector[1]).all()):
            raise CertificateError("nothing bounds the slopes over the box of states")
        self.r = np.maximum(self.s[1] - self.start, self.start - self.s[0]) * (1 + 4 * UNIT)
        begin = (self.start, self.start)
        first = self._system(begin, mixed=True).image
        moved = np.maximum(first[1] - self.start, self.start - first[0])
        self.first = moved * (1 + 4 * UNIT) + TINY

    def _sector(self) -> Box:
        """Return the multipliers' intervals of the document, which must hold what is true."""
        m = len(self.system.sector[0])
        stated = self.read("sector", Mapping)
        lo, hi = self.array(stated["lo"], (m,)), self.array(stated["hi"], (m,))
        true = self.system.sector
        if not bool((lo <= true[0]).all() and (true[1] <= hi).all()):
            raise CertificateError("the multipliers' intervals do not hold what the weights give")
        return lo, hi

    def _metric(self) -> None:
        """Check the matrix inequality of the circle criterion, and that P is a metric."""
        S, m = self.cell.state_size, len(self.system.sector[0])
        metric = self.read("metric", Mapping)
        P, T = self.array(metric["P"], (S, S)), self.array(metric["T"], (m,))
        if not bool((P == P.T).all() and np.isfinite(P).all() and np.isfinite(T).all()):
            raise CertificateError("the metric must be symmetric and finite")
        if not _proves_form(P, np.zeros_like(P)):
            raise CertificateError("the metric is not positive definite")
        lo, hi = self.sector = self._sector()
        if not bool((T >= 0).all() and np.isfinite(lo).all() and np.isfinite(hi).all()):
            raise CertificateError("multipliers must be finite and not negative")
        y = self.system
        G, Q = np.concatenate([y.A, y.B], 1), np.concatenate([y.C, y.D], 1)
        absG, absQ = np.abs(G), np.abs(Q)
        M = Q.T @ ((T * lo * hi)[:, None] * Q) - G.T @ (P @ G)
        size = absQ.T @ ((T * np.abs(lo) * np.abs(hi))[:, None] * absQ)
        size += absG.T @ (np.abs(P) @ absG)
        cross = (T * (lo + hi))[:, None] * Q / 2
        cross_size = (T * (np.abs(lo) + np.abs(hi)))[:, None] * absQ
        M[:S, :S] += self.rate**2 * P
        M[S:] -= cross
        M[:, S:] -= cross.T
        M[S:, S:] += np.diag(T)
        size[:S, :S] += self.rate**2 * np.abs(P)
        size[S:] += cross_size
        size[:, S:] += cross_size.T
        size[S:, S:] += np.diag(T)
        # Two products of at most S + m terms each, and fewer than twenty single roundings.
        error = 1.02 * growth(2 * (S + m) + 24) * (size + size.T) + TINY
        if not _proves_form((M + M.T) / 2, error):
            raise CertificateError(f"the metric does not prove the rate {self.rate:.6g}")
        self.P, self.T = P, T

    def _comparison(self) -> None:
        """Check M v ≤ rate · v for the matrix that bounds one step entrywise."""
        y = self.system
        d = np.maximum(np.abs(y.sector[0]), np.abs(y.sector[1]))
        v = term = np.abs(y.C)
        n = len(d)
        for _ in range(4):  # D is nilpotent: channels feed later channels only
            term = above(np.abs(y.D), d[:, None] * term * (1 + 4 * UNIT))
            v = (v + term) * (1 + 4 * UNIT)
        if bool((term != 0).any()):
            raise CertificateError("the channels of the cell feed one another too often")
        M = above(np.abs(y.B), d[:, None] * v * (1 + 4 * UNIT)) * (1 + 2 * growth(n))
        self.M: Array = (M + np.abs(y.A)) * (1 + 4 * UNIT)
        self.v = self.array(self.read("comparison", Mapping)["weights"], (len(M),))
        if not bool((self.v > 0).all() and np.isfinite(self.v).all()):
            raise CertificateError("weights must be positive")
        if not bool((above(self.M, self.v) <= self.rate * self.v * (1 - 4 * UNIT)).all()):
            raise CertificateError(f"the weights do not prove the rate {self.rate:.6g}")

    def depth(self, eps: float, norm: str) -> int | None:
        """Return the smallest depth that is proved for ε; None where none is."""
        if norm not in ("max", "2"):
            raise CertificateError(f"the norm of a claim is max or 2, not {norm!r}")
        if not eps > 0:
            return None
        H = self.cell.hidden_size
        with np.errstate(all="ignore"):
            if self.document.get("form") == "comparison":
                return self._iterated(eps, lambda e: _size(e[:H], norm))
            return self._geometric(eps, norm)

    def _iterated(self, eps: float, output: Callable[[Array], float]) -> int | None:
        e, failed = self.r, -1
        tail = output(self.v)
        if not np.isfinite(e).all():
            return None
        for k in range(_DEEPEST):
            if not output(e) <= eps:
                failed = k
            t = float((e / self.v).max()) * (1 + 4 * UNIT)
            if t * tail * (1 + 8 * UNIT) <= eps:
                return failed + 1
            if k > 3000:
                if not math.isfinite(t * tail):
                    return None
                apart = math.log(t * tail) - math.log(eps)  # the quotient may overflow
                more = math.ceil(apart / -math.log(self.rate)) + 1
                return k + more if k + more < _DEEPEST else None
            e = above(self.M, e)
        return None

    def _geometric(self, eps: float, norm: str) -> int | None:
        H, P = self.cell.hidden_size, self.P
        later = self._constant(norm)
        if not math.isfinite(later) or len(P) == 0:
            return None
        k = 0 if _size(self.r[:H], norm) <= eps else 1
        if k == 0 and later * self.rate <= eps:
            return 0
        if later == 0 or self.rate == 0:
            return 1
        apart = math.log(eps) - math.log(later)  # the quotient may underflow
        k = max(1, math.floor(apart / math.log(self.rate)) - 1)
        while k < _DEEPEST:
            # A power below the smallest float is not zero.
            power = self.rate**k * (1 + 1e-14) + 5e-324
            if later * power * (1 + 1e-14) + 5e-324 <= eps:
                return k
            k += 1
        return None

    def _constant(self, norm: str) -> float:
        """Bound the output's error at k ≥ 1 per λᵏ; worked out once for each norm."""
        if norm not in self._constants:
            within = self._radius(self.r), self._radius(self.first) / (1 - self.rate)
            radius = min(within) * (1 + 1e-15)
            H = self.cell.hidden_size
            unit = self._unit(H) if norm == "max" else self._length(H)
            self._constants[norm] = unit * radius * (1 + 1e-14)
        return self._constants[norm]

    def _radius(self, r: Array) -> float:
        """Bound √(δᵀPδ) over |δ| ≤ r, by rᵀ|P|r or by a diagonal form above P."""
        if not np.isfinite(r).all():
            return math.inf
        plain = float(r @ (np.abs(self.P) @ r)) * (1 + 2 * growth(2 * len(r) + 4))
        weights = self.T if len(self.T) == len(r) else np.diagonal(self.P)
        t = self._spread(weights)
        scaled = t * float((weights * r * r).sum()) * (1 + 2 * growth(len(r) + 6))
        return math.sqrt(min(plain, scaled)) * (1 + 1e-14)

    def _spread(self, weights: Array) -> float:
        """Bound the smallest t with P ⪯ t diag(weights)."""
        if not bool((weights > 0).all()):
            return math.inf
        root = np.sqrt(weights)
        guess = float(np.linalg.eigvalsh(self.P / root[:, None] / root)[-1])
        for margin in (1e-9, 1e-6, 1e-3):
            t = guess * (1 + margin)
            D = np.diag(t * weights)
            if _proves_form(D - self.P, 4 * UNIT * (D + np.abs(self.P))):
                return t
        return math.inf

    def _unit(self, H: int) -> float:
        """Bound |h_i| per ‖δ‖_P at k ≥ 1, over all units."""
        P = self.P
        s = _scale(P)
        scaled = s[:, None] * P * s
        X = np.linalg.inv(scaled)
        # P⁻¹ = X + P⁻¹E with E = I − P X, so |P⁻¹ − X| ≤ ‖X‖ ‖E‖ / (1 − ‖E‖) entrywise.
        E = np.eye(len(P)) - scaled @ X
        rounding = growth(len(P) + 2) * float(np.linalg.norm(np.abs(scaled) @ np.abs(X)) + len(P))
        off = 1.02 * (float(np.linalg.norm(E)) + rounding)
        if not off < 0.5:
            return math.inf
        diagonal = np.diagonal(X) + 1.02 * float(np.linalg.norm(X)) * off / (1 - off)
        unit = np.sqrt(diagonal)[:H] * s[:H] * (1 + 1e-14)
        if isinstance(self.cell, ElmanCell):
            lo, hi = self.sector
            zero = (lo <= 0) & (hi >= 0)
            if bool(zero.all()):
                # The last step may zero the slopes of all other units.
                unit = np.minimum(unit, (1 + 1e-14) / np.sqrt(np.diagonal(P)))
        return float(unit.max()) if H else 0.0

    def _length(self, H: int) -> float:
        """Bound ‖h‖₂ per ‖δ‖_P at k ≥ 1."""
        S = len(self.P)
        bounds = [(np.eye(S)[:H], 1.0)]
        if isinstance(self.cell, ElmanCell):
            largest = np.maximum(np.abs(self.sector[0]), np.abs(self.sector[1]))
            bounds.append((largest[:, None] * _array(self.cell.W), self.rate))
        lengths = []
        for A, scale in bounds:
            F = A.T @ A
            root = np.linalg.inv(np.linalg.cholesky(self.P))
            guess = np.linalg.eigvalsh(root @ F @ root.T)[-1]
            size = np.abs(A).T @ np.abs(A)
            for margin in (1e-9, 1e-6, 1e-3):
                t = float(guess) * (1 + margin) + 1e-200
                error = 1.02 * growth(len(A) + 8) * size + 4 * UNIT * (t * np.abs(self.P))
                M = t * self.P - F
                if _proves_form((M + M.T) / 2, error + TINY):
                    lengths.append(math.sqrt(t) / scale * (1 + 1e-14))
                    break
        return min(lengths, default=math.inf)


def _size(e: Array, norm: str) -> float:
    if not len(e):
        return 0.0
    return float(e.max()) if norm == "max" else float(np.linalg.norm(e)) * (1 + growth(len(e) + 4))


def _activations(cell: ElmanCell | GRUCell | LSTMCell) -> tuple[Activation, ...]:
    if isinstance(cell, ElmanCell):
        return (cell.activation,)
    if isinstance(cell, GRUCell):
        return (cell.gate, cell.candidate)
    return (cell.gate, cell.candidate, cell.squash)
