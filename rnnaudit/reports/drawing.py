"""How a chart is drawn: matplotlib's SVG made part of a page.

Colours are CSS variables and text is text, so that the page sets both for light and dark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from rnnaudit.reports import numbers

if TYPE_CHECKING:  # `--help` needs no charts
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, SERIES = "#000001", "#000002", "#000003", "#000004"
PROVED, MEASURED, REFUTED = "#000005", "#000006", "#000007"
COLOURS = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    SERIES: "--series",
    PROVED: "--proved",
    MEASURED: "--measured",
    REFUTED: "--refuted",
}
"""What stands for a colour while matplotlib draws, and the CSS variable that takes its place."""

SIZE = 4.4, 3.2  # inches: text keeps 10 pixels on a page of 360
MOST_DECADES = 24
LIMIT = 280  # powers of ten beyond which float64 leaves no room for an axis
TICKS = 6


@contextmanager
def figure(rows: int = 1) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """Give a figure and its axes, one below another, in a style that no user setting changes."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {k: v for k, v in matplotlib.rcParamsDefault.items() if "backend" not in k}
    style |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "rnnaudit",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "xtick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.color": MUTED,
        "ytick.labelcolor": INK,
        "axes.grid": True,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(style):
        drawn = Figure(figsize=SIZE, layout="constrained")
        yield drawn, drawn.subplots(rows, sharex=True, squeeze=False)[:, 0].tolist()


def legend(figure: Figure, axes: Axes | None = None) -> None:
    """Name what is drawn, below the axes (the first, unless others are given)."""
    handles, labels = (axes or figure.axes[0]).get_legend_handles_labels()
    columns = 4 if len(labels) == 4 else 3
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=1.8)


def decades(axes: Axes, values: Sequence[float]) -> float:
    """Make the vertical axis logarithmic, with its top at a power of ten; return its low end."""
    positive = [math.log10(v) for v in values if 0 < v < math.inf]
    top = max(-LIMIT, min(math.ceil(max(positive)), LIMIT))
    bottom = max(math.floor(min(positive) - 0.2), top - MOST_DECADES)
    every = math.ceil((top - bottom) / TICKS)
    axes.set_yscale("log")
    axes.set_ylim(10.0**bottom, 10.0**top)
    axes.set_yticks([10.0**i for i in range(top, bottom - 1, -every)])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda v, _: numbers.epsilon(float(f"{v:.0e}")))
    return 10.0**bottom


def coordinates(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the x and the y of points."""
    return [x for x, _ in points], [y for _, y in points]


def svg(figure: Figure) -> str:
    """Return matplotlib's drawing: the same bytes for the same data."""
    out = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return out.getvalue()


_COLOUR = re.compile("|".join(COLOURS))
_FONT = re.compile(r"font-family:[^;]*;? ?")
_DIGITS = re.compile(r"(\.\d\d)\d+")
_HREF = "{http://www.w3.org/1999/xlink}href"


def inline(svg: str, prefix: str, summary: str) -> str:
    """Make matplotlib's drawing part of a page: its fonts, its colours, ids of its own."""
    root = ElementTree.fromstring(svg)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.tail = None
        element.text = element.text if element.text and element.text.strip() else None
        own = element.attrib.pop("id", None)
        if own in used:
            element.set("id", f"{prefix}-{own}")
        link = element.attrib.pop(_HREF, None)
        if link is not None:
            element.set("href", f"#{prefix}-{link[1:]}")
        for name, value in element.attrib.items():
            if name == "style":
                element.set(name, _COLOUR.sub(_variable, _FONT.sub("", value)))
            elif name in ("d", "x", "y", "transform"):
                element.set(name, " ".join(_DIGITS.sub(r"\1", value).split()))
            elif name == "clip-path":
                element.set(name, value.replace("url(#", f"url(#{prefix}-"))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", summary)
    return ElementTree.tostring(root, encoding="unicode")


def _variable(colour: re.Match[str]) -> str:
    return f"var({COLOURS[colour.group()]})"
