"""What a shell offers after TAB: models beside the cursor, ids of findings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rnnaudit.findings import FINDINGS

MODELS = frozenset({".pt", ".pth", ".ckpt", ".bin", ".tar", ".pt2", ".ts", ".onnx", ".safetensors"})
"""Suffixes that models have; any other file can still be named in full."""


def findings(incomplete: str) -> Iterator[tuple[str, str]]:
    """Offer the ids that begin so, each with its title."""
    for finding in FINDINGS:
        if finding.id.startswith(incomplete.upper()):
            yield finding.id, finding.title


def models(incomplete: str) -> Iterator[str]:
    """Offer the folders and the models whose path begins so."""
    folder, _, start = incomplete.rpartition("/")
    before = f"{folder}/" if folder or incomplete.startswith("/") else ""
    try:
        entries = sorted(Path(before or ".").iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(start) and (start or not entry.name.startswith(".")):
            if entry.is_dir():
                yield f"{before}{entry.name}/"
            elif entry.suffix.lower() in MODELS:
                yield f"{before}{entry.name}"
