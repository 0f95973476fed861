"""The program, run in this process."""

from __future__ import annotations

import pytest

from rnnaudit.cli import app


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return its exit code, and what it wrote to stdout and to stderr."""
    code = app.main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err
