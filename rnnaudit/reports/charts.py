"""The pictures of a report, each with a sentence and the tables of what it shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rnnaudit.reports import drawing, numbers, wording
from rnnaudit.reports.drawing import MEASURED, MUTED, PROVED, REFUTED, SERIES
from rnnaudit.results import (
    CurvePoint,
    Depth,
    Eigenvalues,
    GateSeries,
    LyapunovSpectrum,
    NormCurve,
    RecurrenceReport,
    Report,
    UnitMemory,
)

if TYPE_CHECKING:  # `--help` needs no charts
    from matplotlib.axes import Axes

QUANTILES = {"max": "largest", "p95": "95 %", "p50": "median"}
"""Of the errors at one depth, over sequences."""


class Table(NamedTuple):
    """Rows of text; the first cell of each is its heading."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Chart(NamedTuple):
    """A picture: what it shows in a sentence, its drawing, and the numbers behind it."""

    title: str
    caption: str
    summary: str
    svg: str
    tables: tuple[Table, ...]


def charts(report: Report, recurrence: RecurrenceReport, prefix: str) -> tuple[Chart, ...]:
    """Draw everything that is known of a recurrence; ids in the drawings start with ``prefix``."""
    pictures = recurrence.pictures
    drawn = [
        _errors(report, recurrence) if recurrence.curve else None,
        _norms(recurrence.norms) if recurrence.norms and recurrence.norms.r else None,
        _spectrum(recurrence.spectrum) if recurrence.spectrum else None,
        _eigenvalues(pictures.eigenvalues) if pictures and pictures.eigenvalues else None,
        _gates(pictures.gates) if pictures and pictures.gates else None,
        _units(recurrence.unit_memory) if recurrence.unit_memory else None,
    ]
    shown = [chart for chart in drawn if chart is not None]
    return tuple(
        chart._replace(svg=drawing.inline(chart.svg, f"{prefix}-{i}", chart.summary))
        for i, chart in enumerate(shown)
    )


# -------------------------------------------------------------------------- each chart


def _errors(report: Report, recurrence: RecurrenceReport) -> Chart:
    curve, depths = recurrence.curve, recurrence.depths
    names = {"max": "-", "p95": "--", "p50": ":"}
    errors = [getattr(point, name) for point in curve for name in names]
    floor = depths[0].float32_noise if depths else None
    with drawing.figure() as (figure, (axes,)):
        low = drawing.decades(axes, [*errors, *(d.eps for d in depths), report.eps])
        for name, style in names.items():
            points = [(p.k, getattr(p, name)) for p in curve if getattr(p, name) > 0]
            axes.plot(*drawing.coordinates(points), style, color=SERIES, label=QUANTILES[name])
        axes.axhline(
            report.eps,
            color=MUTED,
            linestyle="-.",
            linewidth=1,
            label=f"ε = {numbers.epsilon(report.eps)}",
        )
        if floor is not None and floor >= low:
            axes.axhline(
                floor,
                color=MUTED,
                linestyle=(0, (1, 2)),
                linewidth=1,
                label=f"float32 alone {numbers.up(floor)}",
            )
        marked = _marks(axes, depths, report.eps, low)
        _depth_axis(axes, [p.k for p in curve], marked)
        axes.set(xlabel="depth k (inputs seen)", ylabel="error")
        drawing.legend(figure)
        svg = drawing.svg(figure)
    first, last = curve[0], curve[-1]
    return Chart(
        "Error versus depth",
        "How far the output is from the full model's when it sees its last k inputs only: "
        "quantiles over sequences of each one's largest error. Marks stand at the k that is "
        "known for each ε; an error of exactly 0 is not drawn."
        + (" Below the dotted line float32 alone changes more." if floor is not None else ""),
        f"The largest error over sequences is {numbers.up(first.max)} at depth {first.k} and "
        f"{numbers.up(last.max)} at depth {last.k}; ε is {numbers.epsilon(report.eps)}.",
        svg,
        (_curve_table(curve), depth_table("Depth k for each ε, this recurrence's output", depths)),
    )


def _marks(axes: Axes, depths: Sequence[Depth], eps: float, low: float) -> list[int]:
    """Mark what is known of k for each ε; return every k that was marked."""
    kinds = (
        ("proved", "s", PROVED, [(d.proved, d.eps) for d in depths]),
        (
            "measured",
            "o",
            MEASURED,
            [(d.measured.k if d.measured else None, d.eps) for d in depths],
        ),
        ("refuted below", "v", REFUTED, [(d.refuted_below, d.eps) for d in depths]),
    )
    marked = []
    for label, marker, colour, found in kinds:
        known = [(k, e) for k, e in found if k is not None]
        if not known:
            continue
        axes.plot(*drawing.coordinates(known), marker, color=colour, label=label, markersize=5)
        axes.vlines([k for k, e in known if e == eps], low, eps, color=colour, linewidth=1)
        marked += [k for k, _ in known]
    return marked


