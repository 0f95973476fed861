"""Writing a model: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir

from rnnaudit.errors import UnsupportedModelError, UsageError

LARGEST = 2**31 - 2**20
"""Bytes of weights that go into one protobuf message, which holds less than 2 GiB."""

_SMALL = 1024
"""Bytes up to which a tensor stays in the model: sizes and axes are read while it loads."""


def write(model: ir.Model, path: str | Path, *, largest: int = LARGEST) -> None:
    """Check a model and put it at ``path`` in one step; on failure nothing is left behind.

    Weights of more than ``largest`` bytes go into ``path.data`` beside it.

    Raises:
        UsageError: The folder does not exist or cannot be written to.
        UnsupportedModelError: The model is not valid.
    """
    path = Path(path)
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(
            f"the output must be in a folder that exists, got {path}",
            help=f"create {folder} first",
            id="RA003",
        )
    if path.exists() and not path.is_file():
        what = "the folder" if path.is_dir() else "what is no file,"
        raise UsageError(
            f"the output must be a file, got {what} {path}", help="name a file", id="RA003"
        )
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{path.name}.") as made:
            _write_into(Path(made), path.name, model, largest)
            # The weights first: a model must never stand there without them.
            for file in sorted(Path(made).iterdir(), key=lambda file: file.name == path.name):
                file.replace(folder / file.name)
    except OSError as error:
        raise UsageError(
            f"the output must be writable, got {path}: {error.strerror}",
            help="choose another place",
            id="RA003",
        ) from error


def _write_into(folder: Path, name: str, model: ir.Model, largest: int) -> None:
    """Write and check the model ``name``, and its weights where they are too large for it."""
    file = folder / name
    if weight(model) <= largest:
        file.write_bytes(serialize(model))
    else:
        apart = ir.external_data.unload_from_model(
            model.clone(), folder, f"{name}.data", size_threshold_bytes=_SMALL
        )
        file.write_bytes(ir.to_proto(apart).SerializeToString())
        _check(str(file))
    for each in folder.iterdir():
        with each.open("rb") as written:
            os.fsync(written.fileno())


def weight(model: ir.Model) -> int:
    """Return the bytes of a model's initializers."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)


def serialize(model: ir.Model) -> bytes:
    """Return a checked model as bytes, with every initializer inside.

    Raises:
        UnsupportedModelError: The model does not fit into 2 GiB, or is not valid ONNX.
    """
    size = weight(model)
    if size > LARGEST:
        raise UnsupportedModelError(
            f"the weights must fit into one message of 2 GiB, got {size / 2**30:.1f} GiB",
            help="write the model to a file",
        )
    # Initializers stored beside the source would be lost when the file goes elsewhere.
    ir.external_data.load_to_model(model)
    proto = ir.to_proto(model)
    _check(proto)
    return bytes(proto.SerializeToString())


def _check(model: str | onnx.ModelProto) -> None:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise UnsupportedModelError(
            f"the model to write must pass onnx.checker, got: {error}",
            help="check the source with onnx.checker; where it passes, please report this",
        ) from error
