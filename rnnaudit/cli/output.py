"""Reports to stdout or a file, progress to stderr, refusals in the format that was asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rnnaudit.cli.choices import Format
from rnnaudit.errors import RnnauditError, UsageError

if TYPE_CHECKING:  # `--help` needs no report
    from rnnaudit.reports import Gatherer, Renderer
    from rnnaudit.results import Report

FOR_PEOPLE = frozenset({Format.TEXT, Format.HTML})
"""Formats in which a refusal is the one line on stderr."""

Progress = Callable[[str, float], None]


@contextmanager
def refusals(form: Format, path: str) -> Iterator[None]:
    """Let an error pass, after a program that reads the report has been told of it.

    Only what exits with 3 is a fact about the file; wrong options leave stdout empty.
    A format whose packages are missing is refused before any work is done for it.
    """
    if form is Format.HTML:
        from rnnaudit.reports import html

        html.require()
    try:
        yield
    except RnnauditError as error:
        if error.exit_code == 3:
            _refuse(error, form, path)
        raise
    except typer.Exit:
        raise
    except Exception as error:
        message = f"rnnaudit itself failed: {type(error).__name__}"
        _refuse(RnnauditError(message, id="RA900"), form, path)
        raise


def _refuse(error: RnnauditError, form: Format, path: str) -> None:
    from rnnaudit.reports import GATHERERS
    from rnnaudit.reports.json import refusal
    from rnnaudit.results import Refusal

    if form is Format.JSON:
        write(refusal(error, path))
    elif form not in FOR_PEOPLE:
        refused = Refusal(path, error.id, str(error.args[0]), error.help)
        write(next(g for g in GATHERERS if g.name == form).render_all((refused,)))


@contextmanager
def progress(*, quiet: bool) -> Iterator[Progress | None]:
    """Show a bar on stderr while the body runs; None where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=1.0)
        yield lambda label, done: bar.update(task, description=label, completed=done)


def check_writable(path: str | None, *inputs: str | None) -> None:
    """Refuse an output path before any work is done for it.

    Raises:
        UsageError: Its folder does not exist, it is a folder itself, or it is one of the
            ``inputs``.
    """
    if path is None:
        return
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise UsageError(
            f"the output must be in a folder that exists, got {path}",
            help=f"create {target.parent} first",
            id="RA003",
        )
    if target.is_dir():
        raise UsageError(
            f"the output must be a file, got the folder {path}", help="name a file", id="RA003"
        )
    for read in inputs:
        if read is not None and Path(read).exists() and target.exists() and target.samefile(read):
            raise UsageError(
                f"the output must not be what is read, got {path} for both",
                help="choose another name",
                id="RA003",
            )


_ASKED = ("step_seconds", "factory", "trust_pickle", "weights", "time_axis", "batch_axis")


def asked(report: Report, context: typer.Context, *more: str) -> Report:
    """Record settings that only the command line knows, where they were given.

    They are how long a step lasts, so that depths are also shown as time, and how the model
    and the data are read, so that the next command reads the same; ``more`` names others.
    """
    given = {name: context.params.get(name) for name in (*_ASKED, *more)}
    if given["factory"] is not None:
        given["weights"] = context.params.get("model")
    kept = {name: s for name, s in given.items() if s is not None and s is not False}
    return replace(report, settings={**report.settings, **kept})


def emit(
    report: Report, form: Format, *, file: str | None = None, quiet: bool, verbose: bool
) -> None:
    """Render a report and write it to ``file``, or to stdout without one."""
    text = _renderer(form, to_file=file is not None, quiet=quiet, verbose=verbose).render(report)
    put(text, file)
    if quiet and form is Format.TEXT and report.equivalence is not None:
        _say_left_out(report.equivalence.left_out)


def _say_left_out(parts: Sequence[str]) -> None:
    """Say on stderr what the verdict alone does not: what was not compared."""
    if parts:
        from rnnaudit.reports.numbers import clean

        print(clean(f"left out of the comparison: {'; '.join(parts)}"), file=sys.stderr)


def emit_proof(report: Report, form: str, *, written: bool, quiet: bool) -> None:
    """Write to stdout what a proof file proves."""
    if form == Format.JSON:
        emit(report, Format.JSON, quiet=quiet, verbose=False)
        return
    from rnnaudit.reports.proof import ProofRenderer

    write(ProofRenderer(written, colour=_colour(), quiet=quiet).render(report))


def put(text: str, file: str | None) -> None:
    """Write a text to ``file``, or to stdout without one.

    Raises:
        UsageError: The file cannot be written.
    """
    if file is None:
        write(text)
        return
    try:
        Path(file).write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(
            f"the output must be writable, got {file}: {error.strerror}",
            help="choose another place",
            id="RA003",
        ) from error


def gatherer(form: Format, *, file: str | None, quiet: bool, verbose: bool) -> Gatherer:
    """Return what renders several reports in a format.

    Raises:
        UsageError: The format is of one report only.
    """
    from rnnaudit.reports import GATHERERS, SummaryRenderer

    chosen = next((g for g in GATHERERS if g.name == form), None)
    if chosen is None:
        names = ", ".join(g.name for g in GATHERERS)
        raise UsageError(f"--format of several models must be one of {names}, got {form}")
    if isinstance(chosen, SummaryRenderer):
        return replace(chosen, colour=file is None and _colour(), quiet=quiet, verbose=verbose)
    return chosen


def _renderer(form: Format, *, to_file: bool, quiet: bool, verbose: bool) -> Renderer:
    from rnnaudit.reports import RENDERERS, TerminalRenderer

    chosen = next(r for r in RENDERERS if r.name == form)
    if isinstance(chosen, TerminalRenderer):
        return replace(chosen, colour=not to_file and _colour(), quiet=quiet, verbose=verbose)
    return chosen


def _colour() -> bool:
    """Whether stdout shows colour: a terminal, and neither NO_COLOR nor a dumb one."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    return console.color_system is not None and not console.no_color and not console.legacy_windows


def write(text: str) -> None:
    """Write to stdout; a reader that has left (``| head``) is no error.

    Raises:
        UsageError: Stdout takes no more, as on a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered goes nowhere, also when the interpreter flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise UsageError(
                f"the output must be writable, and stdout is not: {error.strerror}",
                help="send it to another place",
                id="RA003",
            ) from error
