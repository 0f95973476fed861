"""The report for code scanning: SARIF 2.1.0, a result for each finding and each failed rule."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from rnnaudit.findings import known, page
from rnnaudit.reports import numbers, wording
from rnnaudit.reports.checks import checks, sentence
from rnnaudit.results import Finding, Outcome, Refusal, Report, Rule, Severity
from rnnaudit.versions import versions

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

_ROOT = "%SRCROOT%"


class SarifRenderer:
    """One run, whose artifacts are the models; a finding that is allowed is suppressed."""

    @property
    def name(self) -> str:
        """The format's name."""
        return "sarif"

    def render(self, report: Report) -> str:
        """Return one report as a log."""
        return self.render_all((report,))

    def render_all(self, outcomes: Sequence[Outcome]) -> str:
        """Return a log of one run over all models."""
        artifacts: list[dict[str, Any]] = []
        results: list[_Result] = []
        for outcome in outcomes:
            artifact = _artifact(outcome)
            artifacts += [artifact] if artifact not in artifacts else []
            results += _results(outcome, artifacts.index(artifact))
        ids = sorted({result.id for result in results})
        seen: Counter[str] = Counter()
        log = {
            "$schema": SCHEMA,
            "version": "2.1.0",
            "runs": [
                {
                    "tool": {
                        "driver": {
                            "name": "rnnaudit",
                            "version": versions()["version"],
                            "rules": [_rule(id_) for id_ in ids],
                        }
                    },
                    "invocations": [_invocation(outcomes)],
                    "artifacts": artifacts,
                    "results": [_result(result, ids, seen) for result in results],
                    "columnKind": "unicodeCodePoints",
                }
            ],
        }
        return json.dumps(log, indent=2, allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True)
class _Result:
    """One result: which rule, of which model, and whether somebody accepted it."""

    id: str
    level: Severity
    message: str
    where: str
    path: str
    artifact: int
    accepted: str = ""


def _results(outcome: Outcome, index: int) -> Iterator[_Result]:
    if isinstance(outcome, Refusal):
        text = f"{outcome.message}; {outcome.help}" if outcome.help else outcome.message
        yield _Result(outcome.id, "error", numbers.clean(text), "", outcome.path, index)
        return
    path, rules = outcome.model.path, checks(outcome)
    allowed = {r.id: r.got for r in rules if r.passed and r.id and _of_finding(r)}
    failed = {r.id for r in rules if not r.passed}
    for finding in outcome.findings:
        level: Severity = "error" if finding.id in failed else finding.severity
        yield _Result(
            finding.id,
            level,
            _told(finding),
            finding.where,
            path,
            index,
            allowed.get(finding.id, ""),
        )
    told = {finding.id for finding in outcome.findings}
    for rule in rules:
        if not rule.passed and rule.id not in told:
            yield _Result(rule.id, "error", sentence(rule), rule.where, path, index)


def _of_finding(rule: Rule) -> bool:
    return rule.rule.startswith("finding ")


def _told(finding: Finding) -> str:
    where = f"{finding.where}: " if finding.where else ""
    return numbers.clean(f"{where}{finding.message}; {finding.help}")


def _result(result: _Result, ids: Sequence[str], seen: Counter[str]) -> dict[str, Any]:
    identity = f"{result.id}\n{result.path}\n{result.where}"
    seen[identity] += 1
    digest = hashlib.sha256(f"{identity}\n{seen[identity]}".encode("utf-8", "surrogatepass"))
    found: dict[str, Any] = {
        "ruleId": result.id,
        "ruleIndex": ids.index(result.id),
        "level": result.level,
        "message": {"text": result.message},
        "locations": [_location(result)],
        "partialFingerprints": {"rnnaudit/v1": digest.hexdigest()[:32]},
    }
    if result.accepted:
        found["suppressions"] = [
            {
                "kind": "external",
                "status": "accepted",
                "justification": numbers.clean(result.accepted),
            }
        ]
    return found


def _location(result: _Result) -> dict[str, Any]:
    found: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": {**_uri(result.path), "index": result.artifact},
            "region": {"startLine": 1},  # code scanning shows no result without a line
        }
    }
    if result.where:
        name = numbers.clean(result.where)
        found["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "member"}]
    return found


def _uri(path: str) -> dict[str, str]:
    """Name a file relative to the working folder; where it lies elsewhere, by an absolute URI."""
    plain = PurePath(path)
    text = quote(plain.as_posix().encode("utf-8", "surrogatepass"))
    if plain.is_absolute():
        return {"uri": f"file://{text if text.startswith('/') else '/' + text}"}
    return {"uri": text, "uriBaseId": _ROOT}


def _artifact(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Refusal):
        return {"location": _uri(outcome.path), "properties": {"state": "error"}}
    return {
        "location": _uri(outcome.model.path),
        "hashes": {"sha-256": outcome.model.sha256},
        "properties": {
            "state": wording.state(outcome),
            "verdict": outcome.verdict,
            "explanation": str(wording.verdict(outcome)),
        },
    }


def _invocation(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    notes = [
        {"level": "warning", "message": {"text": numbers.clean(f"{path}: {where}: {reason}")}}
        for outcome in outcomes
        if isinstance(outcome, Report)
        for path, where, reason in (
            (outcome.model.path, part.where, f"skipped: {part.reason}") for part in outcome.skipped
        )
    ]
    return {
        "executionSuccessful": not any(isinstance(o, Refusal) for o in outcomes),
        "toolExecutionNotifications": notes,
    }


def _rule(id_: str) -> Mapping[str, Any]:
    what = known(id_)
    return {
        "id": id_,
        "shortDescription": {"text": what.title},
        "fullDescription": {"text": f"{what.title}. {what.help[:1].upper()}{what.help[1:]}."},
        # The whole page, since viewers can open a helpUri only where it leads to the web.
        "help": {
            "text": f"{what.title}: {what.help}; rnnaudit explain {id_} says more",
            "markdown": page(id_),
        },
        "defaultConfiguration": {"level": what.severity},
    }
