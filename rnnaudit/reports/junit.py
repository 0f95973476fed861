"""The report for test dashboards: JUnit XML, a suite for each model and a case for each check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from rnnaudit.reports import numbers, wording
from rnnaudit.reports.checks import checks, sentence
from rnnaudit.results import Outcome, Refusal, Report, Rule

_NO_TIME = "0"
"""Reports hold no times, so that the same run gives the same bytes."""

_NAMES = {"skipped": "nothing-skipped"}
"""Cases of rules whose own name would say of the case itself what it is not."""


class JunitRenderer:
    """JUnit XML as Jenkins, GitLab and others read it."""

    @property
    def name(self) -> str:
        """The format's name."""
        return "junit"

    def render(self, report: Report) -> str:
        """Return one report as a document of one suite."""
        return self.render_all((report,))

    def render_all(self, outcomes: Sequence[Outcome]) -> str:
        """Return a document with a suite for each model."""
        suites = [_suite(outcome) for outcome in outcomes]
        root = Xml.Element("testsuites", name="rnnaudit", time=_NO_TIME)
        for count in ("tests", "failures", "errors"):
            root.set(count, str(sum(int(suite.get(count, "0")) for suite in suites)))
        root.extend(suites)
        Xml.indent(root)
        text = Xml.tostring(root, encoding="unicode")
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _suite(outcome: Outcome) -> Xml.Element:
    path = _text(outcome.path if isinstance(outcome, Refusal) else outcome.model.path)
    suite = Xml.Element("testsuite", name=path, skipped="0", time=_NO_TIME)
    cases = [_refused(outcome)] if isinstance(outcome, Refusal) else _cases(outcome)
    for case in cases:
        case.set("classname", path)
        case.set("time", _NO_TIME)
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    suite.set("errors", str(sum(case.find("error") is not None for case in cases)))
    suite.extend(cases)
    if isinstance(outcome, Report):
        Xml.SubElement(suite, "system-out").text = _text(_said(outcome))
    return suite


def _cases(report: Report) -> list[Xml.Element]:
    rules = checks(report)
    if not rules:
        return [Xml.Element("testcase", name="audit")]
    times = Counter(rule.rule for rule in rules)
    return [_case(rule, placed=times[rule.rule] > 1) for rule in rules]


def _case(rule: Rule, *, placed: bool) -> Xml.Element:
    """Make the case of a rule, whose name stays the same whether it holds or not."""
    name = _NAMES.get(rule.rule, rule.rule)
    name = f"{name} {rule.where}" if placed else name
    case = Xml.Element("testcase", name=_text(name))
    if not rule.passed:
        got = _text(f"wanted {rule.wanted}; got {rule.got}")
        failure = Xml.SubElement(case, "failure", type=rule.id, message=got)
        failure.text = _text(sentence(rule))
    return case


def _refused(refusal: Refusal) -> Xml.Element:
    case = Xml.Element("testcase", name="audit")
    error = Xml.SubElement(case, "error", type=refusal.id, message=_text(refusal.message))
    error.text = _text(f"{refusal.message}; {refusal.help}" if refusal.help else refusal.message)
    return case


def _said(report: Report) -> str:
    found = [f"{f.id}: {f.where + ': ' if f.where else ''}{f.message}" for f in report.findings]
    return ". ".join([str(wording.verdict(report)), *found])


def _text(text: str) -> str:
    """Make a text one line of characters that XML 1.0 allows."""
    return "".join("�" if ord(c) in (0xFFFE, 0xFFFF) else c for c in numbers.clean(text))
