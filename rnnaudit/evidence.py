"""What a study of depths is evidence for: a k with its confidence, and what weakens it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.depth import DepthStudy, grid
from rnnaudit.estimators import Obstacles
from rnnaudit.findings import finding
from rnnaudit.model import LSTMCell, Recurrence
from rnnaudit.reports.numbers import counted, down, epsilon, near, percent, percent_up, up
from rnnaudit.results import CurvePoint, Finding, MeasuredDepth

FEW = 20
"""Below this many sequences, 95 % confidence allows 14 % of others to exceed ε."""


def exceed_probability(sequences: int, failures: int, confidence: float) -> float:
    """Return the Clopper–Pearson upper bound on the share of sequences that exceed ε.

    ``failures`` is how many of the measured sequences were allowed to exceed it, fixed
    before the data were looked at (Clopper & Pearson, 1934); ties keep the bound valid.
    """
    if failures >= sequences:
        return 1.0
    if failures == 0:
        return float(-math.expm1(math.log1p(-confidence) / sequences))
    from scipy.special import betaincinv  # the beta distribution's quantile

    return float(betaincinv(failures + 1, sequences - failures, confidence))


def enough_sequences(exceed: float, confidence: float) -> int:
    """Return the fewest sequences that can show, none failing, that ≤ ``exceed`` of all fail."""
    return math.ceil(math.log1p(-confidence) / math.log1p(-exceed))


def allowed_failures(sequences: int, exceed: float, confidence: float) -> int | None:
    """Return the most failures whose bound still is ≤ ``exceed``; None where none suffice."""
    allowed = None
    for failures in range(sequences):
        if exceed_probability(sequences, failures, confidence) > exceed:
            break
        allowed = failures
    return allowed


def measured_depth(
    study: DepthStudy,
    eps: float,
    *,
    confidence: float = 0.95,
    synthetic: bool = False,
    failures: int = 0,
) -> MeasuredDepth:
    """Return the (n − r)-th smallest K_i(ε), r = ``failures`` fixed before looking.

    With r = 0 that is the largest. Where it is longer than the data can show, ``k`` is
    None and ``longer_than`` what they exceed, at most half of what was evaluated.
    """
    needed = study.needed(eps)
    n = len(needed)
    known = sorted(k for k in needed if k is not None)
    rank = n - failures
    k = 0 if rank <= 0 else known[rank - 1] if rank <= len(known) else None
    longer = None
    if k is None:
        shown = zip(needed, study.longer_than(eps), strict=True)
        more = sorted((k for need, k in shown if need is None), reverse=True)
        longer = more[failures]  # r + 1 sequences need more than this
    return MeasuredDepth(
        k=k,
        longer_than=longer,
        sequences=n,
        exceed_probability=None if k is None else exceed_probability(n, failures, confidence),
        confidence=confidence,
        synthetic=synthetic,
        set_aside=failures,
    )


def curve(study: DepthStudy) -> tuple[CurvePoint, ...]:
    """Return quantiles over sequences of the largest error, at a thinning set of depths.

    A depth at which a sequence has no finite error, or was not evaluated, is left out.
    """
    shown = set(grid(study.T)) | {study.depths[-1]} | set(range(17))
    reach = min(h for h in study.horizons)
    points = []
    for i, k in enumerate(study.depths):
        errors = study.errors[:, i]
        if (k in shown or not study.every_depth) and k <= reach and bool(errors.isfinite().all()):
            p50, p95 = torch.quantile(
                errors, errors.new_tensor([0.5, 0.95]), interpolation="higher"
            )
            points.append(CurvePoint(k, float(p50), float(p95), float(errors.max())))
    return tuple(points)


def caveats(
    study: DepthStudy,
    measured: MeasuredDepth,
    eps: float,
    where: str,
    exceed: float | None = None,
) -> list[Finding]:
    """Return what weakens a measured depth: few or short sequences, longer memory, a cut.

    ``exceed`` is the share of unseen sequences that was allowed to exceed ε, if any was named.
    """
    found = []
    n = measured.sequences
    if eps < study.resolution:
        found.append(
            finding(
                "RA214",
                where,
                f"k({epsilon(eps)}) cannot be measured: rounding alone may move these outputs "
                f"by {up(study.resolution, 1)}",
            )
        )
    elif measured.k is None and _beyond_the_data(study, measured, eps):
        found.append(
            finding(
                "RA202",
                where,
                f"k({epsilon(eps)}) is longer than the data show: more than "
                f"{measured.longer_than} of {study.T} steps on at least {measured.set_aside + 1} "
                f"of {n} sequences",
            )
        )
    elif measured.k is not None and min(study.lengths) < 2 * measured.k and not study.whole:
        found.append(
            finding(
                "RA204",
                where,
                f"the shortest sequence has {min(study.lengths)} steps, fewer than twice the "
                f"measured k({epsilon(eps)}) = {measured.k}",
            )
        )
    if exceed is not None and exceed_probability(n, 0, measured.confidence) > exceed:
        found.append(
            finding(
                "RA203",
                where,
                f"{counted(n, 'sequence')} cannot show at "
                f"{percent(measured.confidence)} confidence that at most {percent(exceed)} of "
                f"others exceed ε: that takes {enough_sequences(exceed, measured.confidence)}",
            )
        )
    elif exceed is None and n < FEW:
        share = percent_up(exceed_probability(n, 0, measured.confidence))
        found.append(
            finding(
                "RA203",
                where,
                f"{counted(n, 'sequence')}: at {percent(measured.confidence)} confidence "
                f"up to {share} of others may exceed ε",
            )
        )
    if not study.complete:
        found.append(cut_study(study, where))
    if not bool(study.errors[:, 0].isfinite().all()):
        count = int((~study.errors[:, 0].isfinite()).sum())
        found.append(
            finding(
                "RA209",
                where,
                f"states are not finite on {count} of {n} sequences: the model diverges there",
            )
        )
    return found


def _beyond_the_data(study: DepthStudy, measured: MeasuredDepth, eps: float) -> bool:
    """Whether the data themselves show too little, and not only what time there was for."""
    rows = zip(study.needed(eps), study.horizons, study.lengths, strict=True)
    short = sum(need is None and horizon == length for need, horizon, length in rows)
    return short > measured.set_aside


def cut_study(study: DepthStudy, where: str) -> Finding:
    """Say how far a study came that the time budget ended."""
    return finding(
        "RA208",
        where,
        f"the time budget ended the study at depth {min(study.horizons)} of {study.T}",
    )


def drift(recurrence: Recurrence, x: Tensor, where: str) -> Finding | None:
    """Warn where an LSTM's c (the larger state) still grows at the end of x [N, T, I].

    A unit drifts when its mean |c| ends above 1, its last quarter exceeds its second by a
    fifth on average and at all in four sequences of five, and of any two eighths the later
    is nearly always the higher (Kendall's τ ≥ 0.8). K measured on such data says little of
    longer data.
    """
    cell = recurrence.cell
    T = x.shape[1]
    if not isinstance(cell, LSTMCell) or T < 16:
        return None
    states = cells.trajectory(cell, cells.reads(recurrence, x), recurrence.initial.value)
    size = states[..., cell.hidden_size :].abs()
    each = torch.stack([part.mean(1) for part in size.tensor_split(4, dim=1)], dim=1)
    quarters = each.mean(0)
    eighths = torch.stack([part.mean(1) for part in size.tensor_split(8, dim=1)], dim=1).mean(0)
    earlier, later = torch.triu_indices(8, 8, 1)
    concordance = (eighths[later] - eighths[earlier]).sign().mean(0)
    drifting = (quarters[3] > 1) & (quarters[3] > 1.2 * quarters[1]) & (concordance >= 0.8)
    drifting &= (each[:, 3] > each[:, 1]).double().mean(0) >= 0.8
    if not bool(drifting.any()):
        return None
    unit = int(torch.where(drifting, quarters[3] - quarters[1], -math.inf).argmax())
    return finding(
        "RA206",
        where,
        f"{int(drifting.sum())} of {cell.cell_size} cell states still grow at the end of the "
        f"data; |c| of unit {unit} goes from {near(float(quarters[1, unit]))} in the second "
        f"quarter to {near(float(quarters[3, unit]))} in the last",
    )


def in_the_way(
    obstacles: Obstacles, where: str, *, below: bool = False, steps: int | None = None
) -> list[Finding]:
    """Say with numbers why no proof can exist: expansion, bistability, divergence.

    Where a layer stands ``below``, what is held is an output of it, which no input may hold. What
    is kept for ever, or grows for ever, is nothing to a graph whose sequences have so many
    ``steps``, whatever they are.
    """
    found = []
    held = "one held output of the layer below" if below else "one held input"
    reasons = []
    if obstacles.expansion is not None:
        radius = down(obstacles.expansion.radius)
        reasons.append(f"ρ(∂s'/∂s) = {radius} at a mean of reached states")
    if obstacles.repelling:
        orbit, count = obstacles.repelling[0], len(obstacles.repelling)
        kind = "a fixed point" if orbit.period == 1 else f"a cycle of {orbit.period} steps"
        others = f", one of {count} found," if count > 1 else ""
        reasons.append(
            f"under {held} {kind}{others} repels: ρ = {down(orbit.radius)}, met to "
            f"{up(orbit.residual, 1)}"
        )
    if reasons:
        found.append(finding("RA239", where, "; ".join(reasons)))
    if steps is None and (pair := obstacles.bistability) is not None:
        found.append(
            finding(
                "RA240",
                where,
                f"under {held} the start settles {near(pair.gap)} from where "
                f"{len(pair.prefix)} recorded steps lead (ρ = {near(pair.first.radius, 2)} and "
                f"{near(pair.second.radius, 2)} there)",
            )
        )
    if steps is None and (grown := obstacles.divergence) is not None:
        found.append(
            finding(
                "RA241",
                where,
                f"under {held} the largest |s| is {near(grown.size, 2)} after "
                f"{grown.steps} steps, and grows",
            )
        )
    return found
