"""Attacks on proofs: reached states, stretched differences, and inputs that make truncation err.

Everything here errs from below, so that no attack may ever beat a proof.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from rnnaudit.cells import advance, drive, jacobian, output, step, trajectory
from rnnaudit.certificates import CertificateSet, Domain
from rnnaudit.certificates.comparison import OF_NORMS, ComparisonCertificate, stepper
from rnnaudit.certificates.linear import LinearCertificate
from rnnaudit.certificates.quadratic import QuadraticCertificate
from rnnaudit.model import Cell, Recurrence

REPEAT = int(os.environ.get("REPEAT", "1"))
"""Scales every search: 1 takes seconds, 1000 takes hours."""

ROUNDING = 1 + 1e-9
"""What float64 evaluation of a cell may add to a ratio that a theorem bounds."""


def inputs(rng: torch.Generator, domain: Domain, size: int, count: int, length: int) -> Tensor:
    """Draw inputs [count, length, size]: corners that switch at random, constants, and between."""
    lo, hi = domain.box(size)
    lo, hi = lo.clamp(min=-3), hi.clamp(max=3)
    corner = torch.rand(count, length, size, generator=rng, dtype=torch.float64) < 0.5
    hold = torch.rand(count, 1, size, generator=rng, dtype=torch.float64) < 0.5
    share = torch.rand(count, length, size, generator=rng, dtype=torch.float64)
    kinds = [torch.where(corner, lo, hi), torch.where(hold, lo, hi).expand(-1, length, -1)]
    kinds.append(lo + share * (hi - lo))
    which = torch.randint(3, (count, 1, 1), generator=rng)
    return torch.where(which == 0, kinds[0], torch.where(which == 1, kinds[1], kinds[2]))


def reached(recurrence: Recurrence, domain: Domain, rng: torch.Generator, count: int) -> Tensor:
    """Return states [n, S] that the domain reaches, the initial state among them."""
    cell = recurrence.cell
    x = inputs(rng, domain, cell.input_size, count, 24)
    states = trajectory(cell, x, recurrence.initial.value).flatten(0, 1)
    return torch.cat([recurrence.initial.value[None], states])


def stretch(cell: Cell, s: Tensor, x: Tensor, P: Tensor) -> float:
    """Return the largest ‖J v‖_P / ‖v‖_P over a batch of states and inputs."""
    L = torch.linalg.cholesky(P)
    J = jacobian(cell, s, x)
    scaled = torch.linalg.solve_triangular(L, (L.mT @ J).mT, upper=False).mT
    return float(torch.linalg.matrix_norm(scaled, ord=2).max())


def pair_excess(cell: Cell, a: Tensor, b: Tensor, x: Tensor, P: Tensor, *, rate: float) -> float:
    """Return the largest ‖φ(a, x) − φ(b, x)‖_P − rate·‖a − b‖_P, less what rounding may add."""

    def norm(v: Tensor) -> Tensor:
        return torch.einsum("ni,ij,nj->n", v, P, v).clamp(min=0).sqrt()

    a_next, b_next = step(cell, a, x), step(cell, b, x)
    rounding = 1e-13 * (norm(a_next.abs() + b_next.abs()) + P.diagonal().sum().sqrt())
    return float((norm(a_next - b_next) - rate * norm(a - b) * ROUNDING - rounding).max())


def cut_error(recurrence: Recurrence, x: Tensor, depth: int) -> Tensor:
    """Return outputs minus those restarted ``depth`` steps back [N, T − depth, H], from t = depth.

    Written for autograd, and apart from the library's own truncation.
    """
    cell, start = recurrence.cell, recurrence.initial.value
    z = drive(cell, x)
    length = x.shape[1]
    s, full = start.expand(x.shape[0], -1), []
    for t in range(length):
        s = advance(cell, s, z[:, t])
        full.append(output(cell, s))
    # The window that begins at step j ends with step j + depth − 1, counted from 0.
    windows = length - depth
    cut = start.expand(x.shape[0], windows, -1)
    for j in range(depth):
        cut = advance(cell, cut, z[:, j : j + windows])
    return torch.stack(full, 1)[:, max(depth - 1, 0) :][:, :windows] - output(cell, cut)


def truncation_error(
    recurrence: Recurrence,
    domain: Domain,
    depth: int,
    rng: torch.Generator,
    *,
    climbs: int = 10,
    count: int = 8,
    norm: str = "max",
    A: Tensor | None = None,
) -> float:
    """Climb on inputs of the domain for the largest error of outputs cut to ``depth``."""
    cell = recurrence.cell
    lo, hi = domain.box(cell.input_size)
    lo, hi = lo.clamp(min=-3), hi.clamp(max=3)
    x = inputs(rng, domain, cell.input_size, count, depth + 12)
    worst = 0.0
    for _ in range(climbs):
        x = x.detach().requires_grad_()
        error = cut_error(recurrence, x, depth)
        if A is not None:
            error = error @ A.mT
        size = error.abs().amax(-1) if norm == "max" else error.norm(dim=-1)
        per_sequence = size.amax(1)
        worst = max(worst, float(per_sequence.detach().max()))
        if not per_sequence.requires_grad:
            break
        (slope,) = torch.autograd.grad(per_sequence.sum(), x)
        x = torch.minimum(torch.maximum(x + 0.3 * (hi - lo) * slope.sign(), lo), hi)
    return worst


def attack(r: Recurrence, domain: Domain, rng: torch.Generator, proofs: CertificateSet) -> None:
    """Hold every certificate against reached states, pairs of them, and climbed inputs."""
    cell = r.cell
    s = reached(r, domain, rng, 12)
    order = torch.randperm(len(s), generator=rng)
    x = inputs(rng, domain, cell.input_size, len(s), 1)[:, 0]
    for certificate in proofs.certificates:
        assert 0 <= certificate.bound.value < 1
        start = (s - r.initial.value).abs()
        if isinstance(certificate, ComparisonCertificate):
            J = jacobian(cell, s, x).abs()
            P = cell.hidden_size
            if certificate.norm == OF_NORMS:
                M = certificate.M if len(certificate.M) == 2 else certificate.M.expand(1, 1)
                parts = (slice(0, P), slice(P, None)) if len(M) == 2 else (slice(None),)
                for i, rows in enumerate(parts):
                    for j, columns in enumerate(parts):
                        most = J[:, rows, columns].sum(-1).max()
                        assert most <= M[i, j] * ROUNDING + 1e-15
                continue
            step_of = stepper(certificate.M, certificate.mixing)
            moved = torch.stack([step_of(e) for e in start])
            assert ((J @ start[..., None])[..., 0] <= moved * ROUNDING + 1e-15).all()
        assert start.le(certificate.box * ROUNDING + 1e-12).all()
        if isinstance(certificate, LinearCertificate):
            certificate = certificate.metric  # noqa: PLW2901 (the tail is climbed on below)
        if isinstance(certificate, QuadraticCertificate):
            for member in certificate.members[:2]:
                P = member.P
                assert stretch(cell, s, x, P) <= member.rate * ROUNDING
                assert pair_excess(cell, s, s[order], x, P, rate=member.rate) <= 0
                start = s - r.initial.value
                radius = torch.einsum("ni,ij,nj->n", start, P, start).sqrt().max()
                assert radius <= member.radius * ROUNDING
    for eps in (0.3, 1e-3):
        k = proofs.depth(eps)
        if k is not None and k <= 60:
            assert truncation_error(r, domain, k, rng) <= eps * ROUNDING
