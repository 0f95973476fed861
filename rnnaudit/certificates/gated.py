"""Gated cells contract where their gates, over all reachable states, leave no room to remember."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.cells.activations import slope_interval
from rnnaudit.certificates.balls import Balls, find_balls, place_in
from rnnaudit.certificates.circle import (
    close,
    find_loop_metric,
    find_multipliers,
    proves_loop_rate,
)
from rnnaudit.certificates.comparison import (
    ComparisonCertificate,
    Mixing,
    compare,
    growth_of,
    mixing_weights,
)
from rnnaudit.certificates.interface import Domain, Dynamics, Search, prove
from rnnaudit.certificates.intervals import Interval, apply, loosened, times_above
from rnnaudit.certificates.loops import (
    Loop,
    Place,
    gru_loop,
    gru_sectors,
    lstm_loop,
    lstm_sectors,
)
from rnnaudit.certificates.places import (
    MIXING,
    gru_place,
    halves,
    image,
    lstm_place,
    reachable_box,
)
from rnnaudit.certificates.published import published_gru, published_lstm
from rnnaudit.certificates.quadratic import Form, Metric, QuadraticCertificate, radius_of_box
from rnnaudit.model import GRUCell, LSTMCell, Recurrence
from rnnaudit.norms import up

_SLOWEST = 0.9995
"""The rate that is tried first."""

_MEMBERS = 3
"""How many of the metrics are kept; a larger rate can come with a smaller constant."""

_RATES = 7
"""How many rates the circle criterion tries, halving the gap to the slowest that it can be."""


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What every method needs to know of one gated recurrence over one domain.

    ``flat`` is the loop for entrywise bounds and ``mixed`` the one for metrics, each with
    its sector over pairs of reachable states. ``box`` bounds |s − s_start| and ``first``
    |φ(s_start, x) − s_start|. ``gate`` names the gate that remembers, and its largest value.
    """

    cell: LSTMCell | GRUCell
    domain: str
    x: Interval
    place: Place
    flat: tuple[Loop, Interval]
    mixed: tuple[Loop, Interval]
    box: Tensor
    first: Tensor
    gate: tuple[str, float]


def gather(recurrence: Recurrence, domain: Domain, search: Search) -> Facts | None:
    """Find the reachable states and what the gates can be there; None where that fails."""
    cell, start = recurrence.cell, recurrence.initial.value
    assert isinstance(cell, LSTMCell | GRUCell)
    used = (cell.gate, cell.candidate, *([cell.squash] if isinstance(cell, LSTMCell) else []))
    jumps = [f.name for f in used if slope_interval(f) is None]
    if jumps:
        search.fail("slopes", f"{jumps[0]} jumps, so no slope bounds its steps")
        return None
    x = Interval(*domain.box(cell.input_size))
    plain = states = reachable_box(cell, x, start)
    place = _place(cell, x, states)
    gate, most = _remembering(cell, place)
    if not states.finite:
        search.fail("states", f"{_reach(most, gate)} for {domain.name}, so no box holds the states")
        return None
    balls = find_balls(cell, x, start)
    if balls is not None:
        # Both hold every reachable state, and so does what they have in common.
        states = states.meet(balls.states())
        place = place_in(cell, x, balls, states)
    flat, mixed = _closed(cell, place)
    h = place.state["h"]
    gain = comparison_matrix(*flat, of_input=True)
    search.dynamics = Dynamics((h.lo, h.hi), gain, (plain.lo, plain.hi), _written(balls))
    begin = Interval.point(start)
    return Facts(
        cell,
        domain.name,
        x,
        place,
        flat,
        mixed,
        (states - begin).size,
        (image(cell, x, start, begin) - begin).size,
        (gate, most),
    )


def _place(cell: LSTMCell | GRUCell, x: Interval, states: Interval) -> Place:
    if isinstance(cell, GRUCell):
        return gru_place(cell, x, states)
    return lstm_place(cell, x, *halves(cell, states))


