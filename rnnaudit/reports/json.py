"""The report for programs: JSON that validates against the ``schema.json`` beside this file.

Numbers that do not exist are null. Text is ASCII with escapes, so that the bytes do not
depend on the terminal's encoding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from rnnaudit.errors import RnnauditError
from rnnaudit.reports import wording
from rnnaudit.results import (
    Depth,
    Export,
    Gate,
    MeasuredDepth,
    Outcome,
    RecurrenceReport,
    Refusal,
    Replay,
    Report,
)
from rnnaudit.versions import versions

SCHEMA = "rnnaudit.report/1"
GATE_SCHEMA = "rnnaudit.gate/1"


class JsonRenderer:
    """One JSON object for each report, two spaces deep."""

    @property
    def name(self) -> str:
        """The format's name."""
        return "json"

    def render(self, report: Report) -> str:
        """Return the report as JSON text."""
        return _dump(as_dict(report))

    def render_all(self, outcomes: Sequence[Outcome]) -> str:
        """Return one JSON document with a report, or a refusal, for each model."""
        states = [wording.state(outcome) for outcome in outcomes]
        return _dump(
            {
                "schema": GATE_SCHEMA,
                "tool": versions(),
                "passed": all(state == "pass" for state in states),
                "models": len(states),
                "failed": states.count("fail"),
                "refused": states.count("error"),
                "reports": [
                    _refused(o) if isinstance(o, Refusal) else as_dict(o) for o in outcomes
                ],
            }
        )


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report as plain lists, dicts, strings and finite numbers."""
    depth = report.depth
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "tool": {**versions(), **report.tool},
        "model": asdict(report.model),
        "settings": dict(report.settings),
        "verdict": report.verdict,
        "scope": report.scope,
        "data": report.data,
        "recurrences": [_recurrence(r, report.eps) for r in report.recurrences],
        "depth": {
            **_depth(depth),
            "norm": report.norm,
            "table": [_depth(d) for d in report.table],
            "domain": report.domain,
        },
        "skipped": [asdict(s) for s in report.skipped],
        "findings": [asdict(f) for f in report.findings],
    }
    if report.equivalence is not None:
        found["equivalence"] = asdict(report.equivalence)
    if report.replay is not None:
        found["replay"] = _replay(report.replay)
    if report.export is not None:
        found["export"] = _export(report.export)
    if report.proof_file is not None:
        found["proof_file"] = asdict(report.proof_file)
    if report.gate is not None:
        found["gate"] = _gate(report.gate)
    plain: dict[str, Any] = _plain(found)
    return plain


def refusal(error: RnnauditError, path: str) -> str:
    """Return, as JSON text, why a model could not be audited (exit code 3)."""
    return _dump(_refused(Refusal(path, error.id, str(error.args[0]), error.help)))


def _refused(refusal: Refusal) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "tool": versions(),
        "model": {"path": refusal.path},
        "error": {"id": refusal.id, "message": refusal.message, "help": refusal.help},
    }


def schema() -> dict[str, Any]:
    """Return the published JSON Schema of a report."""
    return _published("schema.json")


def gate_schema() -> dict[str, Any]:
    """Return the published JSON Schema of what ``gate`` prints, with that of a report inside."""
    found = _published("schema-gate.json")
    return {**found, "$defs": {"report": schema()}}


def _published(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("rnnaudit.reports") / name).read_text("utf-8"))
    return found


def _dump(value: object) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _recurrence(recurrence: RecurrenceReport, eps: float) -> dict[str, Any]:
    own = wording.own_depth(recurrence, eps) or Depth(eps)
    exponent = recurrence.lyapunov
    return {
        "name": recurrence.name,
        "label": recurrence.label,
        "cell": recurrence.cell,
        "input_size": recurrence.input_size,
        "hidden_size": recurrence.hidden_size,
        "direction": recurrence.direction,
        "layer": recurrence.layer,
        "verdict": recurrence.verdict,
        "cell_options": dict(recurrence.cell_options),
        "initial_state": recurrence.initial_state,
        "lambda": {
            "upper": asdict(recurrence.upper) if recurrence.upper else None,
            "lower": asdict(recurrence.lower) if recurrence.lower else None,
        },
        "others": [asdict(attempt) for attempt in recurrence.others],
        "no_proof": recurrence.no_proof.reason if recurrence.no_proof else None,
        "spectral_norm": recurrence.spectral_norm,
        "norms": asdict(recurrence.norms) if recurrence.norms else None,
        "lyapunov": asdict(exponent) if exponent else None,
        "half_life": exponent.half_life if exponent else None,
        "spectrum": asdict(recurrence.spectrum) if recurrence.spectrum else None,
        "unit_memory": asdict(recurrence.unit_memory) if recurrence.unit_memory else None,
        "depth": _depth(own),
        "table": [_depth(d) for d in recurrence.depths],
        "curve": [asdict(point) for point in recurrence.curve],
        "skipped": [asdict(s) for s in recurrence.skipped],
        **({"pictures": asdict(recurrence.pictures)} if recurrence.pictures else {}),
    }


def _replay(replay: Replay) -> dict[str, Any]:
    return {
        **asdict(replay),
        "passed": replay.passed,
        "refuted_below": replay.refuted_below,
    }


def _depth(depth: Depth) -> dict[str, Any]:
    return {
        "eps": depth.eps,
        "proved": depth.proved,
        "measured": _measured(depth.measured),
        "refuted_below": depth.refuted_below,
        "refuted_in": depth.refuted_in,
        "searched": depth.searched,
        "float32_noise": depth.float32_noise,
    }


def _measured(measured: MeasuredDepth | None) -> dict[str, Any] | None:
    return None if measured is None else asdict(measured)


def _gate(gate: Gate) -> dict[str, Any]:
    return {"passed": gate.passed, "rules": [asdict(rule) for rule in gate.rules]}


def _export(export: Export) -> dict[str, Any]:
    found = asdict(export)
    found["inputs"] = [
        {"name": name, "shape": shape, "dtype": dtype} for name, shape, dtype in export.inputs
    ]
    return found


def _plain(value: Any) -> Any:
    """Make a value JSON: no tuple, no path, no number that is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
