"""An independent checker of certificates: small, numpy only, no code of the search that found them.

A certificate is a plain document. The checker reads the weights, rebuilds what the document
claims of them (the box of states keeps itself, the multipliers' intervals, the matrix
inequality or the comparison) and derives the depths anew. Every quantity that decides is
rounded the safe way; where rounding leaves a doubt, the document is refused.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rnnaudit.certificates.checker_balls import BallSet
from rnnaudit.certificates.checker_intervals import (
    TINY,
    UNIT,
    Array,
    Box,
    CertificateError,
    add,
    affine,
)
from rnnaudit.certificates.checker_iterated import (
    PUBLISHED,
    Iterated,
    average,
    comparison,
    published,
)
from rnnaudit.certificates.checker_linear import Filter, transition
from rnnaudit.certificates.checker_metric import DEEPEST, Gauge, Metric
from rnnaudit.certificates.checker_systems import System, array_of, system
from rnnaudit.model import ElmanCell, GRUCell, LSTMCell, Recurrence, fingerprint

SCHEMA = "rnnaudit.certificate/1"

NORMS = {
    "metric": "weighted 2-norm",
    "linear": "weighted 2-norm",
    "comparison": "weighted max-norm",
    "average": "weighted max-norm",
    "norms": "∞-norm",
}
"""The norm that each form of proof contracts in."""

METHODS = {
    "metric": ("spectral norm", "numerical radius", "circle criterion"),
    "linear": ("linear",),
    "comparison": ("comparison matrix",),
    "average": ("average form",),
    "norms": PUBLISHED,
}
"""The methods that a proof of each form may name."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The output, per unit (``max``) or in the 2-norm, errs by at most ε at depths k and more."""

    eps: float
    norm: str
    k: int

    def __post_init__(self) -> None:
        """Refuse what is no claim."""
        if not (self.eps > 0 and math.isfinite(self.eps) and 0 <= self.k <= DEEPEST):
            raise CertificateError("a claim has a finite ε above 0 and a depth up to a million")
        if self.norm not in ("max", "2"):
            raise CertificateError(f"the norm of a claim is max or 2, not {self.norm!r}")


@dataclass(frozen=True, slots=True)
class Checked:
    """What was proved again: the rate of contraction and the depths that follow."""

    recurrence: str
    method: str
    norm: str
    rate: float
    domain: str
    claims: tuple[Claim, ...]


class Argument(Protocol):
    """A proof of one form: the depths of A h that follow, and the norm it contracts in."""

    def depth(self, eps: float, norm: str, A: Array | None, through: Array | None) -> int | None:
        """Return the smallest depth that is proved for ε of the output A h; None without one."""
        ...

    def gauge(self) -> Gauge:
        """Return the norm that composition needs."""
        ...


def check(document: Mapping[str, Any], recurrence: Recurrence) -> Checked:
    """Prove again what a certificate claims of a recurrence.

    Raises:
        CertificateError: It is of another model, was changed, or proves less than it claims.
    """
    return Proof(document, recurrence).checked()


def derive(
    document: Mapping[str, Any], recurrence: Recurrence, wanted: Iterable[tuple[float, str]]
) -> tuple[Claim, ...]:
    """Return the depths that a certificate proves for pairs of ε and norm, whatever it claims.

    Raises:
        CertificateError: It proves no rate at all.
    """
    proof = Proof(document, recurrence)
    found = [(eps, norm, proof.depth(eps, norm)) for eps, norm in wanted if eps > 0]
    return tuple(Claim(eps, norm, k) for eps, norm, k in found if k is not None)


def pack(v: Array) -> dict[str, Any]:
    """Write an array as a JSON-able mapping: its shape and its little-endian float64 bytes."""
    return {
        "shape": list(v.shape),
        "float64": base64.b64encode(np.ascontiguousarray(v, dtype="<f8").tobytes()).decode("ascii"),
    }


def unpack(packed: Any, shape: tuple[int, ...]) -> Array:
    """Read an array of the shape that it must have; NaN is refused."""
    try:
        raw = base64.b64decode(packed["float64"], validate=True)
        stated = packed["shape"]
    except (TypeError, KeyError, ValueError) as error:
        raise CertificateError(f"an array of the certificate cannot be read ({error})") from error
    if stated != list(shape) or len(raw) != 8 * math.prod(shape):
        raise CertificateError(f"an array must have shape {shape}, got {str(stated)[:80]}")
    v: Array = np.frombuffer(raw, dtype="<f8").astype(np.float64).reshape(shape)
    if np.isnan(v).any():
        raise CertificateError("an array must hold no NaN")
    return v


