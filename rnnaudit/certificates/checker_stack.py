"""The checker's account of a whole model: entries proved again, layers joined, a readout read.

Layers that all run forward restart together, e^l_j ≤ λ_l e^l_{j−1} + L_l(e^{l−1}_j) in the
norms of their proofs; any other stack cuts each recurrence on its own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rnnaudit.certificates.checker import Checked, Claim, Entries, Proof, holds, words
from rnnaudit.certificates.checker_intervals import (
    UNIT,
    Array,
    CertificateError,
    above,
    length_above,
)
from rnnaudit.certificates.checker_iterated import settled
from rnnaudit.certificates.checker_metric import DEEPEST, Gauge
from rnnaudit.certificates.checker_systems import array_of
from rnnaudit.model import Layer, Model, Readout, Stack

SCHEMA = "rnnaudit.proof/1"

_SHARES = (0.5, 0.8, 0.95, 0.99)
"""Parts of ε that the last layer's own cut may take."""


@dataclass(frozen=True, slots=True)
class CheckedEntry:
    """One recurrence's certificate: what was proved again, or why it was refused."""

    recurrence: str
    proved: Checked | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CheckedStack:
    """What a file claims of one stack: the depths of its output, and each recurrence's proof."""

    name: str
    domain: str
    entries: tuple[CheckedEntry, ...]
    claims: tuple[Claim, ...] = ()
    reason: str = ""

    @property
    def valid(self) -> bool:
        """Whether everything that is claimed of the stack was proved again."""
        return not self.reason and all(e.proved is not None for e in self.entries)


def check_file(document: Any, model: Model) -> tuple[CheckedStack, ...]:
    """Prove again every entry of a proof file, and what it claims of each stack.

    Raises:
        CertificateError: It is no proof file, holds no proof, or names what the model lacks.
    """
    entries = Entries(document, "proof file")
    if entries.document.get("schema") != SCHEMA:
        raise CertificateError(
            f"a proof file has the schema {SCHEMA}, and this has "
            f"{str(entries.document.get('schema'))[:80]}",
            help="give a file that `rnnaudit certify` wrote",
        )
    stacks = {stack.name: stack for stack in model.stacks}
    parts = [Entries(part, "stack") for part in entries.read("stacks", list)]
    names = [part.read("name", str) for part in parts]
    unknown = [name for name in names if name not in stacks]
    if unknown or len(set(names)) < len(names):
        raise CertificateError(
            f"it speaks of {(unknown or names)[0][:80]!r}, which the model does not have, or twice"
        )
    found = tuple(_checked(part, stacks[name]) for part, name in zip(parts, names, strict=True))
    if not any(stack.entries for stack in found):
        raise CertificateError("the proof file holds no proof")
    return found


def _checked(part: Entries, stack: Stack) -> CheckedStack:
    known = {r.label: r for r in stack.recurrences()}
    proofs: dict[str, Proof] = {}
    entries: list[CheckedEntry] = []
    for document in part.read("recurrences", list):
        label = str(Entries(document).document.get("recurrence"))
        label = label if label in known else label[:200]
        try:
            if label not in known or label in proofs:
                raise CertificateError("it is of no recurrence of the model, or comes twice")
            proof = Proof(document, known[label])
            entries.append(CheckedEntry(label, proof.checked()))
            proofs[label] = proof
        except CertificateError as error:
            entries.append(CheckedEntry(label, None, str(error)))
    domain = next((words(p.x) for p in proofs.values()), "")
    claims: tuple[Claim, ...] = ()
    try:
        claims = part.claims()
        if claims:
            joined = StackProof(stack, proofs, part)
            for claim in claims:
                holds(claim, joined.depth(claim.eps, claim.norm))
    except CertificateError as error:
        return CheckedStack(stack.name, domain, tuple(entries), (), str(error))
    return CheckedStack(stack.name, domain, tuple(entries), claims)


def readout_fingerprint(readout: Readout | None) -> str:
    """Hash a readout's weights; empty where there is none."""
    if readout is None:
        return ""
    digest = hashlib.sha256()
    for v in (array_of(readout.A), array_of(readout.b)):
        digest.update(repr(v.shape).encode() + np.ascontiguousarray(v, dtype="<f8").tobytes())
    return digest.hexdigest()


