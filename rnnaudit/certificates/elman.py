"""Elman cells contract in a metric when a circle criterion holds for the scaled weight.

Two states under one input differ by δ, and then by ΣWδ with Σ diagonal, each entry in the
interval [α, β] of that unit's difference quotients. With a metric P ≻ 0 and multipliers
T ⪰ 0, the matrix

    M = [[λ²P + 2WᵀαβTW, −Wᵀ(α+β)T], [−T(α+β)W, 2T − P]] ≻ 0

gives ‖ΣWδ‖_P ≤ λ‖δ‖_P, since (w − αv)ᵀT(βv − w) ≥ 0 for w = ΣWδ, v = Wδ. For [0, 1] a
feasible P exists exactly when the numerical radius of T^{½}WT^{−½} is below λ (Ando, 1973).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.certificates.comparison import compare
from rnnaudit.certificates.interface import Domain, Dynamics, Search, prove
from rnnaudit.certificates.intervals import (
    Interval,
    affine,
    apply,
    loosened,
    raised,
    settled,
    slopes,
)
from rnnaudit.certificates.linear import LinearCertificate
from rnnaudit.certificates.quadratic import (
    Form,
    LastStep,
    Metric,
    QuadraticCertificate,
    radius_of_box,
)
from rnnaudit.certificates.radius import minimise_radius
from rnnaudit.model import ElmanCell, Recurrence
from rnnaudit.norms import (
    UNIT,
    binary_scale,
    product_error,
    proves_positive_definite,
    spectral_norm_above,
    up,
)

_LOST = 1e-200


def reachable(recurrence: Recurrence, domain: Domain) -> Interval:
    """Return a box that holds every state the domain can reach; infinite where none is known.

    Starting from a box that φ maps into itself, every iterate of S ← hull(φ(S, X), s_start)
    is again such a box, and smaller.
    """
    cell, start = recurrence.cell, Interval.point(recurrence.initial.value)
    assert isinstance(cell, ElmanCell)
    x = Interval(*domain.box(cell.input_size))
    drive = affine(cell.U, x, cell.b)
    everything = torch.full_like(cell.b, math.inf)
    box = Interval(-everything, everything)

    def step(states: Interval) -> Interval:
        return apply(cell.activation, affine(cell.W, states) + drive, cell.clip).hull(start)

    for _ in range(64):
        smaller = step(box).meet(box)
        if smaller.finite and bool(((box.hi - box.lo) - (smaller.hi - smaller.lo)).max() < 1e-6):
            return settled(smaller, step)
        if not smaller.finite and smaller.inside(box) and box.inside(smaller):
            return _grown(cell, drive, start)
        box = smaller
    return box


def _grown(cell: ElmanCell, drive: Interval, start: Interval) -> Interval:
    """Grow a box from the initial state until φ maps it into itself; infinite if it does not."""
    box = start
    for _ in range(2000):
        image = apply(cell.activation, affine(cell.W, box) + drive, cell.clip).hull(start)
        if image.inside(box):
            return box
        if not image.finite or float(image.size.max()) > 1e12:
            break
        middle, half = (image.lo + image.hi) / 2, (image.hi - image.lo) / 2
        wider = Interval(middle - half * (1 + 1e-9) - 1e-12, middle + half * (1 + 1e-9) + 1e-12)
        box = box.hull(wider)
    everything = torch.full_like(cell.b, math.inf)
    return Interval(-everything, everything)


def proves_rate(W: Tensor, sector: Interval, P: Tensor, T: Tensor, rate: float) -> bool:
    """Prove ‖ΣWδ‖_P ≤ rate ‖δ‖_P for every diagonal Σ in the sector, and P ≻ 0.

    The matrix M is formed in float64 and scaled by powers of two to a near-unit diagonal.
    """
    n = W.shape[0]
    if not (sector.finite and bool(torch.isfinite(P).all()) and bool((T > 0).all())):
        return False
    if not torch.equal(P, P.mT) or not rate > 0:
        return False
    alpha, beta = sector.lo, sector.hi
    # Every entry is a chain of at most five products and two sums of exact numbers, hence
    # within 8u of the sum of the sizes of its terms; products of matrices err by
    # `product_error` on top. `error` bounds |fl(M) − M| entrywise.
    cross = -(W.mT * (alpha + beta)) * T
    cross_error = 8 * UNIT * (W.mT.abs() * (alpha.abs() + beta.abs())) * T
    corner = (rate * rate) * P
    corner_error = 8 * UNIT * corner.abs()
    weight = 2 * alpha * beta * T
    if bool((weight != 0).any()):
        V = weight[:, None] * W
        G = W.mT @ V
        corner = corner + (G + G.mT) / 2
        size = W.mT.abs() @ V.abs()
        corner_error = corner_error + product_error(W.mT, V) + 10 * UNIT * (size + corner.abs())
    last = torch.diag(2 * T) - P
    last_error = 8 * UNIT * (P.abs() + torch.diag(2 * T))
    M = torch.cat([torch.cat([corner, cross], 1), torch.cat([cross.mT, last], 1)])
    error = torch.cat(
        [torch.cat([corner_error, cross_error], 1), torch.cat([cross_error.mT, last_error], 1)]
    )
    s = binary_scale(M)
    scaled = s[:, None] * M * s
    slack = 1.01 * float(torch.linalg.matrix_norm(s[:, None] * error * s)) + n * _LOST
    if not proves_positive_definite(scaled, slack):
        return False
    s = binary_scale(P)
    return proves_positive_definite(s[:, None] * P * s, n * _LOST)


def find_metric(W: Tensor, sector: Interval, D: Tensor, rate: float) -> Tensor | None:
    """Search for the metric P that goes with multipliers T = D² at a given rate.

    With A = DWD⁻¹/λ, s = α + β, q = αβ iterate X ← (2 − δ)I + 2AᵀqA − AᵀsX⁻¹sA downward
    from (2 − δ)I; P = D(2I − X)D. None where the iteration breaks down.
    """
    n = W.shape[0]
    A = D[:, None] * W / D / rate
    eye = torch.eye(n, dtype=W.dtype)
    both = (sector.lo + sector.hi)[:, None] * A
    product = 2 * A.mT @ ((sector.lo * sector.hi)[:, None] * A)
    for delta in (1e-3, 1e-4):
        X = (2 - delta) * eye
        for _ in range(200):
            L, info = torch.linalg.cholesky_ex(X)
            if int(info) != 0:
                break
            K = torch.linalg.solve_triangular(L, both, upper=False)
            after = (2 - delta) * eye + product - K.mT @ K
            change = float(torch.linalg.matrix_norm(after - X))
            X = (after + after.mT) / 2
            if change <= delta / 2:
                P: Tensor = D[:, None] * (2 * eye - X) * D
                return (P + P.mT) / 2
    return None


_MARGINS = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.25)
"""How far above the numerical radius the rates lie; a larger λ can come with a smaller C."""

_LEAST = 1e-30
"""Rates below this are not worth proving: λ² must stay clear of underflow."""


@prove.register(ElmanCell)
def _(cell: ElmanCell, recurrence: Recurrence, domain: Domain, search: Search) -> None:
    states = reachable(recurrence, domain)
    drive = affine(cell.U, Interval(*domain.box(cell.input_size)), cell.b)
    sector = slopes(cell.activation, affine(cell.W, states) + drive, cell.clip)
    everywhere = slopes(
        cell.activation,
        Interval(torch.full_like(cell.b, -math.inf), torch.full_like(cell.b, math.inf)),
        cell.clip,
    )
    if sector is None or everywhere is None or not sector.finite:
        search.fail("slopes", f"{cell.activation.name} jumps, so no slope bounds its steps")
        return
    start = recurrence.initial.value
    zero, sector = torch.zeros_like(start), loosened(sector)
    wide = Interval(torch.minimum(sector.lo, zero), torch.maximum(sector.hi, zero))
    first = apply(
        cell.activation, affine(cell.W, Interval.point(start)) + drive, cell.clip
    ) - Interval.point(start)
    facts = _Facts(
        cell=cell,
        domain=domain.name,
        box=(states - Interval.point(start)).size,
        first=first.size,
        anywhere=everywhere.inside(wide),
    )
    gain = raised(sector.size[:, None] * cell.U.abs()) * (cell.U != 0)
    search.dynamics = Dynamics((states.lo, states.hi), gain, (states.lo, states.hi))
    with search.attempt("comparison matrix"):
        M = raised(sector.size[:, None] * cell.W.abs()) * (cell.W != 0)
        compare(M, facts.domain, facts.box, cell.hidden_size, search)
    if not bool(torch.isfinite(wide.size[:, None] * cell.W).all()):
        search.fail("spectral norm", "the weights times the slopes overflow float64")
        return
    with search.attempt("spectral norm"):
        _spectral(facts, wide, search)
    if cell.activation.name == "affine" and cell.clip is None:
        with search.attempt("linear"):
            _linear(facts, search)
        return
    with search.attempt("numerical radius"):
        _circle(facts, wide, sector, search)


@dataclass(frozen=True, slots=True, eq=False)
class _Facts:
    """What every method needs: |s − s_start| ≤ box, |φ(s_start, x) − s_start| ≤ first."""

    cell: ElmanCell
    domain: str
    box: Tensor
    first: Tensor
    anywhere: bool

    def metric(self, P: Tensor, T: Tensor, rate: float) -> Metric:
        """Put a proved rate together with the radius that it starts from."""
        radius = radius_of_box(P, self.box, T)
        if rate < 1:
            # Reachable states lie within sup‖φ(s_start, x) − s_start‖_P / (1 − λ) of s_start.
            steps = radius_of_box(P, self.first, T)
            radius = min(radius, up(steps / math.nextafter(1 - rate, 0), 2))
        return Metric(rate, P, T, radius)

    def certificate(
        self, method: str, members: list[Metric], sector: Interval, *, norm: str
    ) -> QuadraticCertificate:
        """Collect metrics that hold for every slope in the sector."""
        zeroable = bool(((sector.lo <= 0) & (sector.hi >= 0)).all())
        return QuadraticCertificate(
            method,
            self.domain,
            tuple(members),
            self.box,
            self.cell.hidden_size,
            # The loop's matrix has wᵀTw where this one has 2wᵀTw.
            Form(sector, 2.0),
            LastStep(self.cell.W, sector.size, zeroable),
            self.anywhere and zeroable,
            norm,
        )


def _spectral(facts: _Facts, sector: Interval, search: Search) -> None:
    W = facts.cell.W
    # The product with the slopes rounds once per entry: u‖·‖_F ≤ u√n‖·‖₂.
    rate = up(spectral_norm_above(sector.size[:, None] * W) * (1 + 2 * UNIT * W.shape[0]))
    if not rate < 1:
        search.fail("spectral norm", f"‖W‖₂ is {rate:.4g}, not below 1")
        return
    one = torch.ones_like(facts.cell.b)
    eye = torch.diag(one)
    search.certificates.append(
        facts.certificate("spectral norm", [facts.metric(eye, one, rate)], sector, norm="2-norm")
    )


def _linear(facts: _Facts, search: Search) -> None:
    """Solve the discrete Lyapunov equation of A/λ for rates between ρ(A) and 1."""
    slope = 1.0 if facts.cell.activation.alpha is None else facts.cell.activation.alpha
    A = slope * facts.cell.W
    radius = float(torch.linalg.eigvals(A).abs().max())
    if not radius < 1:
        reason = f"the spectral radius of its matrix is about {radius:.4g}, not below 1"
        search.failures.insert(0, ("linear", reason))
        return
    # α = β up to the rounding of their product with W: the multipliers of a tiny sector.
    size = torch.full_like(facts.cell.b, abs(slope))
    sector = Interval(slope - 1e-9 * size, slope + 1e-9 * size)
    members: list[Metric] = []
    for part in (0.02, 0.05, 0.1, 0.2, 0.4, 0.7):
        rate = radius + (1 - radius) * part
        P = _lyapunov(A / rate)
        if P is None:
            continue
        # T must dominate P for the sector to pin w to A δ; its middle is what P was made for.
        T = torch.full_like(size, 1e6 * float(torch.linalg.matrix_norm(P, ord=2)))
        if proves_rate(facts.cell.W, sector, P, T, rate):
            members.append(facts.metric(P, T, rate))
    if not members:
        search.fail("linear", "no metric of the Lyapunov equation could be proved in float64")
        return
    metric = facts.certificate("linear", members, sector, norm="weighted 2-norm")
    search.certificates.append(LinearCertificate("linear", facts.domain, A, facts.first, metric))


def _lyapunov(A: Tensor) -> Tensor | None:
    """Sum P = Σ (Aᵀ)ʲ Aʲ by doubling; None where it grows beyond use."""
    P, power = torch.eye(len(A), dtype=A.dtype), A
    for _ in range(60):
        more = power.mT @ P @ power
        P = P + (more + more.mT) / 2
        power = power @ power
        if not bool(torch.isfinite(P).all()) or float(P.abs().max()) > 1e8:
            return None
        if float(more.abs().max()) < 1e-3 * float(P.diagonal().min()) * 1e-3:
            return P
    return None


def _circle(facts: _Facts, wide: Interval, sector: Interval, search: Search) -> None:
    W = facts.cell.W
    n = W.shape[0]
    loop = wide.size[:, None] * W
    if not bool((loop != 0).any()):
        return
    iterations = 150 if n <= 64 else 100 if n <= 256 else 60
    D, guess = minimise_radius(
        loop,
        iterations=iterations,
        seed=search.seed,
        deadline=search.deadline,
        progress=search.progress,
    )
    members: list[Metric] = []
    for margin in _MARGINS:
        rate = max(guess, _LEAST) * (1 + margin)
        if not rate < 1 or (members and search.expired):
            break
        member = _member(facts, wide, D, rate)
        if member is not None:
            members.append(member)
    if not members:
        search.failures.insert(
            0,
            (
                "numerical radius",
                f"the numerical radius of the scaled weight is about {guess:.4g}, not below 1",
            ),
        )
        return
    search.certificates.append(
        facts.certificate("numerical radius", members, wide, norm="weighted 2-norm")
    )
    if float(sector.lo.min()) > 0.01 and not search.expired:
        _narrow(facts, sector, D, members[0].rate, search)


def _narrow(facts: _Facts, sector: Interval, D: Tensor, rate: float, search: Search) -> None:
    """Use that no slope falls below α > 0: the same multipliers, smaller rates."""
    members: list[Metric] = []
    for _ in range(12):
        member = _member(facts, sector, D, rate)
        if member is None or search.expired:
            break
        members.append(member)
        rate *= 0.97
    if members:
        search.certificates.append(
            facts.certificate("circle criterion", members, sector, norm="weighted 2-norm")
        )


def _member(facts: _Facts, sector: Interval, D: Tensor, rate: float) -> Metric | None:
    P = find_metric(facts.cell.W, sector, D, rate)
    T = D * D
    if P is None or not proves_rate(facts.cell.W, sector, P, T, rate):
        return None
    return facts.metric(P, T, rate)
