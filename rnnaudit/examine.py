"""Examine every recurrence: what is proved of it, and what is measured on what it sees."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rnnaudit import cells
from rnnaudit.cells.chain import Chain
from rnnaudit.certificates import (
    CertificateSet,
    Domain,
    StackCertificate,
    certify_stack,
)
from rnnaudit.data import InputRange
from rnnaudit.depth import (
    DepthStudy,
    Glance,
    floor_for,
    glance_at_stack,
    merged,
    pool,
    study_recurrence,
    study_stack,
)
from rnnaudit.errors import UsageError
from rnnaudit.estimators import (
    PREFIX,
    Obstacles,
    Refutation,
    is_one_hot,
    lambda_below,
    norm_curve,
    obstacles,
    pictures,
    refute,
    refute_both_ways,
    spectrum,
    within_reach,
    witness,
)
from rnnaudit.evidence import allowed_failures, measured_depth
from rnnaudit.model import ElmanCell, Layer, Model, Recurrence, Stack
from rnnaudit.observe import Observation, vocabulary
from rnnaudit.reports.numbers import exact
from rnnaudit.results import (
    EPSILONS,
    HORIZON,
    Depth,
    LowerBound,
    LyapunovSpectrum,
    MeasuredDepth,
    NoProof,
    Norm,
    NormCurve,
    Pictures,
    UnitMemory,
)
from rnnaudit.threads import few_threads

Found = TypeVar("Found", DepthStudy, Glance)
Progress = Callable[[str, float], None]
"""Called with what is being done and the share that is done."""

PROOFS, MEASURES, SEARCHES, OBSTACLES, NORMS = 0.4, 0.35, 0.15, 0.05, 0.05
"""How a part's share of the time budget is divided; what one leaves, the later ones have."""

PILOT = 5
"""Sequences that are measured first where all would be expensive: one of each synthetic kind."""

AFFORDABLE = 1e11
"""Multiplications up to which every depth of every sequence is measured without a pilot."""

RESTARTS, ASCENTS = 8, 12
"""Sequences that the search improves at once, and steps of improvement for each window."""

SEARCHABLE = 2e6
"""Multiplications of one step up to which counterexamples are searched for."""

EXPONENTS = 10
"""Lyapunov exponents that are shown, at most."""

SPECTRUM = 3e10
"""Multiplications that more exponents than the first may cost."""

ORTHONORMALISED = 100
"""Multiplications of one step for each unit of a tangent to be made orthogonal to the others."""

ONE_HOT, ONE_HOT_DATA = "the one-hot vectors", "the one-hot vectors of the data"
"""Names of domains in which every input has one feature of 1 and no other."""

LAYERWISE = 8
"""How much dearer a layer by layer study is: each depth starts from nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the caller wants to know of a model."""

    eps: float
    norm: Norm = "max"
    confidence: float = 0.95
    exceed: float | None = None
    seed: int = 0
    time_budget: float | None = None
    input_range: InputRange | None = None
    pictures: bool = False

    def __post_init__(self) -> None:
        """Refuse what makes no sense, whatever the model."""
        eps, seconds = self.eps, self.time_budget
        if not (eps > 0 and math.isfinite(eps)):
            raise UsageError(
                f"ε must be a positive finite number, got {eps}", help="for example 1e-3"
            )
        if self.norm not in ("max", "2"):
            raise UsageError(f"the norm must be max or 2, got {self.norm!r}")
        if not 0 < self.confidence < 1:
            raise UsageError(f"the confidence must be between 0 and 1, got {self.confidence}")
        if self.exceed is not None and not 0 < self.exceed < 1:
            raise UsageError(
                f"the share that may exceed ε must be between 0 and 1, got {self.exceed}"
            )
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"the seed must be from 0 to 2⁶³ − 1, got {self.seed}")
        if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
            raise UsageError(f"the time budget must be a positive number of seconds, got {seconds}")
        if isinstance(self.input_range, str) and self.input_range != "one-hot":
            raise UsageError(
                f"the input range must be two numbers or one-hot, got {self.input_range!r}"
            )

    @property
    def epsilons(self) -> tuple[float, ...]:
        """Every ε that a report speaks of, largest first."""
        return tuple(sorted({*EPSILONS, self.eps}, reverse=True))

    def failures(self, sequences: int) -> int:
        """Return how many of so many sequences may exceed ε: fixed before any is looked at."""
        if self.exceed is None:
            return 0
        return allowed_failures(sequences, self.exceed, self.confidence) or 0


