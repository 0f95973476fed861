"""Writing a model: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir

from rnnaudit.errors import UnsupportedModelError, UsageError

_LARGEST = 2**31 - 1  # bytes in one protobuf message


def write(model: ir.Model, path: str | Path) -> None:
    """Check a model and put it at ``path`` in one step; on failure nothing is left behind.

    Raises:
        UsageError: The folder does not exist or cannot be written to.
        UnsupportedModelError: The model does not fit into one file of 2 GiB, or is not valid.
    """
    path = Path(path)
    data = serialize(model)
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
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        if isinstance(error, OSError):
            raise UsageError(
                f"the output must be writable, got {path}: {error.strerror}",
                help="choose another place",
                id="RA003",
            ) from error
        raise


def serialize(model: ir.Model) -> bytes:
    """Return a checked model as bytes, with every initializer inside.

    Raises:
        UnsupportedModelError: The model does not fit into 2 GiB, or is not valid ONNX.
    """
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    if size > _LARGEST:
        raise UnsupportedModelError(
            f"the weights must fit into one file of 2 GiB, got {size / 2**30:.1f} GiB",
            help="truncate a part of the model",
        )
    # Initializers stored beside the source would be lost when the file goes elsewhere.
    ir.external_data.load_to_model(model)
    proto = ir.to_proto(model)
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise UnsupportedModelError(
            f"the model to write must pass onnx.checker, got: {error}",
            help="check the source with onnx.checker; where it passes, please report this",
        ) from error
    return bytes(proto.SerializeToString())
