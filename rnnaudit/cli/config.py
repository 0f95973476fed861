"""Defaults for every option, from ``[tool.rnnaudit]`` of pyproject.toml or from rnnaudit.toml.

Keys are the long options without their dashes (``step-seconds`` or ``step_seconds``) and
the arguments' names (``model``). A table named after a command holds for that command.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from rnnaudit.errors import UsageError

SOURCES = (("rnnaudit.toml", ()), ("pyproject.toml", ("tool", "rnnaudit")))
"""Files of the working folder and the table in each; the first that has one counts."""

OWN = "output"
"""The one option that means something else in each command."""

ALLOWANCE = ("id", "until", "reason")
"""Keys of a table that stands for ``ID:DATE:REASON``."""


class Parameter(NamedTuple):
    """What a key sets: a command's parameter, whether that is a switch, and whether a list."""

    name: str
    switch: bool
    many: bool = False


Defaults = dict[str, dict[str, Any]]
"""By command, then by parameter."""


def defaults(parameters: Mapping[str, Mapping[str, Parameter]], folder: Path) -> Defaults:
    """Read each command's defaults.

    Args:
        parameters: For every command, each key and the parameter that it sets.
        folder: Where to look for the files.

    Raises:
        UsageError: The file is no TOML, or holds a key or a value that means nothing.
    """
    file, settings = _settings(folder)
    found: Defaults = {command: {} for command in parameters}
    shared = {k: v for k, v in settings.items() if not (isinstance(v, dict) and k in parameters)}
    for key, value in shared.items():
        name = _known(key, {n for keys in parameters.values() for n in keys}, file)
        if name == OWN:
            raise _refuse(
                f"{file}: {key} names another file for every command, so it cannot be shared; "
                f"set it in a table of its command, such as [{_dotted(file, 'truncate')}]"
            )
        for command, keys in parameters.items():
            if name in keys:
                found[command][keys[name].name] = _scalar(value, keys[name], f"{file}: {key}")
    for command in settings.keys() - shared.keys():
        keys = parameters[command]
        where = f"{file}, [{_dotted(file, command)}]"
        for key, value in settings[command].items():
            parameter = keys[_known(key, set(keys), where)]
            found[command][parameter.name] = _scalar(value, parameter, f"{where}: {key}")
    return found


def source(folder: Path) -> str:
    """Return the name of the file that the defaults come from; empty where there is none."""
    return _settings(folder)[0]


def _dotted(file: str, command: str) -> str:
    return ".".join((*dict(SOURCES)[file], command))


def _settings(folder: Path) -> tuple[str, Mapping[str, Any]]:
    import tomllib

    for name, table in SOURCES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            settings = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise _refuse(f"{name} must be readable TOML, got: {error}") from error
        for key in table:
            settings = settings.get(key, {})
            if not isinstance(settings, dict):
                raise _refuse(f"{name}: {key} must be a table, got {settings!r}")
        if settings:
            return name, settings
    return "", {}


def _known(key: str, known: set[str], where: str) -> str:
    name = key.replace("_", "-")
    if name not in known:
        near = get_close_matches(name, known, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise _refuse(
            f"{where}: a key must be one of {', '.join(sorted(known))}, got {key!r}{meant}"
        )
    return name


def _scalar(value: Any, parameter: Parameter, where: str) -> Any:
    if parameter.many:
        each = value if isinstance(value, list) else [value]
        return [_text(_joined(one, where), where) for one in each]
    if parameter.switch:
        if not isinstance(value, bool):
            raise _refuse(f"{where} must be true or false, got {value!r}")
        return value
    return _text(value, where)


def _joined(value: Any, where: str) -> Any:
    """Write a table as the option's own form, whose parts its keys name."""
    if not isinstance(value, dict):
        return value
    if set(value) != set(ALLOWANCE):
        raise _refuse(f"{where}: a table must have the keys {', '.join(ALLOWANCE)}, got {value!r}")
    return ":".join(str(value[key]) for key in ALLOWANCE)


def _text(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise _refuse(f"{where} must be a number or a string, got {value!r}")
    # Numbers pass through text, so that an option reads them as it reads its command line.
    return str(value)


def _refuse(message: str) -> UsageError:
    return UsageError(message, id="RA002")
