"""Which depth for which recurrence: plans in the order in which they deserve to be tried.

A proof is taken where one gives a depth within the limit. A measured depth is taken at ε/2,
so that inputs a little worse than those measured still keep ε; plans that follow are deeper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, dropwhile, islice

from rnnaudit import cells
from rnnaudit.budget import Depths, Needed, Unit, divide
from rnnaudit.certificates.stack import StackCertificate
from rnnaudit.errors import UnsupportedModelError
from rnnaudit.examine import Examination, ExaminedStack
from rnnaudit.model import Recurrence
from rnnaudit.reports.numbers import epsilon, up
from rnnaudit.results import Evidence, Skipped
from rnnaudit.truncation import Plan, plan

MARGIN = 2.0
"""A measured depth keeps ε / MARGIN on the sequences that it was measured on."""

TRIES = 5
"""How many plans are tried before a truncation is given up."""

_LADDER = tuple(4.0 * 2.0**-i for i in range(16))
"""Tolerances of single recurrences, in units of ε / MARGIN, largest first."""

Measure = Callable[[Depths], float]
"""The largest error of a model's outputs when recurrences are cut to given depths."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a truncation must keep: ε, the largest depth, and the evidence that counts.

    Only recurrences whose label contains ``layer`` are cut; all where it is empty.
    ``obstacles`` says by label why a recurrence cannot be cut.
    """

    eps: float
    max_depth: int
    evidence: Evidence | None = None
    layer: str = ""
    obstacles: Mapping[str, str] = field(default_factory=dict)

    def cut(self, stack: ExaminedStack) -> list[Recurrence]:
        """Return the recurrences of a stack that are to be cut: whole layers."""
        return [
            recurrence
            for layer in stack.stack.layers
            if any(self.layer in r.label for r in layer.recurrences)
            and not any(r.label in self.obstacles for r in layer.recurrences)
            for recurrence in layer.recurrences
        ]

    def stays(self, stack: ExaminedStack) -> list[Skipped]:
        """Return the recurrences of a stack that cannot be cut, with the reason."""
        labels = [r.label for r in stack.stack.recurrences() if self.layer in r.label]
        return [Skipped(n, self.obstacles[n]) for n in labels if n in self.obstacles]


def plans(
    found: Examination, wanted: Wanted, measure: Measure | None = None
) -> tuple[Iterator[Plan], tuple[Skipped, ...]]:
    """Return plans, shallowest first, and the recurrences that stay, with the reason.

    Args:
        found: What was examined.
        wanted: What the plans must keep.
        measure: The largest error of a graph's own outputs when recurrences are cut to given
            depths, for graphs that our reading does not cover from input to output.

    Raises:
        UnsupportedModelError: No stack has a depth on the evidence that is wanted.
    """
    ladders: list[Iterator[Depths]] = []
    evidence: dict[str, Evidence] = {}
    kept: list[Skipped] = []
    parts: list[tuple[ExaminedStack, Wanted]] = []
    for stack in found.stacks:
        kept += wanted.stays(stack)
        if not wanted.cut(stack):
            continue
        if rounded := _rounded(stack, wanted):
            kept.append(Skipped(stack.stack.name, rounded))
            continue
        proved = _proved(found, stack, wanted)
        if proved is not None:
            ladders.append(iter([proved]))
            evidence |= dict.fromkeys(proved, "proved")
            continue
        within = replace(wanted, obstacles={**wanted.obstacles, **_why_not(found, stack, wanted)})
        kept += [each for each in within.stays(stack) if each not in kept]
        if cut := within.cut(stack):
            parts.append((stack, within))
            kind: Evidence = "synthetic" if stack.synthetic else "measured"
            evidence |= {r.label: kind for r in cut}
    joint = measure is not None and not found.model.direct
    for group in [parts] if joint and parts else [[part] for part in parts]:
        search = _Search.of(found, group, measure)
        rungs = search.ladder()
        first = next(rungs, None)
        while first is None and search.units and joint:
            search, lost = search.without_the_worst()
            kept += lost
            rungs = search.ladder()
            first = next(rungs, None)
        if first is not None:
            ladders.append(chain([first], rungs))
        elif not joint:
            reason = f"no depth of at most {wanted.max_depth} keeps ε / {epsilon(MARGIN)}"
            kept.append(Skipped(group[0][0].stack.name, reason))
    if not ladders:
        raise UnsupportedModelError(
            f"a depth of at most {wanted.max_depth} was wanted for ε = {epsilon(wanted.eps)}, "
            f"got none: {_told(kept)}",
            help="raise --eps or --max-depth, give --data, or choose with --depth",
            id="RA302",
        )
    return _joined(found, ladders, evidence), tuple(kept)


def _told(kept: Sequence[Skipped]) -> str:
    """Say each reason once, with what it is true of."""
    places: dict[str, list[str]] = {}
    for each in kept:
        places.setdefault(each.reason, []).append(each.where)
    return "; ".join(f"{', '.join(where)}: {reason}" for reason, where in places.items())


def chosen(found: Examination, depth: int, wanted: Wanted) -> Plan:
    """Cut recurrences to the depth that the user chose.

    Raises:
        UnsupportedModelError: One of them is quantised, or none can be cut in its graph.
    """
    for stack in found.stacks:
        if rounded := _rounded(stack, wanted):
            raise UnsupportedModelError(
                f"a stack that a cut one can equal was wanted, got {stack.stack.name}: {rounded}",
                help="truncate the model as it was before quantisation, or leave the layer out "
                "with --layer",
            )
    labels = [r.label for stack in found.stacks for r in wanted.cut(stack)]
    if not labels:
        where, reason = next(iter(wanted.obstacles.items()))
        raise UnsupportedModelError(
            f"a recurrence that can be cut was wanted, got {where}: {reason}", id="RA302"
        )
    return plan(found.model, dict.fromkeys(labels, depth), dict.fromkeys(labels, "chosen"))


def _rounded(stack: ExaminedStack, wanted: Wanted) -> str:
    """Say why nothing is equivalent to a quantised stack; empty where something may be."""
    reasons = (f"{r.label}: {r.rounded}" for r in wanted.cut(stack) if r.rounded)
    return next(reasons, "")


def _joined(
    found: Examination, ladders: Sequence[Iterator[Depths]], evidence: Mapping[str, Evidence]
) -> Iterator[Plan]:
    """Take the next rung of every ladder; one that has ended stays where it is."""
    depths: dict[str, int] = {}
    while True:
        rungs = [rung for ladder in ladders if (rung := next(ladder, None)) is not None]
        if not rungs:
            return
        for rung in rungs:
            depths.update(rung)
        yield plan(found.model, depths, evidence)


def _proved(found: Examination, stack: ExaminedStack, wanted: Wanted) -> Depths | None:
    """Return depths that are proved to keep ε when each layer is truncated on its own.

    Behind other operators of a graph a proof speaks of the recurrence's own output under
    inputs that nobody bounds, so that it says nothing of the graph's outputs; and it is one of
    the start that the audit knows.
    """
    if not found.model.direct or wanted.evidence == "measured" or _starts_elsewhere(found):
        return None
    # A recurrence that is not cut adds no error of its own.
    cut = frozenset(r.label for r in wanted.cut(stack))
    return _divided_proof(stack.certificate, wanted.eps, cut, wanted.max_depth)


def _starts_elsewhere(found: Examination) -> bool:
    """Whether the model may start a recurrence from a state that no file or call told."""
    return any(f.id == "RA123" for f in (*found.model.findings, *found.seen.findings))


@lru_cache(maxsize=64)
def _divided_proof(
    certificate: StackCertificate, eps: float, cut: frozenset[str], max_depth: int
) -> Depths | None:
    """Return the depths with the smallest sum that a stack's proofs give; a depth is 1 or more."""
    depths = certificate.layerwise(eps, only=cut, most=max_depth)
    return None if depths is None else {label: max(1, k) for label, k in depths.items()}


