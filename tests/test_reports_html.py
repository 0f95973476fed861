"""The HTML report is one well-formed page that says what the records hold, and loads nothing."""

import hashlib
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from functools import cache
from html.parser import HTMLParser

import pytest

from rnnaudit.errors import UsageError
from rnnaudit.reports import HtmlRenderer, charts, html, numbers
from rnnaudit.results import (
    CurvePoint,
    Depth,
    Eigenvalues,
    GateSeries,
    LyapunovSpectrum,
    NormCurve,
    Pictures,
    Refusal,
    UnitMemory,
)
from tests import reports_by_hand as by_hand

VOID = {"meta", "br"}
LOADS = {"src", "srcset", "data", "action", "poster", "background", "xlink:href"}

GATES = (
    GateSeries("update z", (0.0, 0.1), (0.1, 0.2), (0.123456, 0.5), (0.6, 0.75), (0.9, 1.0)),
    GateSeries("reset r", (0.2, 0.2), (0.3, 0.3), (0.4, 0.4), (0.5, 0.5), (0.6, 0.6)),
)
DRAWN = replace(
    by_hand.BACH,
    norms=NormCurve((1, 2, 4, 8), (1.31, 0.6, 0.0, 7.97e-25)),
    spectrum=LyapunovSpectrum((-0.2243, -1.5, None), (0.0041, 0.02, None), 9600),
    unit_memory=UnitMemory(1e-3, {"h": (3, None, 17), "c": (2, 5, 40)}),
    curve=(
        CurvePoint(0, 0.7123, 0.9, 1.0),
        CurvePoint(1, 0.2, 0.5, 0.9),
        CurvePoint(31, 1e-4, 6e-4, 9.9e-4),
        CurvePoint(64, 0.0, 0.0, 1e-17),
    ),
    pictures=Pictures(Eigenvalues(((-1.0625, 0.0), (0.5, 0.25), (0.5, -0.25)), 1), GATES),
)
PICTURED = replace(by_hand.STABLE, recurrences=(DRAWN,))
REPORTS = {
    **by_hand.REPORTS,
    "many": replace(by_hand.MANY, recurrences=by_hand.MANY.recurrences[2:6]),
    "pictured": PICTURED,
}
REFUSAL = Refusal("models/broken.pt", "RA101", "wanted a model, got nothing", "name one")


