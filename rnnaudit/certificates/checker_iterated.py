"""The checker's comparisons: what bounds one step entry by entry, iterated step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rnnaudit.certificates.checker_intervals import (
    UNIT,
    Array,
    CertificateError,
    above,
    growth,
    largest,
    length_above,
)
from rnnaudit.certificates.checker_metric import DEEPEST, Gauge
from rnnaudit.certificates.checker_systems import System, array_of
from rnnaudit.model import SIGMOID, TANH, Cell, GRUCell, LSTMCell

Step = Callable[[Array], Array]

_STEPS = 3000
"""Steps taken one by one; beyond them the rate decides."""

MILLER_HARDT = "Miller–Hardt"
TERZI = "δISS (Terzi et al.)"
BONASSI = "δISS (Bonassi et al.)"
BONASSI_AFTER = BONASSI + ", reset after"
PUBLISHED = (MILLER_HARDT, TERZI, BONASSI, BONASSI_AFTER)


@dataclass(frozen=True, slots=True, eq=False)
class Iterated:
    """|δ'| ≤ step(|δ|) with step(v) ≤ rate · v, proved on construction; step is monotone.

    ``r`` bounds the first differences. Where ``parts`` are given, the entries are not units
    but the largest unit of each part of the state, the first of which is h.
    """

    step: Step
    v: Array
    rate: float
    r: Array
    outputs: int
    parts: tuple[int, ...] | None = None

    def prove(self) -> None:
        """Check that the weights are positive and contract.

        Raises:
            CertificateError: They are not, or do not.
        """
        if not bool((self.v > 0).all() and np.isfinite(self.v).all()):
            raise CertificateError("weights must be positive")
        if not bool((self.step(self.v) <= self.rate * self.v * (1 - 4 * UNIT)).all()):
            raise CertificateError(f"the weights do not prove the rate {self.rate:.6g}")

    def gauge(self) -> Gauge:
        """Return the weighted max-norm max |δ_i| / v_i."""

        def measure(r: Array) -> float:
            return float((self._joined(r) / self.v).max(initial=0.0)) * (1 + 4 * UNIT)

        radius = float((self._begin() / self.v).max(initial=0.0)) * (1 + 4 * UNIT)
        return Gauge(self.rate, radius, self._of_h(self.v), measure)

    def depth(self, eps: float, norm: str, A: Array | None, through: Array | None) -> int | None:
        """Return the smallest depth that is proved for ε of the output A h; None without one."""
        del through  # for metrics

        def output(e: Array) -> float:
            h = self._of_h(e)
            return length_above(h if A is None else above(np.abs(A), h), norm)

        with np.errstate(all="ignore"):
            return settled(self.step, self._begin(), self.v, rate=self.rate, output=output, eps=eps)

    def _begin(self) -> Array:
        return self._joined(self.r)

    def _joined(self, r: Array) -> Array:
        """Return the entries that the sizes r [S] of a state's units have."""
        if self.parts is None:
            return r
        ends = np.cumsum(self.parts)
        return np.array([p.max(initial=0.0) for p in np.split(r, ends[:-1])])

    def _of_h(self, e: Array) -> Array:
        return e[: self.outputs] if self.parts is None else np.full(self.outputs, e[0])


def settled(
    step: Step,
    first: Array,
    v: Array,
    *,
    rate: float,
    output: Callable[[Array], float],
    eps: float,
) -> int | None:
    """Return the smallest k with output(e_j) ≤ ε for every j ≥ k, e_{j+1} = step(e_j)."""
    e, failed = first, -1
    tail = output(v)
    if not np.isfinite(e).all():
        return None
    for k in range(_STEPS + 1):
        if not output(e) <= eps:
            failed = k
        # e ≤ t v, and t only shrinks from here on.
        t = float((e / v).max(initial=0.0)) * (1 + 4 * UNIT)
        if t * tail * (1 + 8 * UNIT) <= eps:
            return failed + 1
        e = step(e)
    if not math.isfinite(t * tail):
        return None
    apart = math.log(t * tail) - math.log(eps)  # the quotient may overflow
    more = math.ceil(apart / -math.log(rate)) + 1
    return _STEPS + more if _STEPS + more < DEEPEST else None


def comparison(system: System) -> Step:
    """Return the step e ↦ M e."""
    M = system.entrywise()
    return lambda e: above(M, e)


