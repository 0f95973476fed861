"""The site builds, is generated where it can be, and no link in the project leads nowhere."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from docs import generated
from rnnaudit.findings import FINDINGS, page
from tests.readme import ROOT

SITE = generated.pages()
PAGES = [
    *sorted(path for path in ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "sample_models").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
named = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def prose(text):
    return re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)


def text_of(path):
    """Return a file's text, or that of the page that the site generates at its place."""
    name = path.relative_to(ROOT / "docs").as_posix() if (ROOT / "docs") in path.parents else ""
    return SITE[name] if name in SITE else path.read_text("utf-8")


def anchors(path):
    text = re.sub(r"^```.*?^```$", "", text_of(path), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@named
def test_every_link_leads_somewhere(page):
    for link in LINK.findall(prose(page.read_text("utf-8"))):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https", link
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), link
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        inside = ROOT / "docs" in target.parents
        exists = target.exists() or (inside and str(target.relative_to(ROOT / "docs")) in SITE)
        assert exists, link
        assert not parts.fragment or parts.fragment in anchors(target), link


def test_a_missing_target_is_noticed():
    assert not (ROOT / "docs" / "commands.md").exists()
    assert "commands.md" in SITE
    assert "what-is-not-proved" in anchors(ROOT / "docs" / "proofs.md")
    assert LINK.findall(prose("see [a](b.md#c), `[d](e)` and\n```x\n[f](g)\n```")) == ["b.md#c"]


def test_the_help_is_what_the_program_prints():
    command = [sys.executable, "-m", "rnnaudit", "gate", "--help"]
    plain = {"COLUMNS": generated.WIDTH, "NO_COLOR": "1", "TERM": "dumb"}
    printed = subprocess.run(command, env=plain, capture_output=True, text=True, check=True).stdout
    lines = [line.strip() for line in printed.splitlines()]
    shown = [line.strip() for line in SITE["commands.md"].splitlines()]
    assert "\n".join(lines).strip() in "\n".join(shown)


def test_every_command_is_in_the_reference():
    headings = re.findall(r"^## (.+)$", SITE["commands.md"], flags=re.MULTILINE)
    assert headings == ["rnnaudit", *(f"rnnaudit {name}" for name in generated.names())]
    assert SITE["commands.md"].count("Usage: rnnaudit") == len(headings)


def test_every_finding_has_its_page():
    for finding in FINDINGS:
        assert SITE[f"findings/{finding.id}.md"] == page(finding.id)
        assert f"[{finding.id}]({finding.id}.md)" in SITE["findings/index.md"]


def test_the_site_builds_without_a_warning(tmp_path):
    mkdocs = shutil.which("mkdocs", path=Path(sys.executable).parent)
    build = [mkdocs, "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    api = (tmp_path / "api" / "index.html").read_text("utf-8")
    assert "Read a PyTorch or ONNX file, executing nothing in it" in api
    assert all((tmp_path / "findings" / f.id / "index.html").exists() for f in FINDINGS)
    for html in tmp_path.rglob("*.html"):
        hosts = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="https?://([^/"]+)', html.read_text()
        )
        assert hosts == [], html
