"""What the options about inputs stand for; numpy is imported only where they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from rnnaudit.errors import UsageError

if TYPE_CHECKING:
    from rnnaudit.data import Data, InputRange
    from rnnaudit.model import Model


def sequences(spec: str | None, *, time_axis: int | None, batch_axis: int | None) -> Data | None:
    """Read ``--data``; None without it.

    Raises:
        LoadError: The data cannot be used.
        UsageError: An axis does not exist.
    """
    if spec is None:
        return None
    from rnnaudit.data import load_data

    return load_data(spec, time_axis=time_axis, batch_axis=batch_axis)


def named(model: str | None, factory: str | None, command: str) -> str:
    """Return what to call the model: its path, or the factory without one.

    Raises:
        UsageError: Neither was given.
    """
    if model is None and factory is None:
        raise UsageError("Missing argument 'MODEL'", help=f"see rnnaudit {command} --help")
    return model or factory or ""


def before_lone(context: typer.Context, first: str, wanted: str) -> str:
    """Return the first of two arguments where a configuration names it and one was given.

    Args:
        context: Of a command whose lone argument the parser took for its ``first``.
        first: The parameter's name.
        wanted: Both arguments, for people.

    Raises:
        UsageError: No configuration names it, so that one argument is one too few.
    """
    configured = (context.default_map or {}).get(first)
    source = context.get_parameter_source(first)
    if configured is None or source is None or source.name != "COMMANDLINE":
        raise UsageError(f"wanted {wanted}, got one of them", help="name both")
    return str(configured)


def model(
    path: str | None, *, factory: str | None, trust_pickle: bool, weights: str | None = None
) -> Model | str:
    """Return the model, or its path where nothing but the path says how to read it.

    Raises:
        LoadError: It cannot be read, or the factory fails.
        UsageError: Options that exclude each other.
    """
    if factory is None and not trust_pickle and weights is None:
        return path or ""
    from rnnaudit import api

    if weights is not None and (factory is not None or trust_pickle):
        raise UsageError(
            "--weights excludes --factory and --trust-pickle: it is for weights that an ONNX graph "
            "takes as inputs",
            help="give one of them",
        )
    if factory is None:
        return api.load(path or "", trust_pickle=trust_pickle, weights=weights)
    if trust_pickle:
        raise UsageError(
            "--factory and --trust-pickle exclude each other: a factory's weights are a state_dict",
            help="give one of them",
        )
    return api.build(factory, path)


def bounds(text: str | None) -> InputRange | None:
    """Read ``--input-range``; None without it.

    Raises:
        UsageError: Neither two finite numbers LO:HI nor one-hot.
    """
    if text is None:
        return None
    from rnnaudit.data import parse_range

    return parse_range(text)