@dataclass(frozen=True, slots=True, eq=False)
class Examined:
    """One recurrence: its proofs and, for its own output, its errors at every depth."""

    recurrence: Recurrence
    domain: Domain
    certificates: CertificateSet
    study: DepthStudy
    synthetic: bool
    lower: LowerBound | None
    norms: NormCurve | None
    spectrum: LyapunovSpectrum
    spectral_norm: float | None
    refutation: Refutation | None
    obstacles: Obstacles | None
    pictures: Pictures | None
    noise: float | None
    steps: int | None

    @property
    def name(self) -> str:
        """The recurrence's label."""
        return self.recurrence.label

    def depth(self, eps: float, settings: Settings) -> Depth:
        """Collect what is known of the depth for ε."""
        return _depth(self, eps, self.certificates.depth(eps, norm=settings.norm), settings)

    def unit_memory(self, eps: float) -> UnitMemory | None:
        """Return the depth of each unit of the state, h and what is carried beside it."""
        depths, H = self.study.unit_depths(), self.recurrence.cell.hidden_size
        if depths is None:
            return None
        parts = {"h": depths[:H], "c": depths[H:]}
        return UnitMemory(eps, {name: part for name, part in parts.items() if part})


@dataclass(frozen=True, slots=True, eq=False)
class ExaminedStack:
    """One stack through its readout: its proof and its errors at every depth."""

    stack: Stack
    certificate: StackCertificate
    study: DepthStudy
    synthetic: bool
    kinds: tuple[str, ...]
    refutation: Refutation | None
    noise: float | None

    @property
    def name(self) -> str:
        """The stack's name."""
        return self.stack.name

    def depth(self, eps: float, settings: Settings) -> Depth:
        """Collect what is known of the depth for ε of the stack's output."""
        return _depth(self, eps, self.certificate.depth(eps, settings.norm), settings)


