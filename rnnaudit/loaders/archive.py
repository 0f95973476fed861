"""A zip archive seen from its directory only, before anything in it is read."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from rnnaudit.errors import LoadError
from rnnaudit.loaders.interface import brief

MOST_RECORDS = 2_000_000
SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Archive:
    """Names and sizes of the records, without the folder that torch puts in front of them."""

    records: dict[str, int]

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
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise LoadError(
                f"{path} is a damaged zip archive: {brief(error)}",
                help="write or download it again",
            ) from None
        size = path.stat().st_size
        declared = sum(entry.file_size for entry in entries)
        if declared > 4 * size + SPARE_BYTES:
            raise LoadError(
                f"{path} declares {declared} bytes in a file of {size}",
                help="torch.save writes weights uncompressed; write the file again",
            )
        return cls({entry.filename.partition("/")[2]: entry.file_size for entry in entries})

    def has(self, name: str) -> bool:
        """Whether a record of that name, or a folder of that name with a slash, is there."""
        if name.endswith("/"):
            return any(record.startswith(name) for record in self.records)
        return name in self.records