def _depth_axis(axes: Axes, measured: Sequence[int], marked: Sequence[int]) -> None:
    """Show depths on a linear axis, where errors of geometric decay are straight lines.

    Where what is proved lies far beyond what was measured the axis is logarithmic.
    """
    most = max([*measured, *marked])
    if most > 8 * max(measured):
        axes.set_xscale("symlog", linthresh=4)
        axes.set_xlim(0, most * 1.2)
        ticks = [0, *(2**i for i in range(1, most.bit_length() + 1))]
        axes.set_xticks(ticks[:: math.ceil(len(ticks) / drawing.TICKS)])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(lambda k, _: f"{k:.0f}")
    else:
        axes.set_xlim(0, most * 1.04 or 1)
        axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]


def _curve_table(curve: Sequence[CurvePoint]) -> Table:
    return Table(
        "Largest error of a sequence at depth k: quantiles over sequences",
        ("k", "median", "95 %", "largest"),
        tuple((str(p.k), *map(numbers.up, (p.p50, p.p95, p.max))) for p in curve),
    )


def depth_table(caption: str, depths: Sequence[Depth]) -> Table:
    """Return k for each ε, by kind of evidence; those that float32 cannot show are marked."""
    below = [d for d in depths if d.below_noise]
    note = f"; {wording.BLURRED} below its own error: {wording.noise(below[0])}" if below else ""
    return Table(
        caption + note,
        ("ε", "k proved", "k measured", "no k below"),
        tuple(
            (
                wording.marked(d),
                numbers.whole(d.proved),
                wording.brief(d.measured),
                numbers.whole(d.refuted_below),
            )
            for d in depths
        ),
    )


def _norms(norms: NormCurve) -> Chart:
    with drawing.figure() as (figure, (axes,)):
        drawing.decades(axes, [*norms.value, 1.0])
        points = [(r, v) for r, v in zip(norms.r, norms.value, strict=True) if v > 0]
        axes.plot(*drawing.coordinates(points), "o-", color=SERIES, markersize=4)
        axes.axhline(1, color=MUTED, linestyle="-.", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(norms.r, [str(r) for r in norms.r])
        axes.minorticks_off()
        axes.set(xlabel="steps r", ylabel="‖Jᵣ ⋯ J₁‖₂ ≥")
        svg = drawing.svg(figure)
    return Chart(
        "Growth of a perturbation over r steps",
        "The largest norm found of the product of r successive Jacobians along the sequences: "
        "lower bounds of the worst case. Below 1 a perturbation has shrunk.",
        f"From {numbers.down(norms.value[0])} over 1 step to {numbers.down(norms.value[-1])} "
        f"over {numbers.counted(norms.r[-1], 'step')}.",
        svg,
        (
            Table(
                "Largest ‖Jᵣ ⋯ J₁‖₂ found",
                ("r", "norm ≥"),
                tuple((str(r), numbers.down(v)) for r, v in zip(norms.r, norms.value, strict=True)),
            ),
        ),
    )


def _spectrum(spectrum: LyapunovSpectrum) -> Chart | None:
    every = tuple(zip(spectrum.values, spectrum.stderrs, strict=True))
    finite = [(i, v, e or 0.0) for i, (v, e) in enumerate(every, 1) if v is not None]
    if len(finite) < 2:
        return None
    with drawing.figure() as (figure, (axes,)):
        i, values, errors = zip(*finite, strict=True)
        axes.errorbar(i, values, errors, fmt="o", color=SERIES, markersize=4, capsize=3)
        axes.axhline(0, color=MUTED, linestyle="-.", linewidth=1)
        axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
        axes.yaxis.set_major_formatter(lambda v, _: numbers.minus(f"{v:g}"))
        axes.set(xlabel="exponent i", ylabel="Λᵢ (nats per step)")
        svg = drawing.svg(figure)
    return Chart(
        "Lyapunov spectrum",
        f"Mean growth rates of perturbations along the sequences over {spectrum.steps} steps, "
        "with standard errors. Below 0 everything is forgotten on these sequences.",
        f"{len(finite)} exponents from {_estimate(finite[0][1])} down to "
        f"{_estimate(finite[-1][1])} nats per step.",
        svg,
        (
            Table(
                "Lyapunov exponents in nats per step",
                ("i", "Λᵢ"),
                tuple(
                    (str(i), "−∞" if v is None else numbers.estimate(v, e or 0.0))
                    for i, (v, e) in enumerate(every, 1)
                ),
            ),
        ),
    )


def _eigenvalues(found: Eigenvalues) -> Chart:
    radii = [math.hypot(*value) for value in found.values]
    outside = sum(radius > 1 for radius in radii)
    with drawing.figure() as (figure, (axes,)):
        turn = [2 * math.pi * i / 96 for i in range(97)]
        circle = [math.cos(a) for a in turn], [math.sin(a) for a in turn]
        axes.plot(*circle, color=MUTED, linewidth=1, label="|λ| = 1")
        axes.plot(
            *drawing.coordinates(found.values),
            "o",
            color=SERIES,
            markersize=3,
            alpha=0.6,
            label="eigenvalues",
        )
        axes.set_aspect("equal", adjustable="datalim")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda v, _: numbers.minus(f"{v:g}"))
        axes.set(xlabel="real part", ylabel="imaginary part")
        drawing.legend(figure)
        svg = drawing.svg(figure)
    return Chart(
        "Eigenvalues of the Jacobian",
        f"Of ∂s′/∂s at {numbers.counted(found.states, 'state')} that the sequences reach. Inside "
        "the unit circle a step shrinks what it repeats; one step says nothing of many.",
        f"{len(radii)} eigenvalues, {outside} of them outside the unit circle; the largest "
        f"modulus is {numbers.near(radii[0])}.",
        svg,
        (
            Table(
                "Eigenvalues, largest modulus first",
                ("modulus", "real part", "imaginary part"),
                tuple(
                    (numbers.near(radius), _estimate(real), _estimate(imaginary))
                    for radius, (real, imaginary) in zip(radii, found.values, strict=True)
                ),
            ),
        ),
    )