def _why_not(found: Examination, stack: ExaminedStack, wanted: Wanted) -> Mapping[str, str]:
    """Say by label why no measured depth of a recurrence will do; its layer then stays."""
    source = "synthetic inputs" if stack.synthetic else "the data"
    search = stack.refutation
    guessed = found.seen.guessed[found.stacks.index(stack)]
    if guessed and search is not None and search.never_forgets(wanted.eps):
        reason = (
            f"it never forgets some inputs (a witness shows more than {search.horizon} steps), and "
            "no data show what the graph gives it"
        )
        return {recurrence.label: reason for recurrence in wanted.cut(stack)}
    rows = usable(found, stack, wanted.eps / MARGIN)
    unproved = f"no proof of a depth of at most {wanted.max_depth}"
    if _starts_elsewhere(found):
        unproved = "its proofs are of a start from zero, and the model may start elsewhere (RA123)"
    reasons = {}
    for recurrence in wanted.cut(stack):
        label, study = recurrence.label, found.recurrences[recurrence.label].study
        k = _needed(found, label, wanted.eps / MARGIN, rows)
        if wanted.evidence == "proved":
            reasons[label] = unproved
        elif k is None and wanted.eps / MARGIN < study.resolution:
            reasons[label] = (
                f"ε / {epsilon(MARGIN)} is below what float64 tells of it on {source}, "
                f"about {up(study.resolution, 1)}"
            )
        elif k is None:
            shown = max(study.lengths) // 2
            reasons[label] = f"it remembers longer than {source} show ({shown} steps)"
        elif k > wanted.max_depth:
            reasons[label] = f"it needs {k} steps on {source}"
    return reasons