def average(cell: Cell, mixed: System) -> Step:
    """Return the step e ↦ max over z of (z e + (1 − z) B e) + Q e of a GRU's mean of h and n.

    Raises:
        CertificateError: The cell mixes by no gate with values in [0, 1].
    """
    if not isinstance(cell, GRUCell) or cell.gate.name not in ("sigmoid", "hardsigmoid"):
        raise CertificateError("the average form is for GRUs whose gate z lies in [0, 1]")
    H = cell.hidden_size
    U_r, U_z, U_n = np.split(np.abs(array_of(cell.U)), 3)
    d = largest(mixed.sector)
    r, inner, n, z_slope, _ = np.split(d, 5)
    more = 1 + 4 * UNIT
    if cell.reset_after:
        reads = (r[:, None] * U_n + inner[:, None] * U_r) * more
    else:
        reads = above(U_n, (np.diag(r) + inner[:, None] * U_r) * more)
    B, Q = n[:, None] * reads * more, z_slope[:, None] * U_z * more
    lo, hi = (np.clip(end[-H:], 0, 1) for end in mixed.sector)

    def step(e: Array) -> Array:
        own = above(B, e)
        ends = [z * e + (1 - z) * more * own for z in (lo, hi)]
        bound: Array = (np.maximum(*ends) * more + above(Q, e)) * more
        return bound

    return step


def published(method: str, cell: Cell, system: System) -> tuple[Step, tuple[int, ...]]:
    """Return the comparison of norms that a published condition makes, and the parts it compares.

    Raises:
        CertificateError: The condition is not for this cell.
    """
    if not isinstance(cell, GRUCell | LSTMCell):
        raise CertificateError(f"{method} is no condition for {cell.kind} cells")
    standard = cell.clip is None and (cell.gate, cell.candidate) == (SIGMOID, TANH)
    s, rows = system.sizes, _row_norms(cell)
    if isinstance(cell, GRUCell):
        if standard and method == (BONASSI_AFTER if cell.reset_after else BONASSI):
            return _gru(cell, s, rows)
    elif method in (MILLER_HARDT, TERZI):
        plain = cell.peephole is None and cell.projection is None and not cell.input_forget
        if standard and plain and cell.squash == TANH:
            return _lstm(method, cell, s, rows)
    raise CertificateError(f"{method} is no condition for a {cell.kind} of this form")


def _lstm(
    method: str, cell: LSTMCell, s: Mapping[str, float], rows: list[float]
) -> tuple[Step, tuple[int, ...]]:
    U_i, U_f, U_g, U_o = rows
    H = cell.hidden_size
    if method == TERZI:
        alpha = U_f * s["c"] / 4 + s["i"] * U_g + U_i * s["g"] / 4
        o_row = [s["o"] * alpha + s["squashed"] * U_o / 4, s["o"] * s["f"]]
        return _norms([o_row, [alpha, s["f"]]]), (H, H)
    # |c| ≤ 1 / (1 − f̄) in place of c̄, and 1 in place of ī, ḡ, ō and tanh(c̄).
    if not s["f"] < 1:
        raise CertificateError("the forget gate can reach 1")
    c = max(s["c"], 1 / (1 - s["f"]))
    return _norms([[s["f"] + U_f * c / 4 + U_i / 4 + U_g + U_o / 4]]), (2 * H,)


def _gru(cell: GRUCell, s: Mapping[str, float], rows: list[float]) -> tuple[Step, tuple[int, ...]]:
    U_r, U_z, U_n = rows
    read = s["q"] * U_r / 4 if cell.reset_after else U_n * U_r * s["h"] / 4
    factor = (U_n * s["r"] + read) * (1 + 8 * UNIT)
    if not (factor < 1 and s["z"] < 1):
        raise CertificateError("the candidate does not contract, so that no mean with it does")
    # z|δ| + (1 − z) factor |δ| is largest at the largest z, since the factor is below 1.
    room = (1 - s["z"]) * (1 + 4 * UNIT)
    rate = s["z"] + room * factor + (s["h"] + s["n"]) * U_z / 4
    return _norms([[rate]]), (cell.hidden_size,)


def _row_norms(cell: GRUCell | LSTMCell) -> list[float]:
    """Bound ‖U_g‖_∞ of every gate's recurrent matrix."""
    U = np.abs(array_of(cell.U))
    sums = above(U, np.ones(U.shape[1]))
    return [float(part.max(initial=0.0)) for part in np.split(sums, 3 if cell.kind == "gru" else 4)]


def _norms(M: list[list[float]]) -> Step:
    """Return e ↦ M e for entries that fewer than a dozen roundings made."""
    matrix = np.array(M) * (1 + growth(24))
    return lambda e: above(matrix, e)