def _remembering(cell: LSTMCell | GRUCell, place: Place) -> tuple[str, float]:
    """Name the gate that remembers, and its largest value."""
    if isinstance(cell, GRUCell):
        return "update gate z", float(apply(cell.gate, place.pre["z"], cell.clip).hi.max())
    if cell.input_forget:
        keep = 1 - apply(cell.gate, place.pre["i"], cell.clip).lo
    else:
        keep = apply(cell.gate, place.pre["f"], cell.clip).hi
    return "forget gate", float(keep.max())


def _closed(
    cell: LSTMCell | GRUCell, place: Place
) -> tuple[tuple[Loop, Interval], tuple[Loop, Interval]]:
    """Return the loops for entrywise bounds and for metrics, of activations that do not jump."""
    if isinstance(cell, LSTMCell):
        loop, sector = lstm_loop(cell), lstm_sectors(cell, place, place)
        assert sector is not None
        return (loop, sector), (loop, sector)
    flat, mixed = (gru_sectors(cell, place, place, mixed=mixed) for mixed in (False, True))
    assert flat is not None
    assert mixed is not None
    return (gru_loop(cell, mixed=False), flat), (gru_loop(cell, mixed=True), mixed)


def _written(balls: Balls | None) -> tuple[Tensor, Tensor, tuple[float, ...]] | None:
    return None if balls is None else (balls.centre, balls.box, balls.radii)


def _reach(value: float, gate: str) -> str:
    if math.isinf(value):
        return f"nothing bounds the {gate}"
    for digits in range(4, 16):
        text = f"{value:.{digits}g}"
        if text != "1" or value >= 1:
            break
    return f"{gate} can reach {text}"


@prove.register(LSTMCell)
@prove.register(GRUCell)
def _(cell: LSTMCell | GRUCell, recurrence: Recurrence, domain: Domain, search: Search) -> None:
    facts = gather(recurrence, domain, search)
    if facts is None:
        return
    with search.attempt("comparison matrix"):
        M = comparison_matrix(*facts.flat)
        compare(M, facts.domain, facts.box, cell.hidden_size, search)
    if isinstance(cell, GRUCell):
        with search.attempt("average form"):
            _average(facts, search)
        published_gru(cell, facts.place, facts.box, search=search, domain=facts.domain)
    else:
        published_lstm(cell, facts.place, facts.box, search=search, domain=facts.domain)
    with search.attempt("circle criterion"):
        _circle(facts, search)
    if not search.certificates:
        search.failures.insert(0, ("summary", _why(facts, search)))


def _why(facts: Facts, search: Search) -> str:
    """Say in one line which term is too large."""
    gate, value = facts.gate
    if value > 0.9:
        return f"{_reach(value, gate)} for {facts.domain}"
    _, reason = search.failures[-1]
    h = float(facts.place.state["h"].size.max())
    return f"over the box |h| ≤ {h:.3g} for {facts.domain}, {reason}"


def comparison_matrix(loop: Loop, sector: Interval, *, of_input: bool = False) -> Tensor:
    """Bound |∂δ'/∂δ| entrywise: |A| + |B| d̄ (I − |D| d̄)⁻¹ |C|, rounded up, for D nilpotent.

    ``of_input`` asks for |∂δ'/∂Δx| instead, with E in place of C and no A.
    """
    d = sector.size
    v = term = loop.E.abs() if of_input else loop.C.abs()
    D = loop.D.abs()
    if bool((D != 0).any()):
        for _ in range(8):
            term = times_above(D, d[:, None] * term * (1 + 1e-15))
            if not bool((term != 0).any()):
                break
            v = (v + term) * (1 + 1e-15)
    M = times_above(loop.B.abs(), d[:, None] * v * (1 + 1e-15))
    return M if of_input else (loop.A.abs() + M) * (1 + 1e-15)


