"""A zip archive: its directory is judged before anything in it is read."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rnnaudit.errors import LoadError
from rnnaudit.loaders.interface import brief

SPARE_BYTES = 64 << 20

_DAMAGE = (zipfile.BadZipFile, zlib.error, OSError, ValueError, RuntimeError, EOFError)
"""What ``zipfile`` raises on bytes that are no archive, or an encrypted one."""


@dataclass(frozen=True, slots=True)
class Archive:
    """The records of a zip archive by name, without the folder that holds them all."""

    path: Path
    records: Mapping[str, zipfile.ZipInfo]

    @classmethod
    def open(cls, head: bytes, path: Path) -> Archive | None:
        """Read the directory; None when the file is not a zip archive.

        Raises:
            LoadError: The directory is damaged, or declares far more than the file holds.
        """
        if not head.startswith(b"PK\x03\x04"):
            return None
        try:
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
        except _DAMAGE as error:
            raise _damaged(path, error) from None
        size = path.stat().st_size
        declared = sum(entry.file_size for entry in entries)
        if declared > 4 * size + SPARE_BYTES:
            raise LoadError(
                f"{path} declares {declared} bytes in a file of {size}",
                help="torch.save writes weights uncompressed; write the file again",
            )
        folders = {entry.filename.partition("/")[:2] for entry in entries}
        folder = "".join(folders.pop()) if len(folders) == 1 else ""
        if not folder.endswith("/"):
            folder = ""
        return cls(path, {entry.filename[len(folder) :]: entry for entry in entries})

    def has(self, name: str) -> bool:
        """Whether there is a record of that name, or any in a folder when it ends in a slash."""
        if name.endswith("/"):
            return any(record.startswith(name) for record in self.records)
        return name in self.records

    def read(self, *, prefix: str, suffix: str = "") -> dict[str, bytes]:
        """Read the records whose names begin and end so.

        Raises:
            LoadError: One of them is damaged.
        """
        try:
            with zipfile.ZipFile(self.path) as archive:
                return {
                    name: archive.read(entry)
                    for name, entry in self.records.items()
                    if name.startswith(prefix) and name.endswith(suffix)
                }
        except _DAMAGE as error:
            raise _damaged(self.path, error) from None


def opened(path: Path) -> Archive:
    """Open a file that has been recognised as an archive.

    Raises:
        LoadError: It no longer is one, or is damaged.
    """
    with path.open("rb") as file:
        archive = Archive.open(file.read(4), path)
    if archive is None:
        raise LoadError(f"{path} changed while it was read", help="try again")
    return archive


def _damaged(path: Path, error: Exception) -> LoadError:
    return LoadError(
        f"{path} is a damaged zip archive: {brief(error)}", help="write or download it again"
    )
