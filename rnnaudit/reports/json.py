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
from rnnaudit.results import Depth, Export, MeasuredDepth, RecurrenceReport, Report
from rnnaudit.versions import versions

SCHEMA = "rnnaudit.report/1"


class JsonRenderer:
    """One JSON object for each report, two spaces deep."""

    @property
    def name(self) -> str:
        """The format's name."""
        return "json"

    def render(self, report: Report) -> str:
        """Return the report as JSON text."""
        return _dump(as_dict(report))


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
    if report.export is not None:
        found["export"] = _export(report.export)
    plain: dict[str, Any] = _plain(found)
    return plain


def refusal(error: RnnauditError, path: str) -> str:
    """Return, as JSON text, why a model could not be audited (exit code 3)."""
    return _dump(
        {
            "schema": SCHEMA,
            "tool": versions(),
            "model": {"path": path},
            "error": {"id": error.id, "message": str(error.args[0]), "help": error.help},
        }
    )


def schema() -> dict[str, Any]:
    """Return the published JSON Schema of every output."""
    text = (files("rnnaudit.reports") / "schema.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
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
    }


def _depth(depth: Depth) -> dict[str, Any]:
    return {
        "eps": depth.eps,
        "proved": depth.proved,
        "measured": _measured(depth.measured),
        "refuted_below": depth.refuted_below,
    }


def _measured(measured: MeasuredDepth | None) -> dict[str, Any] | None:
    return None if measured is None else asdict(measured)


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
        **({"pictures": asdict(recurrence.pictures)} if recurrence.pictures else {}),