def _average(facts: Facts, search: Search) -> None:
    """Compare entrywise with one z for both parts of z h + (1 − z) n."""
    cell = facts.cell
    H = cell.hidden_size
    U_r, U_z, U_n = (U.abs() for U in cell.U.split(H))
    r, inner, n, z_slope, _ = facts.mixed[1].size.split(H)
    if isinstance(cell, GRUCell) and cell.reset_after:
        reads = r[:, None] * U_n + inner[:, None] * U_r
    else:
        reads = times_above(U_n, (torch.diag(r) + inner[:, None] * U_r) * (1 + 1e-15))
    B = n[:, None] * reads * (1 + 1e-15)
    z_lo, z_hi = (end[-H:] for end in (facts.mixed[1].lo, facts.mixed[1].hi))
    if not bool((z_lo >= 0).all() and (z_hi <= 1).all()):
        z_lo, z_hi = z_lo.clamp(min=0), z_hi.clamp(max=1)
        if cell.gate.name not in MIXING:
            return
    mixing = Mixing(z_lo, z_hi, B)
    Q = z_slope[:, None] * U_z * (1 + 1e-15)
    found = mixing_weights(Q, mixing)
    if found is None:
        growth = growth_of(Q, mixing)
        search.fail(
            "average form", f"the step with one z for both parts grows by {growth:.4g}, not below 1"
        )
        return
    search.certificates.append(
        ComparisonCertificate("average form", facts.domain, Q, *found, facts.box, H, mixing=mixing)
    )


def tempered(sector: Interval) -> Interval:
    """Widen multipliers that hardly vary, which would cost the proof its digits."""
    middle, half = (sector.lo + sector.hi) / 2, (sector.hi - sector.lo) / 2
    half = torch.maximum(half, 1e-4 * middle.abs() + 1e-12) * (1 + 1e-12)
    return Interval(
        torch.minimum(sector.lo, middle - half), torch.maximum(sector.hi, middle + half)
    )


def _circle(facts: Facts, search: Search) -> None:
    loop, sector = facts.mixed[0], tempered(loosened(facts.mixed[1]))
    closed = close(loop, sector)
    if not bool(torch.isfinite(closed.A).all() and torch.isfinite(closed.B).all()):
        return
    found: list[tuple[float, Tensor, Tensor]] = []
    level, norm = None, math.inf
    low, high, rate = float(torch.linalg.eigvals(closed.A).abs().max()), 1.0, _SLOWEST
    for step in range(_RATES):
        if step and search.expired:
            break
        level, norm = find_multipliers(
            closed, rate, steps=30 if step else 100, seed=search.seed, start=level
        )
        S = loop.A.shape[0]
        T = (2 * (level[S:] - level[S:].mean())).exp()
        P = find_loop_metric(closed, T, rate) if norm < 1.3 else None
        if P is not None:
            # |p| ≤ |q| with w = mid v + rad p is the sector with T divided by rad².
            found.append((rate, P, T / closed.rad.square()))
            high = rate
        elif step == 0:
            break
        else:
            low = rate
        if step == 0:
            # The norm with a diagonal metric is near the rate that a full one proves.
            low = max(low, norm - 0.15)
            rate = min(max(norm, low + 0.05), (low + high) / 2)
        else:
            rate = (low + high) / 2
        if search.progress is not None:
            search.progress((step + 1) / _RATES)
    members: list[Metric] = []
    for rate, P, T in sorted(found, key=lambda entry: entry[0]):
        if len(members) < _MEMBERS and proves_loop_rate(loop, sector, P, T, rate):
            members.append(_member(facts, P, T, rate))
    if not members:
        search.fail("circle criterion", f"the scaled 2-norm is about {norm:.4g}, not below 1")
        return
    search.certificates.append(
        QuadraticCertificate(
            "circle criterion",
            facts.domain,
            tuple(members),
            facts.box,
            facts.cell.hidden_size,
            Form(sector),
        )
    )


def _member(facts: Facts, P: Tensor, T: Tensor, rate: float) -> Metric:
    radius = radius_of_box(P, facts.box, P.diagonal())
    steps = radius_of_box(P, facts.first, P.diagonal())
    radius = min(radius, up(steps / math.nextafter(1 - rate, 0), 2))
    return Metric(rate, P, T, radius)