class Entries:
    """The entries of a document, each of the kind that it must have."""

    def __init__(self, document: Any, what: str = "certificate") -> None:
        self.what = what
        if not isinstance(document, Mapping):
            raise CertificateError(f"a {what} is an object, not {type(document).__name__}")
        self.document = document

    def read(self, key: str, kind: type) -> Any:
        """Return an entry of the kind that it must have."""
        value = self.document.get(key)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise CertificateError(f"the {self.what} has no {key!r} of type {kind.__name__}")
        return value

    def part(self, key: str) -> Entries:
        """Return the entries of an entry."""
        return Entries(self.read(key, Mapping), key)

    def number(self, key: str) -> float:
        """Return a finite number."""
        value = self.document.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CertificateError(f"the {self.what} has no number {key!r}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise CertificateError(f"{key!r} must be finite, got {number}")
        return number

    def array(self, key: str, shape: tuple[int, ...]) -> Array:
        """Return an array of the shape that it must have."""
        return unpack(self.document.get(key), shape)

    def box(self, key: str, size: int) -> Box:
        """Return two arrays, the ends of a box."""
        ends = self.part(key)
        return ends.array("lo", (size,)), ends.array("hi", (size,))

    def claims(self) -> tuple[Claim, ...]:
        """Return what the document claims."""
        found = []
        for entry in self.read("claims", list):
            claim = Entries(entry, "claim")
            k = claim.read("k", int)
            found.append(Claim(claim.number("eps"), claim.read("norm", str), int(k)))
        return tuple(found)


def holds(claim: Claim, k: int | None) -> None:
    """Refuse a claim that is smaller than the depth that was proved again.

    Raises:
        CertificateError: It is.
    """
    if k is None or k > claim.k:
        raise CertificateError(
            f"the certificate claims k = {claim.k} for ε = {claim.eps:g}; proved is {k}",
            help="it was changed, or is of another version; certify the model again",
        )


class Proof:
    """One certificate, proved again for a recurrence; ``depth`` derives what follows.

    Attributes:
        rate: The rate λ that was proved.
        outputs: A box that holds every reachable output.
    """

    def __init__(self, document: Any, recurrence: Recurrence) -> None:
        self.entries, self.cell = Entries(document), recurrence.cell
        self.label = recurrence.label
        if self.entries.document.get("schema") != SCHEMA:
            raise CertificateError(
                f"a certificate has the schema {SCHEMA}, and this has "
                f"{str(self.entries.document.get('schema'))[:80]}",
                help="give a file that `rnnaudit certify` wrote",
            )
        if self.entries.read("fingerprint", str) != fingerprint(recurrence):
            raise CertificateError(
                "the certificate is of another model: the fingerprint of its weights differs",
                help="certify this model",
            )
        if recurrence.initial.source == "computed":
            raise CertificateError("the model computes its initial state, which no proof covers")
        self.method, self.rate = self.entries.read("method", str), self.entries.number("rate")
        self.form = self.entries.read("form", str)
        if self.method not in METHODS.get(self.form, ()):
            raise CertificateError(f"no proof by {self.method[:80]!r} has the form {self.form!r}")
        self.x = self.entries.box("domain", self.cell.input_size)
        self.s = self.entries.box("states", self.cell.state_size)
        self.start = array_of(recurrence.initial.value)
        if not (0 < self.rate < 1 and (self.x[0] <= self.x[1]).all()):
            raise CertificateError("the rate must lie between 0 and 1, and the domain hold inputs")
        self.recurrent: Box | None = None
        with np.errstate(all="ignore"):
            self._keeps_states()
            if self.entries.document.get("balls") is not None:
                # Both hold every reachable state, and so does what they have in common.
                self.recurrent = self._balls()
            self.mixed = self._system(mixed=True)
            self._bounds()
            self.argument = self._argument()
        H = self.cell.hidden_size
        self.outputs = self.s[0][:H], self.s[1][:H]

    def checked(self) -> Checked:
        """Return what was proved again, with every claim.

        Raises:
            CertificateError: It claims more than follows.
        """
        claims = self.entries.claims()
        for claim in claims:
            holds(claim, self.depth(claim.eps, claim.norm))
        norm = NORMS[self.form]
        return Checked(self.label, self.method, norm, self.rate, words(self.x), claims)

    def depth(
        self, eps: float, norm: str, A: Array | None = None, through: Array | None = None
    ) -> int | None:
        """Return the smallest depth that is proved for ε of A h, or of h; None without one."""
        return self.argument.depth(eps, norm, A, through) if eps > 0 else None

    def gain(self) -> Array:
        """Bound |∂s'/∂x| [S, I] entrywise."""
        with np.errstate(all="ignore"):
            return self._system(mixed=False).entrywise(of_input=True)

    def _system(self, *, mixed: bool) -> System:
        return system(self.cell, self.x, self.s, self.recurrent, mixed=mixed)

    def _keeps_states(self) -> None:
        """Check that the box holds the initial state and its own image."""
        image = self._system(mixed=True).image
        inside = (image[0] >= self.s[0]) & (image[1] <= self.s[1])
        begins = (self.start >= self.s[0]) & (self.start <= self.s[1])
        if not bool(inside.all() and begins.all()):
            raise CertificateError("the box of states does not hold its own image")

    def _balls(self) -> Box:
        """Check that box and balls keep themselves; return what they bound U h by."""
        if not isinstance(self.cell, GRUCell | LSTMCell):
            raise CertificateError("balls are for gated cells")
        stated = self.entries.part("balls")
        centre = stated.array("centre", self.start.shape)
        radii = stated.document.get("radii")
        if not isinstance(radii, list) or not all(isinstance(r, float) for r in radii):
            raise CertificateError("balls need radii, a list of numbers")
        box = stated.array("box", self.start.shape)
        balls = BallSet(
            self.cell, self.x, start=self.start, centre=centre, box=box, radii=tuple(radii)
        )
        if not balls.keeps_itself():
            raise CertificateError("the balls of states do not hold their own image")
        within = add((centre, centre), (-box, box))
        self.s = np.maximum(self.s[0], within[0]), np.minimum(self.s[1], within[1])
        P = self.cell.hidden_size
        U = array_of(self.cell.U)
        direct = affine(U, (self.s[0][:P], self.s[1][:P]), np.zeros(len(U)))
        around = balls.recurrent()
        return np.maximum(direct[0], around[0]), np.minimum(direct[1], around[1])

    def _bounds(self) -> None:
        """Work out how far states are from the initial one, and how far one step takes it."""
        sector = self.mixed.sector
        if not bool(np.isfinite(sector[0]).all() and np.isfinite(sector[1]).all()):
            raise CertificateError("nothing bounds the slopes over the box of states")
        self.r = np.maximum(self.s[1] - self.start, self.start - self.s[0]) * (1 + 4 * UNIT)
        begin = (self.start, self.start)
        first = system(self.cell, self.x, begin, mixed=True).image
        moved = np.maximum(first[1] - self.start, self.start - first[0])
        self.first = moved * (1 + 4 * UNIT) + TINY

    def _argument(self) -> Argument:
        """Prove the rate in the form that the document has."""
        if self.form in ("metric", "linear"):
            metric = self._metric()
            metric.prove(self.mixed)
            return Filter(transition(self.cell), metric) if self.form == "linear" else metric
        parts: tuple[int, ...] | None = None
        size = self.cell.state_size
        if self.form == "comparison":
            step = comparison(self._system(mixed=False))
        elif self.form == "average":
            step = average(self.cell, self.mixed)
        else:
            step, parts = published(self.method, self.cell, self._system(mixed=False))
            size = len(parts)
        v = self.entries.part("comparison").array("weights", (size,))
        iterated = Iterated(step, v, self.rate, self.r, self.cell.hidden_size, parts)
        iterated.prove()
        return iterated

    def _metric(self) -> Metric:
        S, true = self.cell.state_size, self.mixed.sector
        stated = self.entries.part("metric")
        P, T = stated.array("P", (S, S)), stated.array("T", true[0].shape)
        sector = self.entries.box("sector", len(true[0]))
        if not bool((sector[0] <= true[0]).all() and (true[1] <= sector[1]).all()):
            raise CertificateError("the multipliers' intervals do not hold what the weights give")
        last = array_of(self.cell.W) if isinstance(self.cell, ElmanCell) else None
        H = self.cell.hidden_size
        return Metric(P, T, self.rate, sector, self.r, self.first, H, last)


def words(x: Box) -> str:
    """Say which inputs a domain holds, from its numbers."""
    lo, hi = float(x[0].min(initial=math.inf)), float(x[1].max(initial=-math.inf))
    if not len(x[0]) or (np.isneginf(x[0]).all() and np.isposinf(x[1]).all()):
        return "any input"
    one = bool((x[0] == lo).all() and (x[1] == hi).all())
    low, high = (repr(end).removesuffix(".0") for end in (lo, hi))
    within = f"|x| ≤ {high}" if lo == -hi else f"{low} ≤ x ≤ {high}"
    return within if one else f"a range for each of {len(x[0])} inputs, all in {within}"
