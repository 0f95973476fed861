"""The commands that the README shows, run again; `python -m tests.readme` rewrites their output."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"```console\n\$ rnnaudit (?P<arguments>[^\n]+)\n(?P<shown>.*?)```", re.DOTALL)
# What differs from one machine to the next: times, errors at the level of float32 rounding, and
# how far a search by gradients comes.
VOLATILE = re.compile(
    r"\d+(\.\d+)? (ms|µs|s)\b|\d+(\.\d+)?× (slower|faster)|\d+(\.\d+)?e-\d\d?|p\d\d 0\b"
    r"|output \w+ · .*|of (normal|saturating|data).*|no k < \d+|no k below .*"
)


def run(arguments: str) -> str:
    """Run a command in the repository and return what it prints."""
    command = [sys.executable, "-m", "rnnaudit", *arguments.split()]
    (ROOT / "demo").mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steady(text: str) -> str:
    """Blank out what differs from one machine to the next."""
    return VOLATILE.sub("#", text)


def blocks() -> list[tuple[str, str]]:
    """Return the README's commands and the output it shows of each."""
    return [(m["arguments"], m["shown"]) for m in BLOCK.finditer(README.read_text("utf-8"))]


def rewrite() -> None:
    """Put what the commands print now into the README."""

    def fresh(match: re.Match[str]) -> str:
        arguments = match["arguments"]
        return f"```console\n$ rnnaudit {arguments}\n{run(arguments).rstrip()}\n```"

    README.write_text(BLOCK.sub(fresh, README.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    rewrite()