class Page(HTMLParser):
    """Reads a page as strictly as XML: what is opened is closed, in its order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), f"{tag} repeats an attribute"
        self.elements.append((tag, dict(attributes), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, text):
        if "style" not in self.open:
            self.texts.append(text)

    def tags(self):
        return [tag for tag, _, _ in self.elements]


class Tables(HTMLParser):
    """Collects tables by caption: rows of cells, their text as it is shown."""

    def __init__(self, text):
        super().__init__()
        self.found, self.cell, self.scopes = {}, None, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self.rows, self.caption = [], ""
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td", "caption"):
            self.cell = ""
            if tag == "th":
                self.scopes.append(dict(attributes).get("scope"))

    def handle_data(self, text):
        if self.cell is not None:
            self.cell += text

    def handle_endtag(self, tag):
        if tag in ("th", "td"):
            self.rows[-1].append(self.cell)
        elif tag == "caption":
            self.caption = self.cell
        elif tag == "table":
            self.found[self.caption] = self.rows
        if tag in ("th", "td", "caption"):
            self.cell = None


@cache
def rendered(name):
    return HtmlRenderer().render(REPORTS[name])


def number(text):
    return Decimal(text.replace("−", "-"))


# --------------------------------------------------------------------------- the page


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_is_well_formed_and_every_reference_has_its_target(name):
    text = rendered(name)
    page = Page(text)
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = re.findall(r"url\(#([^)]+)\)", text)
    for _, attributes, _ in page.elements:
        wanted += attributes.get("aria-labelledby", "").split()
        wanted += [attributes["href"][1:]] if "href" in attributes else []
    assert set(wanted) <= set(ids)
    assert text.startswith("<!DOCTYPE html>")
    assert text.endswith("</html>\n")


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_loads_nothing_and_runs_nothing(name):
    text = rendered(name)
    page = Page(text)
    for tag, attributes, _ in page.elements:
        assert tag not in ("script", "link", "iframe", "object", "embed", "img", "form", "base")
        assert not LOADS & set(attributes), (tag, attributes)
        assert not any(attribute.startswith("on") for attribute in attributes)
        assert attributes.get("href", "#").startswith("#")
    assert "://" not in text
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text


@pytest.mark.parametrize("name", REPORTS)
def test_no_number_is_missing_and_no_colour_is_fixed(name):
    text = rendered(name)
    shown = "".join(Page(text).texts).replace("out.onnx gave NaN", "")  # a reason, in words
    assert not re.search(r"(?i)\b(nan|inf|infinity|none|undefined)\b", shown)
    for tag, attributes, _ in Page(text).elements:
        style = attributes.get("style", "")
        assert "#" not in style.replace("url(#", ""), (tag, style)
        assert set(re.findall(r"var\((--\w+)\)", style)) <= set(drawn_in_css(text))


def drawn_in_css(text):
    return re.findall(r"(--\w+):", text)


@pytest.mark.parametrize("name", REPORTS)
def test_every_picture_says_what_it_shows_and_has_its_numbers_beside_it(name):
    page = Page(rendered(name))
    figures = page.tags().count("figure")
    images = [a for tag, a, _ in page.elements if tag == "svg"]
    assert len(images) == figures
    assert all(image["role"] == "img" and len(image["aria-label"]) > 20 for image in images)
    parts = rendered(name).split("<figure>")[1:]
    for part in parts:
        shown = part.partition("</figure>")[0]
        assert "<figcaption><h4>" in shown
        details = shown.partition("<details")[2]
        assert details.count("<table>") == details.count("<caption>") >= 1
    tables = Tables(rendered(name))
    assert set(tables.scopes) <= {"col", "row"}
    for rows in tables.found.values():
        assert len(rows) > 1
        assert len({len(row) for row in rows}) == 1


def test_every_kind_of_picture_is_drawn_from_what_is_known():
    assert [chart.title for chart in charts.charts(PICTURED, DRAWN, "x")] == [
        "Error versus depth",
        "Growth of a perturbation over r steps",
        "Lyapunov spectrum",
        "Eigenvalues of the Jacobian",
        "Gates over time",
        "Memory of each unit",
    ]
    bare = replace(DRAWN, norms=None, spectrum=None, unit_memory=None, curve=(), pictures=None)
    assert charts.charts(PICTURED, bare, "x") == ()
    lone = replace(
        bare,
        spectrum=LyapunovSpectrum((-0.2, None), (0.1, None), 10),
        unit_memory=UnitMemory(1e-3, {"h": (None, None)}),
        norms=NormCurve((), ()),
        pictures=Pictures(None, ()),
    )
    assert charts.charts(PICTURED, lone, "x") == ()


def test_the_verdict_and_its_evidence_come_first():
    text = "".join(Page(rendered("stable")).texts)
    places = [
        text.index(words)
        for words in (
            "bach_rnn.pt",
            "STABLE (proved for every input with |x| ≤ 1): a feed-forward model of depth 53",
            "rnnaudit truncate sample_models/bach_rnn.pt --eps 1e-3",
            "77 sequences of 240 to 640 steps",
            "≤ 0.843 proved",
            "Error versus depth",
            "How this was made",
            "abababab",
        )
    ]
    assert places[1:] == sorted(places[1:])


def test_findings_and_skipped_parts_are_listed_with_their_identity():
    undecided, skipped = ("".join(Page(rendered(n)).texts) for n in ("undecided", "skipped"))
    assert "note RA205 every measured number comes from synthetic inputs" in undecided
    assert "warning RA203 lstm[0]: 32 sequences" in undecided
    assert "→ give your own sequences with --data" in undecided
    assert "skipped decoder/LSTM_3: input_forget together with a projection" in skipped


def test_settings_are_shown_as_a_user_would_write_them():
    settings = {"eps": 1e-3, "input_range": [-1.0, 0.5], "layer": None, "far": math.inf}
    text = "".join(Page(html.page([replace(REPORTS["nothing"], settings=settings)])).texts)
    assert "input_range-1:0.5" in "".join(text.split("\n"))
    assert "farnot finite" in "".join(text.split("\n"))
    assert "layer" not in text


def test_a_comparison_and_what_was_written_have_their_place():
    text = "".join(Page(rendered("truncate_fail")).texts)
    assert "FAIL: the largest error 0.0731 exceeds ε = 1e-3" in text
    assert "ε = 0.0731, the smallest" in text
    assert "lstm[0]: k = 4, chosen with --depth" in text


# -------------------------------------------------------------------------- the numbers


def rows(caption):
    return Tables(rendered("pictured")).found[caption][1:]


def test_the_tables_of_errors_hold_the_report_s_numbers_rounded_up():
    shown = rows("Largest error of a sequence at depth k: quantiles over sequences")
    assert [int(row[0]) for row in shown] == [point.k for point in DRAWN.curve]
    for row, point in zip(shown, DRAWN.curve, strict=True):
        for cell, value in zip(row[1:], (point.p50, point.p95, point.max), strict=True):
            assert Decimal(value) <= number(cell) <= Decimal(value) * Decimal("1.01")


def test_the_table_of_norms_holds_lower_bounds_rounded_down():
    shown = rows("Largest ‖Jᵣ ⋯ J₁‖₂ found")
    assert [int(row[0]) for row in shown] == list(DRAWN.norms.r)
    for (_, cell), value in zip(shown, DRAWN.norms.value, strict=True):
        assert Decimal(value) * Decimal("0.99") <= number(cell) <= Decimal(value)


def test_the_tables_of_estimates_hold_the_report_s_numbers():
    assert rows("Lyapunov exponents in nats per step") == [
        ["1", "−0.224 ± 0.005"],
        ["2", "−1.50 ± 0.02"],
        ["3", "−∞"],
    ]
    assert rows("Eigenvalues, largest modulus first") == [
        ["1.06", "−1.06", "0"],
        ["0.559", "0.500", "0.250"],
        ["0.559", "0.500", "−0.250"],
    ]
    assert rows("Gate update z: quantiles over units") == [
        ["1", "0", "0.100", "0.123", "0.600", "0.900"],
        ["2", "0.100", "0.200", "0.500", "0.750", "1.00"],
    ]
    assert rows("Depth of each unit, longest first") == [
        ["h[1]", "longer"],
        ["c[2]", "40"],
        ["h[2]", "17"],
        ["c[1]", "5"],
        ["h[0]", "3"],
        ["c[0]", "2"],
    ]


def test_the_depths_of_the_whole_and_of_each_part_are_the_report_s():
    whole = rows("Depth k for each ε, end to end")
    wanted = [
        [numbers.epsilon(d.eps), str(d.proved), str(d.measured.k), "—"]
        for d in by_hand.STABLE.table
    ]
    assert whole == wanted
    assert rows("Depth k for each ε, this recurrence's output") == wanted
    (layer,) = rows("Each on its own, k for ε = 1e-3")
    assert layer == [
        *("rnn[0]", "elman/tanh", "88→112", "forward", "stable"),
        *("0.843", "0.871", "3.1", "53", "31", "—"),
    ]


def test_an_eigenvalue_outside_the_circle_is_counted():
    chart = charts.charts(PICTURED, DRAWN, "x")[3]
    assert chart.summary == (
        "3 eigenvalues, 1 of them outside the unit circle; the largest modulus is 1.06."
    )


@pytest.mark.parametrize("eps", [5e-324, 1e-300, 1e300])
def test_extreme_epsilons_are_drawn(eps):
    far = replace(DRAWN, depths=(Depth(eps, 10**6, by_hand.measured(10**5), 10**4),))
    chart, *_ = charts.charts(replace(PICTURED, eps=eps), far, "x")
    assert f"ε is {numbers.epsilon(eps)}" in chart.summary


def marker_places(svg, colour):
    """Return the x coordinates of the markers of a colour, left to right."""
    uses = re.findall(r"<use [^>]*>", svg)
    return [float(re.search(r' x="([-\d.]+)"', u)[1]) for u in uses if f"fill: var({colour})" in u]


def test_marks_stand_in_the_order_of_their_depths():
    """On one axis a mark's place grows with its k, whatever kind of evidence it is of."""
    depths = tuple(
        replace(d, refuted_below=r)
        for d, r in zip(by_hand.BACH.depths, (1, 3, 9, 11, 13, 17), strict=True)
    )
    drawn, *_ = charts.charts(PICTURED, replace(DRAWN, depths=depths), "x")
    known = [
        *((d.proved, "--proved") for d in depths),
        *((d.measured.k, "--measured") for d in depths),
        *((d.refuted_below, "--refuted") for d in depths),
    ]
    found = []
    for colour in ("--proved", "--measured", "--refuted"):
        places = marker_places(drawn.svg, colour)
        # The legend's own mark comes last.
        found += places[:6]
        assert len(places) == 7
    pairs = sorted(zip([k for k, _ in known], found, strict=True))
    slope = (pairs[-1][1] - pairs[0][1]) / (pairs[-1][0] - pairs[0][0])
    for k, place in pairs:
        assert place == pytest.approx(pairs[0][1] + slope * (k - pairs[0][0]), abs=0.05)


