"""A certificate as a plain document: everything that a checker needs, and what it claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rnnaudit.certificates.checker import SCHEMA, derive, pack
from rnnaudit.certificates.checker_intervals import CertificateError
from rnnaudit.certificates.comparison import ComparisonCertificate
from rnnaudit.certificates.interface import Certificate, CertificateSet, Domain
from rnnaudit.certificates.linear import LinearCertificate
from rnnaudit.certificates.quadratic import QuadraticCertificate
from rnnaudit.model import Recurrence, fingerprint
from rnnaudit.results import EPSILONS

_ROOM = 1 + 1e-8
"""What the document's rate adds to the search's, so that another program's rounding fits."""


def document(
    recurrence: Recurrence,
    domain: Domain,
    proofs: CertificateSet,
    *,
    eps: float = 1e-3,
    epsilons: Sequence[float] = EPSILONS,
) -> dict[str, Any] | None:
    """Write the proof that serves ε best as a JSON-able document that ``check`` accepts.

    The depths it claims, for ``epsilons`` in both norms, are those that the checker itself
    derives. None where no method that can be written proved anything.
    """
    best: tuple[int, dict[str, Any]] | None = None
    for certificate in proofs.certificates:
        text = _written(recurrence, domain, proofs, certificate, eps)
        if text is None:
            continue
        wanted = [(e, norm) for e in (*epsilons, eps) for norm in ("max", "2")]
        try:
            claims = derive(text, recurrence, wanted)
        except CertificateError:
            continue  # what is too close to call is not written
        depths = {(c.eps, c.norm): c.k for c in claims}
        if (eps, "max") not in depths:
            continue
        text["claims"] = [{"eps": e, "norm": n, "k": k} for (e, n), k in depths.items()]
        k = depths[eps, "max"]
        if best is None or k < best[0]:
            best = k, text
    return None if best is None else best[1]


def _written(
    recurrence: Recurrence,
    domain: Domain,
    proofs: CertificateSet,
    certificate: Certificate,
    eps: float,
) -> dict[str, Any] | None:
    if proofs.dynamics is None:
        return None
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
    if isinstance(certificate, LinearCertificate):
        certificate = certificate.metric
    if isinstance(certificate, QuadraticCertificate) and certificate.form is not None:
        member, form = certificate.member(eps), certificate.form
        return text | {
            "form": "metric",
            "rate": member.rate,
            "sector": _ends((form.sector.lo, form.sector.hi)),
            "metric": {"P": _pack(member.P), "T": _pack(member.T * form.times)},
        }
    if isinstance(certificate, ComparisonCertificate) and certificate.is_plain:
        rate = min(certificate.rate * _ROOM + 1e-12, float(np.nextafter(1.0, 0.0)))
        weights = {"weights": _pack(certificate.weights)}
        return text | {"form": "comparison", "rate": rate, "comparison": weights}
    return None


def _ends(box: tuple[Tensor, Tensor]) -> dict[str, Any]:
    return {"lo": _pack(box[0]), "hi": _pack(box[1])}


def _pack(v: Tensor) -> dict[str, Any]:
    return pack(v.detach().cpu().numpy())