def _depth(
    each: Examined | ExaminedStack, eps: float, proved: int | None, settings: Settings
) -> Depth:
    refuted = None if each.refutation is None else each.refutation.refuted_below(eps)
    return Depth(
        eps,
        proved=proved,
        refuted_below=refuted,
        refuted_in=None if refuted is None else each.name,
        searched=None if each.refutation is None else each.refutation.horizon,
        float32_noise=each.noise,
        measured=measured_depth(
            each.study,
            eps,
            confidence=settings.confidence,
            synthetic=each.synthetic,
            failures=settings.failures(len(each.study.lengths)),
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Examination:
    """Everything that an audit and a truncation build on."""

    model: Model
    seen: Observation
    settings: Settings
    recurrences: Mapping[str, Examined]
    stacks: tuple[ExaminedStack, ...]
    domain: str
    domains: tuple[Domain, ...]

    def depth(self, eps: float) -> Depth:
        """Return the depth for ε of every stack: the largest, where all have one."""
        depths = [stack.depth(eps, self.settings) for stack in self.stacks]
        searched = [d for d in depths if d.searched is not None]
        worst = max(searched, key=lambda d: d.refuted_below or 0, default=None)
        return Depth(
            eps,
            proved=_largest([d.proved for d in depths]),
            measured=_pooled([d.measured for d in depths if d.measured is not None]),
            refuted_below=None if worst is None else worst.refuted_below,
            refuted_in=None if worst is None else worst.refuted_in,
            searched=None if worst is None else worst.searched,
            float32_noise=max(
                (d.float32_noise for d in depths if d.float32_noise is not None), default=None
            ),
        )


def _largest(depths: Sequence[int | None]) -> int | None:
    known = [k for k in depths if k is not None]
    return max(known) if known and len(known) == len(depths) else None


def _pooled(parts: Sequence[MeasuredDepth]) -> MeasuredDepth | None:
    """Join measurements of several stacks: the deepest counts.

    The confidence statements are each stack's own; no joint one is made.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    k = _largest([part.k for part in parts])
    longer = [part.longer_than or 0 for part in parts if part.k is None]
    return MeasuredDepth(
        k=k,
        longer_than=max(longer, default=None),
        sequences=min(part.sequences for part in parts),
        exceed_probability=None,
        confidence=parts[0].confidence,
        synthetic=any(part.synthetic for part in parts),
        set_aside=max(part.set_aside for part in parts),
    )


def examine(
    model: Model,
    seen: Observation,
    settings: Settings,
    *,
    progress: Progress | None = None,
) -> Examination:
    """Prove and measure every recurrence and every stack of a model.

    Args:
        model: The model as loaded.
        seen: What its recurrences see.
        settings: What the caller wants.
        progress: Called with what is being done and the share that is done.
    """
    with few_threads(max((r.cell.state_size for r in model.recurrences()), default=0)):
        return _examined(model, seen, settings, progress)


def _examined(
    model: Model, seen: Observation, settings: Settings, progress: Progress | None
) -> Examination:
    total = len(list(model.recurrences())) + len(model.stacks)
    work = _Work(total, settings.time_budget, progress)
    found: dict[str, Examined] = {}
    stacks = []
    domains = []
    for i, stack in enumerate(model.stacks):
        domain = domain_of(model, seen.stacks[i], settings, synthetic=seen.synthetic[i])
        domains.append(domain)
        rows = _rows(model, stack, domain)
        steps = seen.steps[i]
        parts = 1 + sum(1 for _ in stack.recurrences())
        proof = prove_stack(stack, domain, work.seconds(PROOFS * parts), settings.seed)
        owners = seen.owners[i]
        for recurrence in stack.recurrences():
            groups = seen.recurrences[recurrence.label]
            study = _measure(recurrence, _Inputs(groups, owners, seen.whole[i]), settings, work)
            longest = groups[-1]
            # Below the first layer what is read is an output, which the proof covers anyway.
            covered = longest if recurrence.layer else _inside(longest, domain)
            certificates = proof.recurrences[recurrence.label]
            stable = certificates.best is not None and certificates.best.bound.value < 1
            seconds = work.seconds(OBSTACLES)
            in_the_way = (
                None
                if stable
                else obstacles(recurrence, covered, seed=settings.seed, budget_s=seconds)
            )
            found[recurrence.label] = Examined(
                recurrence,
                domain,
                certificates,
                study,
                seen.synthetic[i],
                lower=lambda_below(recurrence, covered, seed=settings.seed),
                norms=norm_curve(
                    recurrence, longest, seed=settings.seed, budget_s=work.seconds(NORMS)
                ),
                spectrum=_spectrum(recurrence, longest, settings.seed),
                spectral_norm=_spectral_norm(recurrence),
                refutation=_refuted_alone(
                    recurrence,
                    domain,
                    longest,
                    settings,
                    work,
                    rows=rows,
                    in_the_way=in_the_way,
                    steps=steps,
                ),
                obstacles=in_the_way,
                pictures=pictures(recurrence, longest, seed=settings.seed)
                if settings.pictures
                else None,
                noise=_noise(model, _alone(recurrence), groups, settings),
                steps=steps,
            )
        inputs = _Inputs(seen.stacks[i], owners, seen.whole[i])
        stacks.append(
            ExaminedStack(
                stack,
                proof,
                _whole(stack, inputs, settings, work),
                seen.synthetic[i],
                seen.kinds[i],
                _refuted(
                    [found[r.label] for r in stack.recurrences()],
                    stack,
                    inputs.groups,
                    settings,
                    work,
                    rows=rows,
                    steps=steps,
                ),
                _noise(model, stack, inputs.groups, settings),
            )
        )
    names = " · ".join(dict.fromkeys(domain.name for domain in domains))
    return Examination(model, seen, settings, found, tuple(stacks), names, tuple(domains))


class _Work:
    """How many of the parts are done, and the time that is left for the others."""

    def __init__(self, total: int, budget_s: float | None, callback: Progress | None) -> None:
        """Start the clock; without a budget it never ends."""
        self.total, self.callback, self.done = total, callback, 0
        self._end = None if budget_s is None else time.monotonic() + budget_s
        self._left = float(total)

    def seconds(self, shares: float) -> float | None:
        """Return what these shares, of one for each part, have of the time that is left."""
        part = min(1.0, shares / self._left) if self._left > 0 else 1.0
        self._left -= shares
        return None if self._end is None else max(0.0, self._end - time.monotonic()) * part

    def start(self, label: str) -> Callable[[float], None]:
        """Return what the next part reports its own share to."""
        before = self.done
        self.done += 1

        def note(part: float) -> None:
            if self.callback is not None:
                self.callback(label, (before + part) / max(1, self.total))

        note(0.0)
        return note


class _Inputs(NamedTuple):
    """Rows [N, T, I] in groups of one length, and the sequence that each row belongs to.

    ``whole`` says that none can be longer.
    """

    groups: Sequence[Tensor]
    owners: Sequence[Tensor]
    whole: bool


def _measure(
    recurrence: Recurrence,
    inputs: _Inputs,
    settings: Settings,
    work: _Work,
) -> DepthStudy:
    """Measure a recurrence's own output on what it sees."""
    note = work.start(f"measuring {recurrence.label}")

    def study(x: Tensor, budget: float | None) -> DepthStudy:
        return study_recurrence(
            recurrence,
            x,
            norm=settings.norm,
            budget_s=budget,
            progress=note,
            floor=floor_for(settings.eps),
            unit_eps=settings.eps,
            whole=inputs.whole,
        )

    return _study(study, inputs, cells.multiplications(recurrence.cell), settings, work)


def _whole(
    stack: Stack,
    inputs: _Inputs,
    settings: Settings,
    work: _Work,
) -> DepthStudy:
    """Measure a stack's output, through its readout."""
    note = work.start(f"measuring {stack.name}")
    epsilons = tuple(dict.fromkeys((settings.eps, *settings.epsilons)))

    def measured(run: Callable[..., Found], x: Tensor, budget: float | None) -> Found:
        return run(
            stack,
            x,
            norm=settings.norm,
            epsilons=epsilons,
            budget_s=budget,
            progress=note,
            floor=floor_for(settings.eps),
            whole=inputs.whole,
        )

    study, glance = partial(measured, study_stack), partial(measured, glance_at_stack)
    cost = cells.multiplications(*(r.cell for r in stack.recurrences()))
    if stack.readout is not None:
        cost += stack.readout.A.numel()
    if len(stack.layers) == 1 or stack.causal:
        return _study(study, inputs, cost, settings, work)
    return _study(study, inputs, cost * LAYERWISE, settings, work, glance=glance)


def _study(
    study: Callable[[Tensor, float | None], DepthStudy],
    inputs: _Inputs,
    cost: float,
    settings: Settings,
    work: _Work,
    *,
    glance: Callable[[Tensor, float | None], Glance] | None = None,
) -> DepthStudy:
    """Study every sequence; where that is expensive, a few first, at a ``glance`` if there is one.

    One sequence more than may exceed ε that needs more than it can show settles the answer
    for all, so that a model that never forgets is found out on the pilot. What is done
    depends on sizes alone, never on the clock, unless the caller set a time budget.
    """
    groups, owners = inputs.groups, inputs.owners
    most = sum(cost * len(x) * x.shape[1] ** 2 / 2 for x in groups)
    longest = groups[-1]
    shares = MEASURES
    if most > AFFORDABLE and len(longest) > PILOT:
        shares /= 2
        few, own = longest[:PILOT], owners[-1][:PILOT]
        first = None if glance is None else glance(few, work.seconds(shares))
        pilot = merged(study(few, work.seconds(shares)) if first is None else first.study, own)
        allowed = settings.failures(sum(len(own.unique()) for own in owners))
        if pilot.needed(settings.eps).count(None) > allowed:
            return pilot if first is None else merged(first.finish(work.seconds(shares)), own)
    return pool(
        [
            merged(study(x, work.seconds(shares / len(groups))), own)
            for x, own in zip(groups, owners, strict=True)
        ]
    )


def _alone(recurrence: Recurrence) -> Stack:
    return Stack(recurrence.name, (Layer((recurrence,)),))


def _noise(
    model: Model, stack: Stack, groups: Sequence[Tensor], settings: Settings
) -> float | None:
    """Return how far float32 takes a stack's outputs from float64 on inputs [N, T, I], at most.

    None where the model computes in float64, or overflows.
    """
    if model.dtype == "float64":
        return None
    worst = 0.0
    for x in groups:
        gap = cells.run_single(stack, x).double() - cells.run_stack(stack, x)
        size = gap.abs().amax(-1) if settings.norm == "max" else gap.norm(dim=-1)
        worst = max(worst, float(size.nan_to_num(nan=math.inf).max()))
    return worst if math.isfinite(worst) else None


def _refuted_alone(
    recurrence: Recurrence,
    domain: Domain,
    x: Tensor,
    settings: Settings,
    work: _Work,
    *,
    rows: Tensor | None,
    in_the_way: Obstacles | None,
    steps: int | None,
) -> Refutation | None:
    """Search for inputs that a recurrence remembers, where the caller's inputs reach it.

    What a deeper layer reads is bounded by the layer before it, not by the caller, and a
    start that the graph computes is not known.
    """
    if recurrence.layer or recurrence.initial.source == "computed":
        return None
    chain = Chain.of([recurrence])
    read = cells.reads(recurrence, x)
    found = _refute(chain, domain, read, settings, work, rows=rows, steps=steps)
    alone = rows is None and steps is None
    return _and_held(found, chain, in_the_way if alone else None, settings)


def _and_held(
    found: Refutation | None, chain: Chain, in_the_way: Obstacles | None, settings: Settings
) -> Refutation | None:
    """Add to a search that two prefixes settle apart for ever, where they do."""
    pair = None if in_the_way is None else in_the_way.bistability
    if found is None or pair is None:
        return found
    held = pair.first.input.expand(found.horizon, -1)
    return replace(
        found, witnesses=(*found.witnesses, witness(chain, pair.prefix, held, settings.norm))
    )


def _refuted(
    each: Sequence[Examined],
    stack: Stack,
    groups: Sequence[Tensor],
    settings: Settings,
    work: _Work,
    *,
    rows: Tensor | None,
    steps: int | None,
) -> Refutation | None:
    """Search for inputs that a stack remembers, where its start is known."""
    if len(each) == 1 and stack.readout is None:
        return each[0].refutation
    if any(e.recurrence.initial.source == "computed" for e in each):
        return None
    if not stack.causal:
        return _refute_both_ways(
            stack, each[0].domain, groups[-1], settings, work, rows=rows, steps=steps
        )
    chain = Chain.of([e.recurrence for e in each], stack.readout)
    found = _refute(chain, each[0].domain, groups[-1], settings, work, rows=rows, steps=steps)
    # Else its prefix is none of this search's.
    alone = len(each) == 1 and rows is None and steps is None
    return _and_held(found, chain, each[0].obstacles if alone else None, settings)


def _rows(model: Model, stack: Stack, domain: Domain) -> Tensor | None:
    """Return the rows [V, I] that a stack can read in a domain, where its inputs are tokens."""
    rows = vocabulary(model, stack)
    if rows is None and domain.name in (ONE_HOT, ONE_HOT_DATA):
        rows = torch.eye(stack.input_size, dtype=torch.float64)
    if rows is None:
        return None
    low, high = domain.box(stack.input_size)
    inside = rows[((rows >= low) & (rows <= high)).all(-1)]
    return inside if len(inside) else None


def _refute(
    chain: Chain,
    domain: Domain,
    examples: Tensor,
    settings: Settings,
    work: _Work,
    *,
    rows: Tensor | None,
    steps: int | None,
) -> Refutation | None:
    """Search the domain for inputs that are remembered; None where that is out of reach.

    ``examples`` [N, T, I] are in the chain's own reading order; nothing but ``rows`` [V, I]
    is tried where they are given, and no sequence of more than ``steps``.
    """
    horizon, prefix = HORIZON, PREFIX
    if steps is not None:
        prefix = max(1, min(PREFIX, steps // 4))
        horizon = min(HORIZON, steps - prefix)
    seconds = work.seconds(SEARCHES)
    low, high = domain.box(chain.input_size)
    finite = bool(low.isfinite().all() and high.isfinite().all())
    if horizon < 1 or not finite or cells.multiplications(*chain.cells) > SEARCHABLE:
        return None
    return refute(
        chain,
        low,
        high,
        horizon=horizon,
        prefix=prefix,
        restarts=RESTARTS,
        steps=ASCENTS,
        seed=settings.seed,
        norm=settings.norm,
        examples=examples,
        eps=settings.eps,
        budget_s=seconds,
        rows=rows,
    )


def _refute_both_ways(
    stack: Stack,
    domain: Domain,
    examples: Tensor,
    settings: Settings,
    work: _Work,
    *,
    rows: Tensor | None,
    steps: int | None,
) -> Refutation | None:
    """Search for sequences that a stack of both directions gets wrong; None as in `_refute`."""
    seconds = work.seconds(SEARCHES)
    low, high = domain.box(stack.input_size)
    horizon = within_reach(stack, HORIZON, steps)
    if not horizon or not bool(low.isfinite().all() and high.isfinite().all()):
        return None
    return refute_both_ways(
        stack,
        low,
        high,
        horizon=horizon,
        restarts=RESTARTS,
        steps=ASCENTS,
        seed=settings.seed,
        norm=settings.norm,
        examples=examples,
        eps=settings.eps,
        budget_s=seconds,
        rows=rows,
    )


def prove_stack(stack: Stack, domain: Domain, budget: float | None, seed: int) -> StackCertificate:
    """Look for proofs of a stack whose initial states are known, for ``budget`` seconds."""
    computed = [r.label for r in stack.recurrences() if r.initial.source == "computed"]
    if computed:
        reason = NoProof(f"the graph computes the initial state of {computed[0]}")
        none = {r.label: CertificateSet((), reason) for r in stack.recurrences()}
        return StackCertificate(stack, none, reason.reason)
    return certify_stack(stack, domain, time_budget=budget, seed=seed)


def domain_of(
    model: Model, groups: Sequence[Tensor], settings: Settings, *, synthetic: bool
) -> Domain:
    """Return the inputs that proofs cover: the range given, the data's box, or |x| ≤ 1.

    Behind other operators of a graph a layer's own inputs are not the caller's, so that
    their box on the data, or on synthetic inputs, is all that is known. Of one-hot inputs it is
    the box around them, which is proved for; counterexamples are of such inputs alone.
    """
    wanted = settings.input_range if model.direct else None
    if isinstance(wanted, str):
        return Domain(0.0, 1.0, ONE_HOT)
    if wanted is not None:
        low, high = wanted
        return Domain(low, high, f"{exact(low)} ≤ x ≤ {exact(high)}")
    if model.direct and synthetic:
        return Domain()
    if model.direct and is_one_hot(groups):
        return Domain(*_box(groups), ONE_HOT_DATA)
    whose = "the data" if model.direct else "what the layer reads here"
    return Domain(*_box(groups), f"the box of {whose}")


def _inside(x: Tensor, domain: Domain) -> Tensor:
    """Return inputs [N, T, I] cut off at the domain's ends."""
    low, high = domain.box(x.shape[-1])
    return torch.minimum(torch.maximum(x, low), high)


def _spectrum(recurrence: Recurrence, x: Tensor, seed: int) -> LyapunovSpectrum:
    """Return as many Lyapunov exponents on x [N, T, I] as are cheap, at least one."""
    step = cells.multiplications(recurrence.cell) + ORTHONORMALISED * recurrence.cell.state_size
    affordable = int(SPECTRUM / (x.shape[0] * x.shape[1] * step))
    return spectrum(recurrence, x, count=min(EXPONENTS, max(1, affordable)), seed=seed)


def _spectral_norm(recurrence: Recurrence) -> float | None:
    """Return ‖W‖₂ of an Elman cell, the number that people compare."""
    cell = recurrence.cell
    if not isinstance(cell, ElmanCell):
        return None
    return float(torch.linalg.matrix_norm(cell.W, ord=2))


def _box(groups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    low = torch.stack([x.amin((0, 1)) for x in groups]).amin(0)
    high = torch.stack([x.amax((0, 1)) for x in groups]).amax(0)
    return low, high
