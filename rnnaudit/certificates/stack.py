"""Stacks: what is proved of the output of layers that feed one another, and of a readout.

Layer l has a norm ‖·‖_l in which it contracts at λ_l, and in which an input that is off by
at most e per feature moves it by at most L_l(e). With all layers restarted together (one
direction only) the norms obey e^l_j ≤ λ_l e^l_{j−1} + L_l(units of layer l−1 · e^{l−1}_j),
a triangular comparison matrix over layers. With each recurrence cut on its own, as graph
surgery does, e_l ≤ λ_l^k R_l + L_l(e_{l−1}) / (1 − λ_l).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from rnnaudit.certificates.comparison import Decay, output_above
from rnnaudit.certificates.interface import DEEPEST, CertificateSet, Domain, Gauge
from rnnaudit.certificates.intervals import Interval, loosened, times_above
from rnnaudit.certificates.split import cheapest, least, left
from rnnaudit.model import Layer, Readout, Recurrence, Stack
from rnnaudit.norms import up
from rnnaudit.results import Norm

Certify = Callable[[Recurrence, Domain], CertificateSet]

_PARTS = (1 / 4, 1 / 16)
"""Parts of ε that one direction of the last layer may take where halves are not the best."""


@dataclass(frozen=True, slots=True, eq=False)
class StackCertificate:
    """The proofs of each recurrence of a stack, and the depths of its output that follow.

    Attributes:
        stack: Its layers and readout.
        recurrences: Proofs by ``Recurrence.label``, each over what its layer can read.
        reason: Why no depth of the stack's output follows; empty where one can.
        domains: What each recurrence reads, by its label.
    """

    stack: Stack
    recurrences: Mapping[str, CertificateSet]
    reason: str = ""
    domains: Mapping[str, Domain] = field(default_factory=dict)

    def depth(self, eps: float, norm: Norm = "max") -> int | None:
        """Return a depth that keeps the output to ε, together with every larger one.

        Layers that all run forward are restarted together, on a window of k inputs;
        otherwise every recurrence is cut to k on its own.
        """
        if self.reason:
            return None
        if len(self.stack.layers) > 1 and self.stack.causal:
            return self._together(eps, norm)
        return self._alike(eps, norm)

    def layerwise(
        self,
        eps: float,
        norm: Norm = "max",
        *,
        only: Collection[str] | None = None,
        most: int = DEEPEST,
    ) -> Mapping[str, int] | None:
        """Return a depth for each recurrence, cut on its own, that keeps the output to ε.

        Each depth may be exceeded. ε is divided so that the sum of the depths is smallest.

        Args:
            eps: What the output keeps.
            norm: Of an error of the output.
            only: Labels of what is cut, both directions of a layer or none; all without.
            most: No depth is larger.
        """
        if self.reason or not eps > 0:
            return None
        below = [
            layer.recurrences
            for layer in self.stack.layers[:-1]
            if only is None or layer.recurrences[0].label in only
        ]
        ends = self.stack.layers[-1].recurrences
        whole = only is None or ends[0].label in only

        def last(share: float) -> Mapping[str, int] | None:
            depths = self._last(share, norm, sum) if whole else {}
            if depths is None or max(depths.values(), default=0) > most:
                return None
            return {label: max(1, k) for label, k in depths.items()} if below else depths

        best: Mapping[str, int] | None = None
        # Both directions of a layer to one depth, by one bound; or each to its own, as their
        # effects add when one after the other is cut.
        for units in dict.fromkeys((tuple(below), tuple((r,) for each in below for r in each))):
            bounds = [cache(partial(self._moved, unit, norm)) for unit in units]
            found = cheapest(bounds, [len(unit) for unit in units], last, eps, most)
            if found is None:
                continue
            depths, rest = found
            labels = {r.label: k for u, k in zip(units, depths, strict=True) for r in u} | {**rest}
            if best is None or sum(labels.values()) < sum(best.values()):
                best = labels
        return best

    def _alike(self, eps: float, norm: Norm) -> int | None:
        """Return the smallest depth that keeps ε when every recurrence is cut to it on its own."""

        def needed(k: int) -> float:
            passed = 0.0
            for layer in self.stack.layers[:-1]:
                passed = up(passed + self._moved(layer.recurrences, norm, k))
            rest = left(eps, passed) if passed else eps
            last = self._last(rest, norm, max) if rest > 0 else None
            return math.inf if last is None else max(last.values())

        if len(self.stack.layers) == 1:
            k = needed(0)
            return None if math.isinf(k) else int(k)
        # What is needed falls with k, and k rises.
        return least(lambda k: needed(k) - k, 0, DEEPEST, first=0)

    def _last(
        self, eps: float, norm: Norm, size: Callable[[Iterable[int]], int]
    ) -> Mapping[str, int] | None:
        """Return depths of the last layer's recurrences by their own proofs, of least ``size``.

        Both directions of a layer feed one readout, y = A h + A' h' + b, so that their
        errors add: they divide ε. Without a readout they are different units, whose errors
        add only under the 2-norm.
        """
        directions = self.stack.layers[-1].recurrences
        if len(directions) == 1 or (self.stack.readout is None and norm == "max"):
            return self._ends([eps] * len(directions), norm)
        # Halving is exact in binary.
        found = [self._ends([eps / 2, eps / 2], norm)]
        for part in _PARTS:
            shares = [math.nextafter(eps * part, 0), math.nextafter(eps * (1 - part), 0)]
            found += [self._ends(shares, norm), self._ends(shares[::-1], norm)]
        known = [depths for depths in found if depths is not None]
        return min(known, key=lambda depths: size(depths.values()), default=None)

    def _ends(self, shares: Sequence[float], norm: Norm) -> Mapping[str, int] | None:
        """Return depths at which each recurrence of the last layer keeps its share of ε."""
        depths, first = {}, 0
        for recurrence, share in zip(self.stack.layers[-1].recurrences, shares, strict=True):
            width = recurrence.cell.hidden_size
            readout = columns(self.stack.readout, first, first + width)
            k = self.recurrences[recurrence.label].depth(share, readout, norm)
            if k is None:
                return None
            depths[recurrence.label] = k
            first += width
        return depths

    def _moved(self, unit: Sequence[Recurrence], norm: Norm, k: int) -> float:
        """Bound how far the output moves when recurrences of one layer are cut to k or more."""
        layers = self.stack.layers
        at = next(n for n, layer in enumerate(layers) if unit[0] in layer.recurrences)
        e = torch.cat(
            [
                self._units(r, k)
                if r in unit
                else torch.zeros(r.cell.hidden_size, dtype=torch.float64)
                for r in layers[at].recurrences
            ]
        )
        for layer in layers[at + 1 :]:
            e = torch.cat([self._passed(r, e) for r in layer.recurrences])
        return _read(self.stack.readout, e, norm)

    def _units(self, recurrence: Recurrence, k: int) -> Tensor:
        """Bound each output unit's own error when cut to k or more, by the best gauge."""
        gauges = self.recurrences[recurrence.label].gauges
        return torch.stack([g.units * g.at(k) for g in gauges]).amin(0)

    def _passed(self, recurrence: Recurrence, e: Tensor) -> Tensor:
        """Bound each output unit's deviation when every input is off by at most e [I]."""
        proofs = self.recurrences[recurrence.label]
        moved = times_above(proofs.gain, e)
        bounds = [g.units * up(g.measure(moved) / g.room, 4) for g in proofs.gauges]
        return torch.stack(bounds).amin(0)

    def _together(self, eps: float, norm: Norm) -> int | None:
        """Return the depth with all layers restarted together, by the best of a few gauges."""
        proofs = [self.recurrences[layer.recurrences[0].label] for layer in self.stack.layers]
        depths = [
            _cascade(proofs, gauges, self.stack.readout, eps, norm) for gauges in _families(proofs)
        ]
        return min((k for k in depths if k is not None), default=None)


