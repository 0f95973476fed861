"""Stacks: what is proved of the output of layers that feed one another, and of a readout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from rnnaudit.certificates.interface import CertificateSet, Domain, Norm
from rnnaudit.model import ElmanCell, GRUCell, Layer, LSTMCell, Readout, Recurrence, Stack

Certify = Callable[[Recurrence, Domain], CertificateSet]

_RANGES: Mapping[str, tuple[float, float]] = {
    "tanh": (-1.0, 1.0),
    "sigmoid": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "softsign": (-1.0, 1.0),
}


@dataclass(frozen=True, slots=True, eq=False)
class StackCertificate:
    """The proofs of each recurrence of a stack, and the depths of its output that follow.

    Attributes:
        stack: Its layers and readout.
        recurrences: Proofs by ``Recurrence.label``, each over what its layer can read.
        reason: Why no depth of the stack's output follows; empty where one can.
    """

    stack: Stack
    recurrences: Mapping[str, CertificateSet]
    reason: str = ""

    def depth(self, eps: float, norm: Norm = "max") -> int | None:
        """Return a depth k such that every recurrence cut to k' ≥ k keeps the output to ε."""
        depths = self.layerwise(eps, norm)
        return None if depths is None else max(depths.values())

    def layerwise(self, eps: float, norm: Norm = "max") -> Mapping[str, int] | None:
        """Return a depth for each recurrence, cut on its own, that keeps the output to ε.

        Both directions of a layer feed one readout, y = A h + A' h' + b, so that their
        errors add: each may take half of ε. Without a readout they are different units,
        whose errors add only under the 2-norm.
        """
        if self.reason:
            return None
        directions = self.stack.layers[-1].recurrences
        adds = len(directions) > 1 and (self.stack.readout is not None or norm == "2")
        # Halving is exact in binary.
        share = eps / 2 if adds else eps
        depths, first = {}, 0
        for recurrence in directions:
            width = recurrence.cell.hidden_size
            readout = _columns(self.stack.readout, first, first + width)
            k = self.recurrences[recurrence.label].depth(share, readout, norm)
            if k is None:
                return None
            depths[recurrence.label] = k
            first += width
        return depths


def _columns(readout: Readout | None, first: int, end: int) -> Readout | None:
    """Return the part of a readout that reads these units."""
    if readout is None:
        return None
    return Readout(readout.name, readout.A[:, first:end], readout.b)


def compose(stack: Stack, domain: Domain, certify: Certify) -> StackCertificate:
    """Prove every recurrence over what its layer can read, and join the proofs."""
    proofs: dict[str, CertificateSet] = {}
    for layer in stack.layers:
        for recurrence in layer.recurrences:
            proofs[recurrence.label] = certify(recurrence, domain)
        domain = output_domain(layer)
    reason = "the proofs of several layers are not joined" if len(stack.layers) > 1 else ""
    return StackCertificate(stack, proofs, reason)


def output_domain(layer: Layer) -> Domain:
    """Return a box that holds every output of a layer, whatever it reads."""
    lo, hi = [], []
    for recurrence in layer.recurrences:
        low, high = _output_range(recurrence)
        lo += [low] * recurrence.cell.hidden_size
        hi += [high] * recurrence.cell.hidden_size
    name = f"every output of layer {layer.recurrences[0].layer}"
    return Domain(
        torch.tensor(lo, dtype=torch.float64), torch.tensor(hi, dtype=torch.float64), name
    )


def _output_range(recurrence: Recurrence) -> tuple[float, float]:
    cell, everything = recurrence.cell, (-math.inf, math.inf)
    if isinstance(cell, ElmanCell):
        return _RANGES.get(cell.activation.name, everything)
    if isinstance(cell, GRUCell):
        # h' = (1 − z) n + z h lies between n and h while the gate lies in [0, 1].
        if cell.gate.name not in ("sigmoid", "hardsigmoid") or cell.candidate.name not in _RANGES:
            return everything
        low, high = _RANGES[cell.candidate.name]
        start = recurrence.initial.value
        return min(low, float(start.min())), max(high, float(start.max()))
    if isinstance(cell, LSTMCell) and cell.projection is None:
        bounded = cell.gate.name in ("sigmoid", "hardsigmoid") and cell.squash.name in _RANGES
        return (-1.0, 1.0) if bounded else everything
    return everything
