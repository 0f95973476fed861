"""Stacks: what is proved of the output of layers that feed one another, and of a readout.

Layer l has a norm ‖·‖_l in which it contracts at λ_l, and in which an input that is off by
at most e per feature moves it by at most L_l(e). With all layers restarted together (one
direction only) the norms obey e^l_j ≤ λ_l e^l_{j−1} + L_l(units of layer l−1 · e^{l−1}_j),
a triangular comparison matrix over layers. With each recurrence cut on its own, as graph
surgery does, e_l ≤ λ_l^k R_l + L_l(e_{l−1}) / (1 − λ_l).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rnnaudit.certificates.comparison import output_above, settled_depth
from rnnaudit.certificates.interface import (
    MAX_DEPTH,
    CertificateSet,
    Domain,
    Gauge,
    Norm,
)
from rnnaudit.certificates.intervals import Interval, loosened, times_above
from rnnaudit.model import Layer, Readout, Recurrence, Stack
from rnnaudit.norms import up

Certify = Callable[[Recurrence, Domain], CertificateSet]

_SHARES = (0.5, 0.8, 0.95, 0.99)
"""Parts of ε that the last layer's own truncation may take; the layers below share the rest."""


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
        depths = self.layerwise(eps, norm)
        return None if depths is None else max(depths.values())

    def layerwise(self, eps: float, norm: Norm = "max") -> Mapping[str, int] | None:
        """Return a depth for each recurrence, cut on its own, that keeps the output to ε.

        Each depth may be exceeded. ε is split so that the receptive field, Σ(k_l − 1) + 1
        over the layers, is small.
        """
        if self.reason or not eps > 0:
            return None
        layers = self.stack.layers
        if len(layers) == 1:
            return self._last(eps, norm)
        best: Mapping[str, int] | None = None
        for share in _SHARES:
            found = self._lower((1 - share) * eps, norm)
            if found is None:
                continue
            depths, passed = found
            last = self._last(math.nextafter(eps - passed, 0), norm)
            if last is None:
                continue
            candidate = {**depths, **last}
            if best is None or _field(self.stack, candidate) < _field(self.stack, best):
                best = candidate
        return best

    def _last(self, eps: float, norm: Norm) -> Mapping[str, int] | None:
        """Return depths of the last layer's recurrences by their own proofs.

        Both directions of a layer feed one readout, y = A h + A' h' + b, so that their
        errors add: each may take half of ε. Without a readout they are different units,
        whose errors add only under the 2-norm.
        """
        directions = self.stack.layers[-1].recurrences
        adds = len(directions) > 1 and (self.stack.readout is not None or norm == "2")
        # Halving is exact in binary.
        share = eps / 2 if adds else eps
        depths, first = {}, 0
        for recurrence in directions:
            width = recurrence.cell.hidden_size
            readout = columns(self.stack.readout, first, first + width)
            k = self.recurrences[recurrence.label].depth(share, readout, norm)
            if k is None:
                return None
            depths[recurrence.label] = k
            first += width
        return depths

    def _lower(self, eps: float, norm: Norm) -> tuple[Mapping[str, int], float] | None:
        """Return depths below the last layer, and their bound on what passes to the output."""
        layers = self.stack.layers
        share = eps / (len(layers) - 1)
        depths: dict[str, int] = {}
        total = 0.0
        for below in range(len(layers) - 1):

            def passed(k: int, below: int = below) -> float:
                e = torch.cat([self._units(r, k) for r in layers[below].recurrences])
                for layer in layers[below + 1 :]:
                    e = torch.cat([self._passed(r, e) for r in layer.recurrences])
                return _read(self.stack.readout, e, norm)

            k = _least(passed, share)
            if k is None:
                return None
            depths |= {r.label: k for r in layers[below].recurrences}
            total = up(total + passed(k))
        return depths, total

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
            return settled_depth(
                lambda e: times_above(G, e), radii, v, rate=rate, output=output, eps=eps
            )
    return None


def _read(readout: Readout | None, e: Tensor, norm: Norm) -> float:
    return output_above(None if readout is None else readout.A.abs(), e, norm)


def _least(bound: Callable[[int], float], eps: float) -> int | None:
    """Return the smallest k ≥ 0 with bound(k) ≤ ε, for a bound that falls with k."""
    if bound(0) <= eps:
        return 0
    low, high = 0, 1
    while not bound(high) <= eps:
        low, high = high, 2 * high
        if high > MAX_DEPTH:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) <= eps else (middle, high)
    return high


def _field(stack: Stack, depths: Mapping[str, int]) -> int:
    """Return how many inputs an output sees on one side."""
    return sum(max(depths[r.label] for r in layer.recurrences) for layer in stack.layers)


def columns(readout: Readout | None, first: int, end: int) -> Readout | None:
    """Return the part of a readout that reads these units."""
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