# ------------------------------------------------------------------ hostile, many, same


HOSTILE = (
    '</script></style><script>alert("x")</script>\u202e<img src=x onerror=alert(1)>'
    "{{ 7 * 7 }}{% raw %}\x00\x1b[31m&lt;\"'`\ud800"
)


def hostile(report):
    """Put the hostile text wherever a file can name something."""
    recurrence = replace(
        report.recurrences[0],
        name=HOSTILE,
        initial_state=HOSTILE,
        upper=replace(report.recurrences[0].upper, method=HOSTILE, domain=HOSTILE),
        lower=replace(report.recurrences[0].lower, method=HOSTILE, witness=HOSTILE),
        cell_options={"activation": HOSTILE, HOSTILE: HOSTILE},
    )
    return replace(
        report,
        model=replace(report.model, path=HOSTILE, format=HOSTILE),
        recurrences=(recurrence,),
        findings=tuple(
            replace(f, where=HOSTILE, message=HOSTILE, help=HOSTILE)
            for f in by_hand.UNDECIDED.findings
        ),
        skipped=tuple(replace(s, where=HOSTILE, reason=HOSTILE) for s in by_hand.SKIPPED.skipped),
        domain=HOSTILE,
        data=HOSTILE,
        scope=HOSTILE,
        settings={"eps": 1e-3, HOSTILE: HOSTILE},
        tool={HOSTILE: HOSTILE},
        equivalence=replace(
            by_hand.PASS,
            reason=HOSTILE,
            reference=HOSTILE,
            where=replace(by_hand.PASS.where, input=HOSTILE, output=HOSTILE),
        ),
        export=replace(
            by_hand.TRUNCATE_PASS.export,
            path=HOSTILE,
            form=HOSTILE,
            form_reason=HOSTILE,
            latency_shape=HOSTILE,
        ),
    )