class StackProof:
    """The depths of a stack's output that follow from proofs of all its recurrences.

    ``part`` holds the readout's fingerprint and, for one Elman layer, what may be read
    through free slopes.

    Raises:
        CertificateError: A proof is missing, covers less than the layer below can give, or
            the readout is another one.
    """

    def __init__(self, stack: Stack, proofs: Mapping[str, Proof], part: Entries) -> None:
        self.stack, self.proofs = stack, proofs
        if part.document.get("readout") != readout_fingerprint(stack.readout):
            raise CertificateError("the readout is another one: its fingerprint differs")
        missing = [r.label for r in stack.recurrences() if r.label not in proofs]
        if missing:
            raise CertificateError(f"no proof of {missing[0]}, so none of the stack's output")
        self.A = None if stack.readout is None else array_of(stack.readout.A)
        self.through: Array | None = None
        if self.A is not None and part.document.get("through") is not None:
            self.through = part.array("through", self.A.shape)
        self._covers()
        self.last = dict(self._last())
        self._gauges: dict[str, Gauge] = {}

    def depth(self, eps: float, norm: str) -> int | None:
        """Return a depth that keeps the output to ε, with every larger one; None without one."""
        with np.errstate(all="ignore"):
            if len(self.stack.layers) == 1:
                return self._own(eps, norm)
            return self._together(eps, norm) if self.stack.causal else self._apart(eps, norm)

    def _covers(self) -> None:
        """Check that every layer's proofs hold for whatever the layer below gives."""
        first = self.proofs[self.stack.layers[0].recurrences[0].label].x
        given = first
        for layer in self.stack.layers:
            for proof in self._of(layer):
                if given is first and not (
                    np.array_equal(proof.x[0], first[0]) and np.array_equal(proof.x[1], first[1])
                ):
                    raise CertificateError("the directions of the first layer differ in domain")
                if not bool((proof.x[0] <= given[0]).all() and (given[1] <= proof.x[1]).all()):
                    raise CertificateError(
                        f"the domain of {proof.label} does not hold what the layer below gives"
                    )
            ends = [proof.outputs for proof in self._of(layer)]
            given = np.concatenate([e[0] for e in ends]), np.concatenate([e[1] for e in ends])

    def _of(self, layer: Layer) -> list[Proof]:
        return [self.proofs[r.label] for r in layer.recurrences]

    def _last(self) -> Iterator[tuple[str, Array | None]]:
        """Yield each recurrence of the last layer with the columns of A that read it."""
        first = 0
        for r in self.stack.layers[-1].recurrences:
            width = r.cell.hidden_size
            yield r.label, None if self.A is None else self.A[:, first : first + width]
            first += width

    def _own(self, eps: float, norm: str) -> int | None:
        """Cut the last layer alone: errors of two directions add in a readout, or a 2-norm."""
        adds = len(self.last) > 1 and (self.A is not None or norm == "2")
        through = self.through if len(self.last) == 1 else None
        depths = [
            self.proofs[label].depth(eps / 2 if adds else eps, norm, A, through)
            for label, A in self.last.items()
        ]
        known = [k for k in depths if k is not None]
        return max(known) if len(known) == len(depths) else None

    def _gauge(self, label: str) -> Gauge:
        if label not in self._gauges:
            self._gauges[label] = self.proofs[label].argument.gauge()
        return self._gauges[label]

    def _read(self, e: Array, norm: str) -> float:
        return length_above(e if self.A is None else above(np.abs(self.A), e), norm)

    def _together(self, eps: float, norm: str) -> int | None:
        """Iterate e_j ≤ Γ e_{j−1} over layers, Γ = (I − N)⁻¹Λ, from the radii."""
        labels = [layer.recurrences[0].label for layer in self.stack.layers]
        gauges = [self._gauge(label) for label in labels]
        n = len(gauges)
        G: Array = np.zeros((n, n))
        for i, gauge in enumerate(gauges):
            if i:
                # The layer below is off by e in its norm, and so its unit i by units_i · e.
                moved = above(self.proofs[labels[i]].gain(), gauges[i - 1].units)
                G[i] = G[i - 1] * gauge.measure(moved)
            G[i, i] = gauge.rate
            G[i] *= 1 + 4 * UNIT
        radii: Array = np.array([g.radius for g in gauges])
        if not bool(np.isfinite(G).all() and np.isfinite(radii).all()):
            return None

        def output(e: Array) -> float:
            return self._read(gauges[-1].units * e[-1] * (1 + 4 * UNIT), norm)

        top = float(G.diagonal().max())
        for part in (0.02, 0.1, 0.3, 0.6):
            mu = top + (1 - top) * part
            v = np.linalg.solve(np.eye(n) - G / mu, np.ones(n)).astype(np.float64)
            rate = float((above(G, v) / v).max()) * (1 + 4 * UNIT)
            if bool((v > 0).all()) and rate < 1:
                step = partial(above, G)
                return settled(step, radii, v, rate=rate, output=output, eps=eps)
        return None

    def _apart(self, eps: float, norm: str) -> int | None:
        """Cut every recurrence on its own, all to one depth; ε is split over the layers."""
        best: int | None = None
        for share in _SHARES:
            below = least(lambda k: self._passed(k, norm), (1 - share) * eps)
            if below is None:
                continue
            rest = math.nextafter(eps - self._passed(below, norm), 0)
            last = self._own(rest, norm) if rest > 0 else None
            if last is not None and (best is None or max(below, last) < best):
                best = max(below, last)
        return best

    def _passed(self, k: int, norm: str) -> float:
        """Bound what reaches the output of cuts to k or more below the last layer."""
        e: Array | None = None
        for layer in self.stack.layers[:-1]:
            e = self._off(layer, e, k)
        assert e is not None
        return self._read(self._off(self.stack.layers[-1], e, None), norm)

    def _off(self, layer: Layer, e: Array | None, k: int | None) -> Array:
        """Bound each output of a layer cut to k (None: not cut) whose inputs err by e."""
        parts = []
        for r in layer.recurrences:
            gauge = self._gauge(r.label)
            size = 0.0 if k is None else _power(gauge, k)
            if e is not None:
                moved = above(self.proofs[r.label].gain(), e)
                size += gauge.measure(moved) / (1 - gauge.rate) * (1 + 8 * UNIT)
            parts.append(gauge.units * size * (1 + 8 * UNIT))
        return np.concatenate(parts)


def _power(gauge: Gauge, k: int) -> float:
    """Bound λᵏ times the radius; a power below the smallest float is not zero."""
    return gauge.radius * (gauge.rate**k * (1 + 1e-14) + 1e-300) * (1 + 4 * UNIT)


def least(bound: Callable[[int], float], eps: float) -> int | None:
    """Return the smallest k with bound(k) ≤ ε, for a bound that falls with k; None without one."""
    low, high = -1, 1
    while not bound(high) <= eps:
        low, high = high, 2 * high
        if high > DEEPEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) <= eps else (middle, high)
    return high
