"""What a loader is: it knows its format from the first bytes, and turns a file into a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rnnaudit.model import Model

HEAD_BYTES = 4096
"""How many leading bytes of the file ``recognises`` is given."""


ROUNDED = (
    "its weights have 8 bits, and one scale for the whole call rounds its inputs, so that each "
    "output depends on all of them, later ones too"
)
"""Why what a dynamically quantised recurrence computes is not its dequantised cell."""


class Loader(Protocol):
    """One format. Loaders read data and never execute what they load."""

    name: str

    def recognises(self, head: bytes, path: Path) -> bool:
        """Whether the file is of this format, from its first bytes (or its own directory)."""
        ...

    def load(self, path: Path, sha256: str) -> Model:
        """Read the model.

        Raises:
            LoadError: The file is damaged, hostile, or needs code to be read.
            UnsupportedModelError: It was read, and holds nothing that can be audited.
        """
        ...


def brief(error: BaseException, limit: int = 160) -> str:
    """Say a library's error in one short line, without terminal colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)) or type(error).__name__
    text = " ".join(text.split())
    sentence = re.split(r"(?<=[a-z0-9)\]])\. ", text, maxsplit=1)[0].rstrip(".")
    return sentence if len(sentence) <= limit else sentence[: limit - 1] + "…"


def listed(names: list[str], most: int = 3) -> str:
    """Join a few names, and say how many more there are."""
    shown = ", ".join(name if len(name) <= 60 else name[:59] + "…" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