def usable(found: Examination, stack: ExaminedStack, eps: float) -> tuple[int, ...]:
    """Return the sequences that a depth for ε may rest on: all, or whole kinds of them.

    On synthetic inputs a kind that some recurrence remembers longer than the sequences
    show is left out, so that a model which forgets what is random, and holds what is
    constant, can still be truncated for the former; `left_out` names the kinds. Of the rest
    as many as ``exceed`` allows are set aside: those that need most.
    """
    out = left_out(found, stack, eps)
    count = len(found.recurrences[next(stack.stack.recurrences()).label].study.lengths)
    rows = [n for n in range(count) if not stack.kinds or stack.kinds[n] not in out]
    needed = dict(enumerate(stack.study.needed(eps)))
    least_first = sorted(rows, key=lambda n: math.inf if (k := needed.get(n, 0)) is None else k)
    return tuple(sorted(least_first[: len(rows) - found.settings.failures(len(rows))]))


def set_aside(found: Examination, wanted: Wanted, *, synthetic: bool = False) -> tuple[int, ...]:
    """Return the places, in the data or among synthetic inputs, that no depth has to serve."""
    places: set[int] = set()
    for i, stack in enumerate(found.stacks):
        if stack.synthetic == synthetic and _proved(found, stack, wanted) is None:
            kept = usable(found, stack, wanted.eps / MARGIN)
            places |= {at for n, at in enumerate(found.seen.sources[i]) if n not in kept}
    return tuple(sorted(places))


def left_out(found: Examination, stack: ExaminedStack, eps: float) -> tuple[str, ...]:
    """Return the kinds of synthetic inputs that some recurrence of a stack remembers too long."""
    out = {
        stack.kinds[n]
        for recurrence in stack.stack.recurrences()
        for n, k in enumerate(found.recurrences[recurrence.label].study.needed(eps))
        if k is None and stack.kinds
    }
    # Where no kind is forgotten none is left out: the answer is then that there is no depth.
    return (
        () if out == set(stack.kinds) else tuple(k for k in dict.fromkeys(stack.kinds) if k in out)
    )


