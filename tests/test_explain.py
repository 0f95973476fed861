"""Every finding has a page, `explain` prints it, and a shell completes ids and models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rnnaudit
from rnnaudit.cli import completion
from rnnaudit.findings import FINDINGS, page
from tests.program import run

PAGES = Path(rnnaudit.__file__).parent / "findings_pages"
SECTIONS = ("## Why it matters", "## What to do", "## Example")


def test_every_finding_has_a_page_and_no_page_is_left_over():
    assert {path.stem for path in PAGES.iterdir()} == {entry.id for entry in FINDINGS}


@pytest.mark.parametrize("entry", FINDINGS, ids=lambda entry: entry.id)
def test_a_page_says_what_why_how_and_shows_it(entry):
    text = page(entry.id)
    heading, rest = text.split("\n\n", 1)
    assert heading == f"# {entry.id} ({entry.severity}): {entry.title}"
    parts = [rest]
    for section in SECTIONS:
        parts[-1:] = parts[-1].split(f"\n\n{section}\n\n")
    assert len(parts) == len(SECTIONS) + 1
    assert all(len(part.split()) >= 3 for part in parts)
    assert all(line.startswith("    ") for line in parts[-1].splitlines() if line)
    prose = [line for line in rest.splitlines() if not line.startswith("    ")]
    assert max(map(len, prose)) <= 80


def test_explain_prints_the_page(capsys):
    assert run(capsys, "explain", "ra203") == (0, page("RA203"), "")


def test_explain_lists_every_finding(capsys):
    code, out, err = run(capsys, "explain")
    assert (code, err) == (0, "")
    assert [line[:5] for line in out.splitlines()] == [entry.id for entry in FINDINGS]
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("given", "near"),
    [("RA20", "RA202, RA203, RA204"), ("RA2", "RA202, RA203, RA204"), ("x", "RA001, RA002, RA003")],
)
def test_an_unknown_id_names_those_near_it(capsys, given, near):
    code, out, err = run(capsys, "explain", given)
    assert (code, out) == (2, "")
    assert err.startswith(f"error[RA001]: an id of a finding was wanted, such as {near}")
    assert err.endswith(f"got {given!r}; rnnaudit explain lists them all\n")


# ---------------------------------------------------------------------------- completion


def completed(folder, line):
    environment = {
        "_RNNAUDIT_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    result = subprocess.run(
        [sys.executable, "-m", "rnnaudit"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.split()


def test_a_shell_completes_commands_ids_and_models(tmp_path):
    for name in ("a.onnx", "b.pt", "notes.txt"):
        (tmp_path / name).touch()
    assert completed(tmp_path, "rnnaudit trunc") == ["truncate"]
    assert completed(tmp_path, "rnnaudit explain RA30") == [
        entry.id for entry in FINDINGS if entry.id.startswith("RA30")
    ]
    assert completed(tmp_path, "rnnaudit gate b.pt ") == ["a.onnx", "b.pt"]


def test_models_are_offered_with_their_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("models/a.onnx", "models/b.PT", "models/c.txt", ".hidden.pt", "m.pt"):
        (tmp_path / name).touch()
    assert list(completion.models("m")) == ["m.pt", "models/"]
    assert list(completion.models("models/")) == ["models/a.onnx", "models/b.PT"]
    assert list(completion.models("")) == ["m.pt", "models/"]
    assert list(completion.models("nowhere/x")) == []


def test_the_script_for_a_shell_is_shown():
    result = subprocess.run(
        [sys.executable, "-m", "rnnaudit", "--show-completion", "bash"],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_RNNAUDIT_COMPLETE=complete_bash" in result.stdout