def cascades(
    proofs: Sequence[CertificateSet], readout: Readout | None, eps: float, norm: Norm
) -> list[int]:
    """Return the places of gauges of layers that restart together, smallest depth first."""

    def rank(entry: tuple[int, list[Gauge]]) -> float:
        k = _cascade(proofs, entry[1], readout, eps, norm)
        return math.inf if k is None else k

    return [place for place, _ in sorted(enumerate(_families(proofs)), key=rank)]


def _families(proofs: Sequence[CertificateSet]) -> list[list[Gauge]]:
    """Return one gauge for each layer: the first of all, the second of all, and so on."""
    all_gauges = [p.gauges for p in proofs]
    longest = max(len(g) for g in all_gauges)
    return [[g[min(place, len(g) - 1)] for g in all_gauges] for place in range(longest)]


def _cascade(
    proofs: Sequence[CertificateSet],
    gauges: Sequence[Gauge],
    readout: Readout | None,
    eps: float,
    norm: Norm,
) -> int | None:
    """Iterate e_j ≤ Γ e_{j−1} over layers, Γ = (I − N)⁻¹Λ, from the radii."""
    count = len(gauges)
    G = torch.zeros(count, count, dtype=torch.float64)
    for layer, gauge in enumerate(gauges):
        if layer:
            # The layer below is off by e in its norm, and so its unit i by units_i · e.
            gain = gauge.measure(times_above(proofs[layer].gain, gauges[layer - 1].units))
            G[layer] = G[layer - 1] * up(gain)
        G[layer, layer] = gauge.rate
        G[layer] = G[layer] * (1 + 1e-15)
    radii = torch.tensor([g.radius for g in gauges], dtype=torch.float64)
    if not bool(torch.isfinite(G).all() and torch.isfinite(radii).all()):
        return None
    last = gauges[-1].units

    def output(e: Tensor) -> float:
        return _read(readout, last * up(float(e[-1]), 2), norm)

    # (I − Γ/μ)⁻¹ 1 of a triangular matrix, for a μ between its largest diagonal and 1.
    top = float(G.diagonal().max())
    for part in (0.02, 0.1, 0.3, 0.6):
        mu = top + (1 - top) * part
        eye, one = torch.eye(count, dtype=G.dtype), torch.ones(count, 1, dtype=G.dtype)
        v = torch.linalg.solve_triangular(eye - G / mu, one, upper=False).squeeze(1)
        rate = up(float((times_above(G, v) / v).max()), 2)
        if bool((v > 0).all()) and rate < 1:
            decay = Decay(lambda e: times_above(G, e), radii, v, rate=rate, output=output)
            return decay.depth(eps)
    return None