def _needed(found: Examination, label: str, eps: float, rows: Sequence[int]) -> int | None:
    depths = found.recurrences[label].study.needed(eps)
    known = [depths[n] for n in rows if n < len(depths)]
    return max((k for k in known if k is not None), default=None) if None not in known else None


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """A search for depths of layers that share an ε: those of a stack, or of a whole graph.

    Attributes:
        units: The layers.
        needed: The depths of a layer for a tolerance of its own outputs.
        moved: How far a layer's own outputs move at given depths.
        target: The error of the model's outputs that the depths must keep where it is measured.
        error: Measures it; None where it cannot be.
        own: Whether ``error`` is that of the stack in our own reading, not of a graph.
    """

    units: tuple[Unit, ...]
    needed: Needed
    moved: Measure
    target: float
    error: Measure | None
    own: bool

    @classmethod
    def of(
        cls,
        found: Examination,
        parts: Sequence[tuple[ExaminedStack, Wanted]],
        measure: Measure | None,
    ) -> _Search:
        """Prepare the search for the layers of these stacks that are to be cut."""
        target = parts[0][1].eps / MARGIN
        rows: dict[str, Sequence[int]] = {}
        units = []
        for stack, wanted in parts:
            cut = {r.label for r in wanted.cut(stack)}
            rows |= dict.fromkeys(cut, usable(found, stack, target))
            layers = (tuple(r.label for r in layer.recurrences) for layer in stack.stack.layers)
            units += [unit for unit in layers if cut.issuperset(unit)]

        def needed(unit: Unit, eps: float) -> Depths | None:
            depths = {}
            for label in unit:
                k = _needed(found, label, eps, rows[label])
                if k is None or k > parts[0][1].max_depth:
                    return None
                depths[label] = max(1, k)
            return depths

        def moved(depths: Depths) -> float:
            studies = {label: found.recurrences[label].study for label in depths}
            return max(studies[n].error_of(k, rows[n]) for n, k in depths.items())

        def error(depths: Depths) -> float:
            return _error(found, parts[0][0], depths, rows[units[0][0]])

        own = found.model.direct
        return cls(tuple(units), needed, moved, target, error if own else measure, own)

    def ladder(self) -> Iterator[Depths]:
        """Give depths that keep the target, ever deeper ones.

        Layers share one tolerance, or each has its own, whichever gives the smaller sum of
        depths. The only layer of a graph is tried first as its own outputs demand.
        """
        shared = dict.fromkeys(self.units, self.target)
        if self.error is None or (not self.own and len(self.units) == 1):
            first = next(self._rungs(shared, 1.0), None)
            if first is not None:
                yield first
        if self.error is None:
            yield from islice(self._rungs(shared, 1.0), 1, None)
            return
        passing = self._passing(shared)
        best = next(passing, None)
        if len(self.units) > 1 and (divided := self._divided()) is not None:
            others = self._passing(divided)
            other = next(others, None)
            if other is not None and (best is None or _sum(other) < _sum(best)):
                best, passing = other, others
        if best is not None:
            yield best
            yield from passing

    def without_the_worst(self) -> tuple[_Search, list[Skipped]]:
        """Leave out the layers that break ε on their own, or else the one that errs most."""
        assert self.error is not None
        alone = {unit: self._deepest(unit) for unit in self.units}
        errors = {unit: self.error(depths) for unit, depths in alone.items()}
        most = max(errors.values())
        lost = [u for u, e in errors.items() if e > self.target] or [
            u for u, e in errors.items() if e == most
        ][:1]
        kept = [
            Skipped(
                label,
                f"cut alone to {alone[unit][label]} steps, the most that is known of it, it moves "
                f"the model's outputs by {up(errors[unit])}",
            )
            for unit in lost
            for label in unit
        ]
        return replace(self, units=tuple(u for u in self.units if u not in lost)), kept

    def _deepest(self, unit: Unit) -> Depths:
        """Return the depths of the smallest tolerance that is known of one layer."""
        *_, last = replace(self, units=(unit,))._rungs({unit: self.target}, 1.0)
        return last

    def _rungs(self, tolerances: Mapping[Unit, float], first: float) -> Iterator[Depths]:
        """Give the depths of tolerances that shrink together, from ``first`` times their size."""
        last: Depths | None = None
        for factor in _LADDER:
            if factor > first:
                continue
            parts = [self.needed(unit, factor * tolerances[unit]) for unit in self.units]
            depths = {label: k for part in parts if part is not None for label, k in part.items()}
            if None in parts or not parts:
                return
            if depths != last:
                yield depths
            last = depths

    def _passing(self, tolerances: Mapping[Unit, float]) -> Iterator[Depths]:
        assert self.error is not None
        error = self.error
        rungs = self._rungs(tolerances, _LADDER[0] if self.own else 1.0)
        return dropwhile(lambda depths: error(depths) > self.target, rungs)

    def _divided(self) -> Mapping[Unit, float] | None:
        """Divide the target between layers by what each does to the outputs when cut alone."""
        assert self.error is not None
        gains = {}
        for unit in self.units:
            depths = self.needed(unit, self.target)
            if depths is None:
                return None
            gains[unit] = self.error(depths) / (self.moved(depths) or self.target)
        return divide(gains, self.needed, self.target)


def _sum(depths: Depths) -> int:
    return sum(depths.values())


def _error(found: Examination, stack: ExaminedStack, depths: Depths, rows: Sequence[int]) -> float:
    """Return the largest error of the stack's output on the sequences measured, in float64."""
    groups = found.seen.stacks[found.stacks.index(stack)]
    worst, first = 0.0, 0
    for group in groups:
        x = group[[n - first for n in rows if first <= n < first + len(group)]]
        first += len(group)
        if len(x):
            gap = cells.run_stack(stack.stack, x, depths) - cells.run_stack(stack.stack, x)
            size = gap.norm(dim=-1) if found.settings.norm == "2" else gap.abs()
            worst = max(worst, float(size.max()))
    return worst
