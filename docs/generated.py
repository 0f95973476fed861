"""The pages of the site that nobody types: each command's own --help, a page per finding."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

from rnnaudit.cli.app import COMMANDS, app
from rnnaudit.findings import FINDINGS, page

WIDTH = "88"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of the folder."""
    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def pages() -> dict[str, str]:
    """Return every generated page by its path."""
    findings = {f"findings/{each.id}.md": page(each.id) for each in FINDINGS}
    return {"commands.md": _commands(), "findings/index.md": _index()} | findings


def _commands() -> str:
    helps = [("rnnaudit", _help()), *((f"rnnaudit {n}", _help(n)) for n in names())]
    sections = (f"## {name}\n\n```text\n{text}\n```\n" for name, text in helps)
    return "# Commands\n\nWhat `rnnaudit COMMAND --help` prints.\n\n" + "\n".join(sections)


def names() -> list[str]:
    """Return the names of the commands."""
    return [command.__name__ for command, _ in COMMANDS]


def _help(*command: str) -> str:
    environment = {"COLUMNS": WIDTH, "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(app, [*command, "--help"], "rnnaudit", env=environment)
    return "\n".join(line.rstrip() for line in result.stdout.strip("\n").splitlines()).strip()


def _index() -> str:
    rows = (f"| [{f.id}]({f.id}.md) | {f.severity} | {f.title} |\n" for f in FINDINGS)
    head = (
        "# Findings\n\n"
        "A finding's id never changes its meaning. RA0xx are about usage, RA1xx about reading a\n"
        "file, RA2xx about stability and the gate, RA3xx about truncation and equivalence.\n"
        "`rnnaudit explain ID` prints a page.\n\n"
    )
    return head + "| id | severity | what |\n|---|---|---|\n" + "".join(rows)
