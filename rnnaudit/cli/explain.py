"""``rnnaudit explain``: what a finding means, why it matters, and what to do."""

from __future__ import annotations

from difflib import get_close_matches

from rnnaudit.cli import options, output
from rnnaudit.errors import UsageError
from rnnaudit.findings import FINDINGS, page

EXAMPLES = """Examples:

  rnnaudit explain RA203

  rnnaudit explain

  rnnaudit explain | grep warning"""


def explain(finding: options.FindingId = None) -> None:
    """Print the page of a finding: its meaning, why it matters, what to do, an example.

    Without an id, lists all of them.
    """
    output.write(_list() if finding is None else page(_known(finding)))


def _list() -> str:
    return "".join(f"{f.id}  {f.severity:7}  {f.title}\n" for f in FINDINGS)


def _known(given: str) -> str:
    ids = [entry.id for entry in FINDINGS]
    if given.upper() in ids:
        return given.upper()
    begun = [id_ for id_ in ids if given and id_.startswith(given.upper())]
    near = begun[:3] or get_close_matches(given.upper(), ids)
    raise UsageError(
        f"an id of a finding was wanted, such as {', '.join(near or ids[:3])}, got {given!r}",
        help="rnnaudit explain lists them all",
    )
