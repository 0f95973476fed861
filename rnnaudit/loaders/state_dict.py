"""PyTorch checkpoints, zip or legacy, read as numbers: ``weights_only=True`` and nothing else.

A pickle that needs a class is refused by the name of that class. Objects that carry no
weights and often stand beside them (``argparse.Namespace``, NumPy scalars, paths) are
replaced by an empty object of ours, so that theirs is never made either.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from rnnaudit.errors import LoadError
from rnnaudit.loaders.archive import Archive
from rnnaudit.loaders.interface import Loader, brief
from rnnaudit.loaders.named import Source, read_model
from rnnaudit.loaders.nested import named_tensors
from rnnaudit.loaders.packed import Packed
from rnnaudit.model import Model

LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""``torch.save``'s magic number as a pickled integer, after the two bytes of the protocol."""

_HARMLESS = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "datetime.date",
    "datetime.datetime",
    "datetime.timedelta",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.WindowsPath",
    "pathlib.PureWindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.dtype",
    "numpy.ndarray",
)
_BLOCKED = re.compile(r"GLOBAL ([\w.]*\w) (?:was not an allowed|whose module)")


class Opaque:
    """Stands for an object that holds no weights; takes what it is given and keeps nothing."""

    def __new__(cls, *_: object) -> Opaque:
        """Make one whatever the arguments."""
        return super().__new__(cls)

    def __setstate__(self, _: object) -> None:
        """Forget the state."""


class StateDictLoader:
    """Read what ``torch.save`` wrote: a state_dict, or a checkpoint that holds one."""

    name = "PyTorch state_dict"

    def recognises(self, head: bytes, path: Path) -> bool:
        """Whether this is a zip archive with a pickle in it, or torch's legacy magic number."""
        if head[2 : 2 + len(LEGACY_MAGIC)] == LEGACY_MAGIC and head[:1] == b"\x80":
            return True
        archive = Archive.open(head, path)
        return archive is not None and archive.has("data.pkl")

    def load(self, path: Path, sha256: str) -> Model:
        """Read the model.

        Raises:
            LoadError: The file is damaged or hostile, or needs code to be read.
            UnsupportedModelError: It holds no recurrence that can be read.
        """
        tensors = named_tensors(read_checkpoint(path))
        return read_model(tensors, Source(path, self.name, sha256))


def read_checkpoint(
    path: Path,
    data: BinaryIO | None = None,
    allowed: Sequence[tuple[Callable[..., object], str]] = (),
) -> object:
    """Return what is pickled in a torch file: containers, numbers, text and tensors only.

    Tensors are read, not mapped: only then does torch compare the size that the pickle
    claims of a tensor with the size of its record.

    Args:
        path: The file.
        data: Its contents, where they are not the file's own.
        allowed: What to use in the place of further names in the pickle.

    Raises:
        LoadError: The file is damaged or hostile, or needs code to be read.
    """
    stand_ins: list[Any] = [
        *((Opaque, name) for name in _HARMLESS),
        (Packed, "torch.ScriptObject"),
        *allowed,
    ]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(stand_ins):
            warnings.simplefilter("ignore")
            return torch.load(data or path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the bytes of a stranger's file lead to
        _refuse(path, error)


def _refuse(path: Path, error: Exception) -> NoReturn:
    blocked = _BLOCKED.search(str(error))
    if blocked is None:
        raise LoadError(
            f"{path} is a damaged PyTorch file: {brief(error)}",
            help="write or download it again",
        ) from None
    name = blocked[1]
    raise LoadError(
        f"{path} holds a pickled {name}, and reading it would run code",
        help="save the weights alone, torch.save(model.state_dict(), path), where that class is "
        "known, or run its code with --trust-pickle if you trust whoever made the file",
        id="RA103",
    ) from None


LOADER: Loader = StateDictLoader()
