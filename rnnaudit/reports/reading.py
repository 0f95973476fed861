"""A report is read back from the JSON that it was written as, and nothing else is taken for one.

Values become records by the annotations of their fields, so that a field that is added to a
record is read as soon as `json.as_dict` writes it under its own name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rnnaudit.reports.json import GATE_SCHEMA, SCHEMA
from rnnaudit.results import Report


def read(text: str) -> Report:
    """Return the report that ``JsonRenderer`` wrote.

    Raises:
        ValueError: The text is no such report.
    """
    return _report(_json(text))


def read_all(text: str) -> tuple[Report, ...]:
    """Return the report, or those of all models that one JSON document of ``gate`` holds.

    Files that could not be audited have none, and are passed over.

    Raises:
        ValueError: The text is neither.
    """
    found = _json(text)
    if found.get("schema") != GATE_SCHEMA:
        return (_report(found),)
    each = found.get("reports")
    if not isinstance(each, list):
        raise ValueError("reports must be a list")
    return tuple(_report(_mapping(one)) for one in each if "error" not in _mapping(one))


def _json(text: str) -> Mapping[str, Any]:
    try:
        return _mapping(json.loads(text, parse_constant=_integer, parse_int=_integer))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _integer(text: str) -> int:
    """Refuse NaN and infinity, which are no JSON, and whole numbers that no report holds."""
    if len(text) > 20:
        raise ValueError(f"{text[:20]}… is too large")
    return int(text)


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"an object was expected, got {type(value).__name__}")
    return value


def _report(found: Mapping[str, Any]) -> Report:
    if found.get("schema") != SCHEMA:
        raise ValueError(f"schema must be {SCHEMA}, got {found.get('schema')!r}")
    try:
        shaped = _shaped(found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no {SCHEMA}: {type(error).__name__} {error}") from None
    report: Report = _record(Report, shaped, "report")
    return report


def _shaped(found: Mapping[str, Any]) -> dict[str, Any]:
    """Put what the JSON groups for its readers where the records keep it."""
    depth = found["depth"]
    return {
        **found,
        **{name: depth[name] for name in ("eps", "norm", "table", "domain")},
        "recurrences": [_shaped_recurrence(r) for r in found["recurrences"]],
        "export": _shaped_export(found.get("export")),
    }


def _shaped_recurrence(found: Mapping[str, Any]) -> dict[str, Any]:
    reason = found["no_proof"]
    return {
        **found,
        "upper": found["lambda"]["upper"],
        "lower": found["lambda"]["lower"],
        "no_proof": None if reason is None else {"reason": reason},
        "depths": found["table"],
    }


def _shaped_export(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    inputs = [[port["name"], port["shape"], port["dtype"]] for port in found["inputs"]]
    return {**found, "inputs": inputs}


# ------------------------------------------------------------------- values by annotation


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _record(kind: type, value: object, where: str) -> Any:
    found = _mapping(value)
    values = {}
    for field in fields(kind):
        if field.name in found:
            hint = _hints(kind)[field.name]
            values[field.name] = _value(hint, found[field.name], f"{where}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}.{field.name} is missing")
    return kind(**values)


def _value(hint: Any, value: object, where: str) -> Any:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _one_of(inside, value, where)
    if origin is Literal:
        if value in inside and isinstance(value, str):
            return value
    elif origin is tuple:
        if isinstance(value, list):
            return _items(inside, value, where)
    elif isinstance(hint, type) and is_dataclass(hint):
        return _record(hint, value, where)
    elif origin is not None and issubclass(origin, Mapping):
        entries = _mapping(value)
        return {key: _value(inside[1], item, f"{where}[{key!r}]") for key, item in entries.items()}
    elif hint is object or _plain(hint, value):
        return float(value) if hint is float else value  # type: ignore[arg-type]
    raise ValueError(f"{where} must be {hint}, got {type(value).__name__}")


def _plain(hint: Any, value: object) -> bool:
    """Whether a value is of a plain kind; an integer is also a float, a bool only itself."""
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (float, int)) if hint is float else isinstance(value, hint)


def _one_of(kinds: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    problems = []
    for kind in kinds:
        if kind is not NoneType:
            try:
                return _value(kind, value, where)
            except ValueError as error:
                problems.append(str(error))
    raise ValueError(problems[0])


def _items(kinds: tuple[Any, ...], values: list[object], where: str) -> tuple[Any, ...]:
    each = kinds[:1] * len(values) if kinds[1:] == (Ellipsis,) else kinds
    if len(each) != len(values):
        raise ValueError(f"{where} must have {len(each)} entries, got {len(values)}")
    return tuple(
        _value(kind, value, f"{where}[{i}]")
        for i, (kind, value) in enumerate(zip(each, values, strict=True))
    )