def test_names_from_a_file_stay_text():
    text = html.page([hostile(PICTURED), Refusal(HOSTILE, "RA101", HOSTILE, HOSTILE)])
    page = Page(text)
    tame = {tag for name in REPORTS for tag in Page(rendered(name)).tags()}
    assert set(page.tags()) <= tame | {"nav"}
    assert not any(a.startswith("on") or a == "src" for _, at, _ in page.elements for a in at)
    shown = "".join(page.texts)
    assert shown.count("{{ 7 * 7 }}{% raw %}") > 20
    assert '<script>alert("x")</script>' in shown
    assert not set(text) & set("\u202e\x00\x1b\ud800")
    text.encode("utf-8")


def test_several_models_share_a_page_and_a_refusal_hides_none():
    text = HtmlRenderer().render_all([REPORTS["nothing"], REFUSAL, REPORTS["verify_nothing"]])
    page = Page(text)
    assert page.tags().count("article") == 3
    assert page.tags().count("nav") == 1
    shown = "".join(page.texts)
    assert "ERROR: wanted a model, got nothing" in shown
    assert "UNDECIDED: no recurrence was audited" in shown
    assert "FAIL against ε = 1e-3: out.onnx gave NaN on the first input" in shown


def test_many_recurrences_are_folded_and_few_are_open():
    assert rendered("many").count('<details class="recurrence"') == 4
    assert not re.search(r'<details class="recurrence" id="\w+" open>', rendered("many"))
    assert re.search(r'<details class="recurrence" id="\w+" open>', rendered("stable"))


def test_the_same_report_gives_the_same_bytes_whatever_the_user_s_settings(tmp_path):
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 9\nfont.size: 30\naxes.grid: False\n")
    code = (
        "import hashlib; from tests import test_reports_html as t;"
        "print(hashlib.sha256(t.rendered('pictured').encode()).hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "MATPLOTLIBRC": str(tmp_path / "matplotlibrc"),
            "PYTHONHASHSEED": "7",
            "SOURCE_DATE_EPOCH": "1",
        },
    )
    assert run.stdout.strip() == hashlib.sha256(rendered("pictured").encode()).hexdigest()


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setattr(html, "find_spec", lambda name: None if name == "matplotlib" else name)
    with pytest.raises(UsageError, match="the HTML report needs matplotlib") as caught:
        html.page([by_hand.STABLE])
    assert caught.value.help == "pip install 'rnnaudit[report]'"


def test_what_is_neither_text_nor_a_whole_number_is_no_page():
    with pytest.raises(TypeError, match="text and whole numbers, got nan"):
        html._shown(math.nan)
