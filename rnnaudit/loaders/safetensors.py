"""safetensors files: a JSON header of names, shapes and offsets, then the numbers."""

from __future__ import annotations

import struct
from pathlib import Path

from rnnaudit.errors import LoadError
from rnnaudit.loaders.interface import Loader, brief
from rnnaudit.loaders.named import Source, read_model
from rnnaudit.model import Model

MOST_HEADER_BYTES = 100_000_000


class SafetensorsLoader:
    """Read a safetensors file as named tensors, in no particular order."""

    name = "safetensors"

    def recognises(self, head: bytes, path: Path) -> bool:
        """Whether a JSON object follows its own length, and that length fits the file."""
        if len(head) < 10 or head[8:9] != b"{":
            return False
        header = int(struct.unpack("<Q", head[:8])[0])
        return header <= min(MOST_HEADER_BYTES, path.stat().st_size - 8)

    def load(self, path: Path, sha256: str) -> Model:
        """Read the model; tensors are mapped from the file, not copied.

        Raises:
            LoadError: The header does not describe the file.
            UnsupportedModelError: It holds no recurrence that can be read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
            raise LoadError(
                f"{path} is a damaged safetensors file: {brief(error)}",
                help="write or download it again",
            ) from None
        source = Source(path, "safetensors", sha256, ordered=False)
        return read_model(tensors, source)


LOADER: Loader = SafetensorsLoader()
