"""The program: its commands, and what an error looks like from outside."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from rnnaudit import __version__
from rnnaudit.cli import (
    certify,
    check,
    config,
    explain,
    gate,
    inspect,
    report,
    truncate,
    usage,
    verify,
)
from rnnaudit.errors import RnnauditError, UsageError

COMMANDS = (
    (inspect.inspect, inspect.EXAMPLES),
    (truncate.truncate, truncate.EXAMPLES),
    (verify.verify, verify.EXAMPLES),
    (gate.gate, gate.EXAMPLES),
    (report.report, report.EXAMPLES),
    (certify.certify, certify.EXAMPLES),
    (check.check, check.EXAMPLES),
    (explain.explain, explain.EXAMPLES),
)

EXAMPLES = """Examples:

  rnnaudit inspect model.pt

  rnnaudit truncate model.pt --eps 1e-3

  rnnaudit verify model.pt model.truncated.onnx --eps 1e-3

  rnnaudit gate models/*.onnx

Exit codes: 0 done or passed, 1 a check or gate failed, 2 wrong options or no command,
3 could not audit.

\\[tool.rnnaudit] in pyproject.toml, or rnnaudit.toml, sets a default for every option."""

INTERRUPTED = 130

COMPLETION = "_RNNAUDIT_COMPLETE"
"""Environment variable by which a shell asks what could come next."""

MODELS = ("model", "models", "original")
"""Parameters that the key `model` sets."""

NEVER_CONFIGURED = frozenset({"help", "finding", "factory", "trust_pickle"})
"""Parameters that no file sets: what runs code is asked for each time, by whoever runs it."""

_REPORT = "please report the traceback above; it says nothing about the model"


def _paragraphs(docstring: str) -> str:
    """Join the lines of each paragraph, for a screen of any width."""
    return "\n\n".join(" ".join(part.split()) for part in docstring.split("\n\n"))


app = typer.Typer(
    name="rnnaudit",
    help="Audit trained recurrent models: prove or measure how fast they forget, "
    "and write the feed-forward model that replaces them.",
    epilog=_paragraphs(EXAMPLES),
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
for command, examples in COMMANDS:
    app.command(help=_paragraphs(command.__doc__ or ""), epilog=_paragraphs(examples))(command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"rnnaudit {__version__}")
        raise typer.Exit


@app.callback()
def configure(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Give every command the defaults that the working folder's configuration sets."""
    context.default_map = config.defaults(_parameters(context.command), Path.cwd())


def _parameters(group: Any) -> dict[str, dict[str, config.Parameter]]:
    """Map each command's configuration keys to its parameters.

    A key is the long option without its dashes; `model` is the model that a command reads.
    """
    found = {}
    for name, command in group.commands.items():
        parameters = [p for p in command.params if p.name not in NEVER_CONFIGURED]
        found[name] = {max(p.opts, key=len).lstrip("-"): _parameter(p) for p in parameters}
        found[name].update(("model", _parameter(p)) for p in parameters if p.name in MODELS)
    return found


def _parameter(parameter: Any) -> config.Parameter:
    switch = bool(getattr(parameter, "is_flag", False))
    many = bool(getattr(parameter, "multiple", False)) or parameter.nargs == -1
    return config.Parameter(parameter.name, switch=switch, many=many)


def main(arguments: list[str] | None = None) -> int:
    """Run the program and return its exit code.

    A user's error is one line on stderr; anything else is ours and keeps its traceback.
    """
    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    # Threads that wait soon sleep, so that a busy machine stays usable; the few turns that they
    # wait awake span the gap between two products of a step, which sleeping would double.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if not arguments and COMPLETION not in os.environ:
            return _help()
        program = typer.main.get_command(app)
        return int(program.main(arguments, "rnnaudit", standalone_mode=False) or 0)
    except RnnauditError as error:
        return _complain(error)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        usual = usage.complaint(error)
        if usual is not None:
            return _complain(usual)
        traceback.print_exc()
        return _complain(RnnauditError("rnnaudit itself failed", help=_REPORT, id="RA900"))


def _open_what_is_closed() -> None:
    """Give streams that the caller closed (``>&-``) nowhere to go; the exit code still counts.

    Python has None for them, and the next file that is opened would take their number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 (stays open)
            setattr(sys, name, nowhere)


def _help() -> int:
    """Print the help where no command was named: to stderr, as that is wrong usage."""
    with redirect_stdout(sys.stderr):
        typer.main.get_command(app).main(["--help"], "rnnaudit", standalone_mode=False)
    return UsageError.exit_code


def _complain(error: RnnauditError) -> int:
    from rnnaudit.reports.numbers import clean

    sys.stderr.write(f"error[{error.id}]: {clean(str(error))}\n")
    return error.exit_code
