"""Certificates as plain documents: everything that a checker needs, and what they claim.

A document is written only if the checker accepts it, and claims the depths that the checker
itself derives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rnnaudit.certificates.checker import SCHEMA, Entries, Proof, pack
from rnnaudit.certificates.checker_intervals import CertificateError
from rnnaudit.certificates.checker_stack import StackProof, readout_fingerprint
from rnnaudit.certificates.comparison import OF_NORMS, ComparisonCertificate
from rnnaudit.certificates.interface import Certificate, CertificateSet, Domain
from rnnaudit.certificates.linear import LinearCertificate
from rnnaudit.certificates.quadratic import Metric, QuadraticCertificate, enlarged
from rnnaudit.certificates.stack import StackCertificate, cascades, columns
from rnnaudit.model import ElmanCell, Layer, Readout, Recurrence, Stack, fingerprint
from rnnaudit.results import EPSILONS, Norm

_ROOM = 1 + 1e-8
"""What the document's rate adds to the search's, so that another program's rounding fits."""

_CASCADES = 3
"""Families of norms that are tried for layers that restart together."""

Candidate = tuple[Certificate, Metric | None]
"""A proof that can be written down: a certificate, and one metric of its family."""


def document(
    recurrence: Recurrence,
    domain: Domain,
    proofs: CertificateSet,
    *,
    eps: float = 1e-3,
    epsilons: Sequence[float] = EPSILONS,
) -> dict[str, Any] | None:
    """Write the proof that serves ε best as a JSON-able document that ``check`` accepts.

    It claims depths for ``epsilons`` in both norms. None where nothing was proved, or where
    what was proved is too close to call for another program.
    """
    order = _ranked(proofs, eps)
    alone = Stack(recurrence.name, (Layer((recurrence,)),))
    label = recurrence.label
    known = StackCertificate(alone, {label: proofs}, domains={label: domain})
    written = _first(recurrence, known, order, (*epsilons, eps))
    return None if written is None else written[0]


def stack_document(
    stack: Stack, proof: StackCertificate, *, eps: float = 1e-3, norm: Norm = "max"
) -> dict[str, Any]:
    """Write the proofs of a stack's recurrences and the depths of its output that follow.

    Recurrences without a proof are left out, and the depths with them.
    """
    epsilons = sorted({*EPSILONS, eps}, reverse=True)
    part: dict[str, Any] = {"name": stack.name, "readout": readout_fingerprint(stack.readout)}
    best: tuple[float, dict[str, Any]] | None = None
    for orders in _orders(stack, proof, eps, norm):
        written = {
            r.label: _first(r, proof, order, epsilons)
            for r, order in zip(stack.recurrences(), orders, strict=True)
        }
        found = {label: entry for label, entry in written.items() if entry is not None}
        text = part | {"recurrences": [text for text, _, _ in found.values()], "claims": []}
        if len(stack.layers) == len(found) == 1:
            ((_, _, candidate),) = found.values()
            text |= _through(stack, candidate)
        k = math.inf
        if len(found) == len(written):
            joined = StackProof(stack, {n: p for n, (_, p, _) in found.items()}, Entries(text))
            text["claims"] = _claims(joined, epsilons)
            k = _or_infinite(joined.depth(eps, norm))
        if best is None or k < best[0]:
            best = k, text
    assert best is not None
    return best[1]


def _orders(
    stack: Stack, proof: StackCertificate, eps: float, norm: Norm
) -> Iterable[list[list[Candidate]]]:
    """Yield, best first, orders in which candidates of each recurrence are to be written."""
    sets = [proof.recurrences[r.label] for r in stack.recurrences()]
    if len(stack.layers) > 1 and stack.causal and not proof.reason:
        joinable = [[c for c in _candidates(s) if c[0].gauges()] for s in sets]
        for place in cascades(sets, stack.readout, eps, norm)[:_CASCADES]:
            yield [c[min(place, len(c) - 1) :] + c for c in joinable]
        return
    read: list[Readout | None] = [None] * len(sets)
    if stack.readout is not None:
        first = 0
        for i in range(len(sets) - len(stack.layers[-1].recurrences), len(sets)):
            width = list(stack.recurrences())[i].cell.hidden_size
            read[i] = columns(stack.readout, first, first + width)
            first += width
    orders = [_ranked(s, eps, r, norm) for s, r in zip(sets, read, strict=True)]
    if len(stack.layers) > 1:
        orders = [[c for c in order if c[0].gauges()] or order for order in orders]
    yield orders


def _candidates(proofs: CertificateSet) -> list[Candidate]:
    """Return every proof that can be written, in the order of ``CertificateSet.gauges``."""
    found: list[Candidate] = []
    for certificate in proofs.certificates:
        family = _family(certificate)
        members = (None,) if family is None else family.members
        found += [(certificate, member) for member in members]
    return found