def _read(readout: Readout | None, e: Tensor, norm: Norm) -> float:
    return output_above(None if readout is None else readout.A.abs(), e, norm)


@lru_cache(maxsize=256)
def columns(readout: Readout | None, first: int, end: int) -> Readout | None:
    """Return the part of a readout that reads these units, the same object each time.

    What proofs make of a readout is kept by its identity.
    """
    if readout is None:
        return None
    return Readout(readout.name, readout.A[:, first:end], readout.b)


def compose(stack: Stack, domain: Domain, certify: Certify) -> StackCertificate:
    """Prove every recurrence over what its layer can read, and join the proofs."""
    proofs: dict[str, CertificateSet] = {}
    domains: dict[str, Domain] = {}
    reason = ""
    for layer in stack.layers:
        for recurrence in layer.recurrences:
            domains[recurrence.label] = domain
            found = proofs[recurrence.label] = certify(recurrence, domain)
            if found.no_proof is not None and not reason:
                reason = f"{recurrence.label}: {found.no_proof.reason}"
            elif len(stack.layers) > 1 and not found.gauges and not reason:
                reason = f"{recurrence.label} has no proof that layers can be joined by"
        domain = output_domain(layer, proofs)
    return StackCertificate(stack, proofs, reason, domains)


def output_domain(layer: Layer, proofs: Mapping[str, CertificateSet]) -> Domain:
    """Return a box that holds every output of a layer whose inputs lie in its own domain."""
    ends: tuple[list[Tensor], list[Tensor]] = ([], [])
    for recurrence in layer.recurrences:
        lo, hi = proofs[recurrence.label].outputs or _anything(recurrence)
        # A little more, so that another program's rounding of the same box fits.
        box = loosened(Interval(lo, hi))
        ends[0].append(box.lo)
        ends[1].append(box.hi)
    name = f"every output of layer {layer.recurrences[0].layer}"
    return Domain(torch.cat(ends[0]), torch.cat(ends[1]), name)


def _anything(recurrence: Recurrence) -> tuple[Tensor, Tensor]:
    wide = torch.full((recurrence.cell.hidden_size,), math.inf, dtype=torch.float64)
    return -wide, wide
