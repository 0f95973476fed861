"""Run again what README and docs show; `python -m tests.readme` rewrites the output there.

A page is a tour: its commands run in their order in one new folder that holds the sample models.
A fenced block with a title, ```toml title="rnnaudit.toml", is a file of that folder. In a block
of the language `console` a line that begins with `$ ` is a command, and what follows is what it
prints; a block that shows no output is an illustration, and is not run.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))

FENCE = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"\n]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"^\$ (?P<command>(?:.*\\\n)*.*)\n(?P<shown>(?:(?!\$ ).*\n)*)", re.MULTILINE)
# What differs from one machine to the next: times, errors at the level of float32 rounding, and
# how far a search by gradients comes.
VOLATILE = re.compile(
    r"\d+(\.\d+)? (ms|µs|s)\b|\d+(\.\d+)?× (slower|faster)|\d+(\.\d+)?e[-+]\d\d?|p\d\d 0\b"
    r"|output \w+ · .*|of (normal|saturating|data).*|no k < \d+|no k below .*"
    r"| {5,}\d+$",  # the last column of a gate's table
    re.MULTILINE,
)


@dataclass(frozen=True)
class Exchange:
    """A command as a page has it, and what the page says that it prints."""

    command: str
    shown: str


def fences(page: Path) -> list[re.Match[str]]:
    """Return the fenced blocks of a page."""
    return list(FENCE.finditer(page.read_text("utf-8")))


def exchanges(fence: re.Match[str]) -> list[Exchange]:
    """Return the commands of a block; none where it is of another language."""
    if fence["language"] != "console":
        return []
    return [Exchange(m["command"], m["shown"]) for m in COMMAND.finditer(fence["text"])]


def is_run(fence: re.Match[str]) -> bool:
    """Say whether a block shows what its commands print."""
    return any(exchange.shown.strip() for exchange in exchanges(fence))


class Tour:
    """A folder in which the commands of one page run, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = 0
        (folder / "sample_models").symlink_to(ROOT / "sample_models")
        (folder / "demo").mkdir()

    def write(self, fence: re.Match[str]) -> None:
        """Write the file that a block with a title shows."""
        path = self.folder / fence["title"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fence["text"], "utf-8")

    def run(self, command: str) -> str:
        """Run a command as the shell would after the one before it; return all that it prints."""
        done = subprocess.run(
            ["bash", "-c", f"(exit {self.code})\n{command}"],
            cwd=self.folder,
            env=os.environ
            | {
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "RNNAUDIT_CACHE_DIR": str(self.folder / ".cache"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stdout, done.stdout
        self.code = done.returncode
        return done.stdout


def replayed(page: Path, folder: Path) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Run the commands of a page, and yield each block that shows output with what it prints."""
    tour = Tour(folder)
    for fence in fences(page):
        if fence["title"]:
            tour.write(fence)
        elif is_run(fence):
            yield fence, [tour.run(exchange.command) for exchange in exchanges(fence)]


def steady(text: str) -> str:
    """Blank out what differs from one machine to the next."""
    return VOLATILE.sub("#", text).strip()


def rewrite(page: Path) -> None:
    """Put what the commands of a page print now into it."""
    text = page.read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for fence, printed in replayed(page, Path(folder)):
            shown = "".join(
                f"$ {exchange.command}\n" + (f"{output.strip()}\n" if output.strip() else "")
                for exchange, output in zip(exchanges(fence), printed, strict=True)
            )
            text = text.replace(fence[0], f"```console\n{shown}```", 1)
    page.write_text(text, "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        rewrite(Path(name).absolute())