def _family(certificate: Certificate) -> QuadraticCertificate | None:
    if isinstance(certificate, LinearCertificate):
        return certificate.metric
    return certificate if isinstance(certificate, QuadraticCertificate) else None


def _ranked(
    proofs: CertificateSet, eps: float, readout: Readout | None = None, norm: Norm = "max"
) -> list[Candidate]:
    """Return the candidates, the one with the smallest depth of the output first."""

    def rank(candidate: Candidate) -> tuple[float, float]:
        certificate, member = candidate
        if member is None:
            return _or_infinite(certificate.depth(eps, readout, norm)), certificate.bound.value
        family = _family(certificate)
        assert family is not None
        k = _or_infinite(family.depth_of(member, eps, readout, norm))
        if isinstance(certificate, LinearCertificate):
            k = min(k, _or_infinite(certificate.depth(eps, readout, norm)))
        return k, member.rate

    return sorted(_candidates(proofs), key=rank)


def _first(
    recurrence: Recurrence,
    known: StackCertificate,
    order: Sequence[Candidate],
    epsilons: Sequence[float],
) -> tuple[dict[str, Any], Proof, Candidate] | None:
    """Write the first candidate that the checker accepts."""
    proofs = known.recurrences[recurrence.label]
    for candidate in order if proofs.dynamics is not None else ():
        text = _written(recurrence, known.domains[recurrence.label], proofs, candidate)
        try:
            proof = Proof(text, recurrence)
        except CertificateError:
            continue  # what is too close to call is not written
        return text | {"claims": _claims(proof, epsilons)}, proof, candidate
    return None


def _claims(proof: Proof | StackProof, epsilons: Sequence[float]) -> list[dict[str, Any]]:
    wanted = dict.fromkeys((eps, norm) for eps in epsilons for norm in ("max", "2"))
    found = {(eps, norm): proof.depth(eps, norm) for eps, norm in wanted}
    return [{"eps": e, "norm": n, "k": k} for (e, n), k in found.items() if k is not None]


def _written(
    recurrence: Recurrence, domain: Domain, proofs: CertificateSet, candidate: Candidate
) -> dict[str, Any]:
    certificate, member = candidate
    assert proofs.dynamics is not None
    text: dict[str, Any] = {
        "schema": SCHEMA,
        "recurrence": recurrence.label,
        "cell": recurrence.cell.kind,
        "fingerprint": fingerprint(recurrence),
        "method": certificate.method,
        "norm": certificate.bound.norm,
        "domain": _ends(domain.box(recurrence.cell.input_size)) | {"name": domain.name},
        "states": _ends(proofs.dynamics.states),
    }
    if proofs.dynamics.balls is not None:
        centre, box, radii = proofs.dynamics.balls
        text["balls"] = {"centre": _pack(centre), "box": _pack(box), "radii": list(radii)}
    family = _family(certificate)
    if member is not None and family is not None:
        return text | {
            "form": "linear" if isinstance(certificate, LinearCertificate) else "metric",
            "rate": _roomy(member.rate),
            "sector": _ends((family.form.sector.lo, family.form.sector.hi)),
            "metric": {"P": _pack(member.P), "T": _pack(member.T * family.form.times)},
        }
    assert isinstance(certificate, ComparisonCertificate)
    form = "average" if certificate.mixing is not None else "comparison"
    return text | {
        "form": "norms" if certificate.norm == OF_NORMS else form,
        "rate": _roomy(certificate.rate),
        "comparison": {"weights": _pack(certificate.weights)},
    }


def _through(stack: Stack, candidate: Candidate) -> Mapping[str, Any]:
    """Return what may be read through the free slopes of an Elman cell's last step."""
    family, member = _family(candidate[0]), candidate[1]
    elman = isinstance(stack.layers[0].recurrences[0].cell, ElmanCell)
    if stack.readout is None or not elman or family is None or member is None:
        return {}
    if family.last is None or not family.last.zeroable:
        return {}
    return {"through": _pack(enlarged(member.P, stack.readout.A))}


def _roomy(rate: float) -> float:
    return min(rate * _ROOM + 1e-12, math.nextafter(1, 0))


def _or_infinite(k: int | None) -> float:
    return math.inf if k is None else k


def _ends(box: tuple[Tensor, Tensor]) -> dict[str, Any]:
    return {"lo": _pack(box[0]), "hi": _pack(box[1])}


def _pack(v: Tensor) -> dict[str, Any]:
    return pack(torch.atleast_1d(v).detach().cpu().numpy())
