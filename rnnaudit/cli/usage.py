"""What the option parser complains of, said as every other error: wanted, came, what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from rnnaudit.cli import config
from rnnaudit.errors import UsageError

_PARSER: type[Exception] = typer.BadParameter.mro()[1]  # every complaint about usage

_KINDS = {"float": "a number", "int": "a whole number", "bool": "true or false"}
"""What a value of a type is called, by how the parser's names of it begin."""

_CHOICE = re.compile(r"'(?P<came>.*)' is not one of (?P<choices>'.*')", re.DOTALL)
_GUESS = re.compile(r"\.? Did you mean (?P<name>.+)\?$", re.DOTALL)
_KIND = re.compile(r"'(?P<came>.*)' is not a valid (?P<kind>\w+)", re.DOTALL)


def complaint(error: Exception) -> UsageError | None:
    """Return the parser's complaint as an error of ours; None for any other error."""
    if not (isinstance(error, _PARSER) and hasattr(error, "format_message")):
        return None
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    message = _unfit(error, parameter) or str(error.format_message()).rstrip(".")
    message = message.replace(": Value error, ", ": ")
    message = _GUESS.sub(r" (did you mean \g<name>?)", message)
    if context is not None and parameter is not None:
        origin = context.get_parameter_source(parameter.name)
        if origin is not None and origin.name == "DEFAULT_MAP":
            message += f" (set by {config.source(Path.cwd())})"
    path = "rnnaudit" if context is None else context.command_path
    return UsageError(message, help=f"see {path} --help")


def _unfit(error: Exception, parameter: Any) -> str:
    """Say of a value what it must be; empty where the complaint is another."""
    message, wanted, came = str(getattr(error, "message", "")), "", ""
    if choice := _CHOICE.search(message):
        wanted, came = f"one of {choice['choices'].replace(chr(39), '')}", choice["came"]
    elif kind := _KIND.search(message):
        wanted, came = _named(kind["kind"]), kind["came"]
    elif errors := getattr(error.__cause__, "errors", None):  # pydantic's
        first = errors()[0]
        wanted, came = _named(first["type"]), str(first["input"])
    if not wanted or parameter is None:
        return ""
    default = parameter.default
    example = f", such as {default}" if type(default) in (int, float) else ""
    return f"{max(parameter.opts, key=len)} must be {wanted.rstrip('.')}{example}, got {came!r}"


def _named(kind: str) -> str:
    return next((name for type_, name in _KINDS.items() if kind.startswith(type_)), "")