def _gates(gates: Sequence[GateSeries]) -> Chart:
    steps = range(1, len(gates[0].p50) + 1)
    with drawing.figure(len(gates)) as (figure, every):
        for axes, gate in zip(every, gates, strict=True):
            axes.fill_between(
                steps, gate.p5, gate.p95, color=SERIES, alpha=0.18, linewidth=0, label="5–95 %"
            )
            axes.fill_between(
                steps, gate.p25, gate.p75, color=SERIES, alpha=0.35, linewidth=0, label="25–75 %"
            )
            axes.plot(steps, gate.p50, color=SERIES, label="median")
            axes.set(ylim=(-0.02, 1.02), yticks=(0, 0.5, 1), ylabel=gate.name)
            axes.set_yticklabels(["0", "½", "1"])
            axes.set_xlim(1, max(2, len(steps)))
        every[-1].set_xlabel("step")
        drawing.legend(figure, every[0])
        svg = drawing.svg(figure)
    medians = [
        f"{gate.name} {numbers.near(sorted(gate.p50)[len(gate.p50) // 2], 2)}" for gate in gates
    ]
    return Chart(
        "Gates over time",
        "What each gate lets through along one sequence: quantiles over its units. 1 is open, "
        "0 is shut.",
        f"Over {numbers.counted(len(steps), 'step')} the middle unit is typically at "
        f"{', '.join(medians)}.",
        svg,
        tuple(
            Table(
                f"Gate {gate.name}: quantiles over units",
                ("step", "5 %", "25 %", "median", "75 %", "95 %"),
                tuple(
                    (str(t), *map(_estimate, levels))
                    for t, *levels in zip(
                        steps, gate.p5, gate.p25, gate.p50, gate.p75, gate.p95, strict=True
                    )
                ),
            )
            for gate in gates
        ),
    )


def _units(memory: UnitMemory) -> Chart | None:
    known = {
        part: sorted((k for k in ks if k is not None), reverse=True)
        for part, ks in memory.units.items()
    }
    total = sum(map(len, memory.units.values()))
    longer = total - sum(map(len, known.values()))
    if not any(known.values()):
        return None
    with drawing.figure() as (figure, (axes,)):
        for (part, depths), style in zip(known.items(), ("-", "--"), strict=False):
            # Units beyond the data come first and have no height.
            first = len(memory.units[part]) - len(depths)
            ranks = range(first + 1, first + len(depths) + 1)
            axes.plot(ranks, depths, f"{style}.", color=SERIES, markersize=3, label=part)
        axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
        axes.set(xlabel="units, longest memory first", ylabel=f"k({numbers.epsilon(memory.eps)})")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        drawing.legend(figure)
        svg = drawing.svg(figure)
    beyond = f"; {longer} remember longer than the data show" if longer else ""
    return Chart(
        "Memory of each unit",
        f"The depth at which a unit of the state itself keeps ε = {numbers.epsilon(memory.eps)} "
        "on the sequences: where the memory sits.",
        f"{total} units{beyond}; the deepest known is {max(max(d) for d in known.values() if d)}.",
        svg,
        (
            Table(
                "Depth of each unit, longest first",
                ("unit", "k"),
                tuple(
                    (name, "longer" if k is None else str(k)) for name, k in memory.longest(total)
                ),
            ),
        ),
    )


def _estimate(value: float) -> str:
    return numbers.minus(numbers.near(value))
