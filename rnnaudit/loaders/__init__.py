"""Read a model from a file of any kind that is supported, recognised from its bytes."""

from __future__ import annotations

import hashlib
import struct
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rnnaudit.errors import LoadError
from rnnaudit.loaders.interface import HEAD_BYTES, Loader, brief

if TYPE_CHECKING:
    from rnnaudit.model import Model

__all__ = ["load"]

LOADERS = ("safetensors", "torchscript", "exported", "state_dict", "onnx")
"""Modules of this room, each with a ``LOADER``, in the order in which they are asked.

A module is imported only once every earlier one has declined, so that a state_dict never
imports onnx.
"""

SUPPORTED = "PyTorch (.pt, .pth, .ckpt, .bin, .tar), safetensors and ONNX files are read"

_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras weights?)"),
    (0, b"PK\x03\x04", "a zip archive that holds no PyTorch model"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"\x1f\x8b", "a gzip file"),
    (0, b"BZh", "a bzip2 file"),
    (0, b"\xfd7zXZ", "an xz file"),
    (0, b"GGUF", "a GGUF file"),
    (4, b"TFL3", "a TensorFlow Lite model"),
    (257, b"ustar", "a tar archive"),
    (0, b"\x80", "a Python pickle, which is never unpickled since that runs code"),
)


def load(
    path: str | Path, *, trust_pickle: bool = False, weights: str | Path | None = None
) -> Model:
    """Read the model in ``path`` without executing anything that it holds.

    The format is recognised from the bytes, whatever the suffix.

    Args:
        path: The file.
        trust_pickle: Unpickle a PyTorch file that needs code, which runs whatever it says.
        weights: A .npz or .safetensors file of values that an ONNX graph takes as inputs.

    Raises:
        LoadError: No such file, an empty or damaged one, or one of an unknown kind.
        UnsupportedModelError: It was read, and holds nothing that can be audited.
    """
    path = Path(path)
    head = _head(path)
    if _is_text(head):
        raise LoadError(
            f"a model was expected, and {path} is a text file ({_first_line(head)!r})",
            help=SUPPORTED,
        )
    for module in LOADERS:
        loader = cast("Loader", import_module(f"rnnaudit.loaders.{module}").LOADER)
        if loader.recognises(head, path):
            if weights is not None:
                return _with_weights(module, path, Path(weights))
            if trust_pickle and module == "state_dict":
                from rnnaudit.loaders import trusted

                return trusted.load(path, _sha256(path))
            return loader.load(path, _sha256(path))
    raise LoadError(f"{path} is {_kind(head)}, not a model that can be read", help=SUPPORTED)


def _with_weights(module: str, path: Path, weights: Path) -> Model:
    if module != "onnx":
        raise LoadError(
            f"weights are given to graph inputs of an ONNX model, and {path} is none",
            help="leave out --weights",
        )
    from rnnaudit.loaders.onnx.loader import OnnxLoader

    return OnnxLoader().load(path, _sha256(path), weights)


def _head(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise LoadError(
                f"a model file was expected, and {path} is a folder",
                help="name the file inside it",
            )
        if not path.exists():
            raise LoadError(f"no such file: {path}", help="check the path")
        if not path.is_file():
            raise LoadError(f"{path} is not a regular file", help="copy it to a file first")
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise LoadError(f"cannot read {path}: {brief(error)}", help="check the path") from None
    if not head:
        raise LoadError(f"{path} is empty (0 bytes)", help="write or download it again")
    return head


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # else a character cut in two by the end of the head
            return False
        text = head[: error.start].decode("utf-8-sig")
    return all(c.isprintable() or c in "\t\n\r\f" for c in text)


def _first_line(head: bytes) -> str:
    line = head.decode("utf-8-sig", "replace").strip().splitlines()
    return line[0][:40] if line else ""


def _kind(head: bytes) -> str:
    for offset, magic, kind in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return kind
    if len(head) >= 9 and struct.unpack("<Q", head[:8])[0] < 1 << 32 and head[8:9] == b"{":
        return "a damaged safetensors file"
    return f"of an unknown kind (it begins with {head[:8].hex(' ')})"
