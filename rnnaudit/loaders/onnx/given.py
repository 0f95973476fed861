"""Weights that a graph takes as inputs become weights that it stores, once a file gives them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from rnnaudit.errors import LoadError
from rnnaudit.loaders.interface import brief, listed
from rnnaudit.loaders.onnx.reading import Array

_FIRST_WITHOUT_INPUT = 4
"""The IR version from which a stored value need not be a graph input too."""


def read_values(path: Path) -> dict[str, Array]:
    """Read named arrays from a .npz or .safetensors file; nothing is unpickled.

    Raises:
        LoadError: It is missing, damaged, or of another kind.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from rnnaudit.loaders.archive import Archive

    try:
        with path.open("rb") as file:
            head = file.read(4)
        if Archive.open(head, path) is None:
            return dict(load_file(path))
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (SafetensorError, OSError, ValueError, EOFError, KeyError, TypeError) as error:
        raise LoadError(
            f"weights must be arrays in a .npz or .safetensors file, and {path} cannot be read "
            f"as one: {brief(error)}",
            help="name each array as the graph input that it is for",
        ) from None


def give(model: ir.Model, values: Mapping[str, Array], path: Path) -> None:
    """Store values in place of the graph inputs of their names.

    Args:
        model: The graph, which is changed.
        values: By graph input, of its type and shape.
        path: Where the values come from.

    Raises:
        LoadError: There is no such input, or it takes another type or shape.
    """
    inputs = {str(value.name): value for value in model.graph.inputs}
    for name, array in values.items():
        value = inputs.get(name)
        if value is None:
            raise LoadError(
                f"weights must be named as graph inputs, and {path} holds {name!r}, which is none",
                help=f"the inputs are {listed(list(inputs), most=8)}",
            )
        shape = [] if value.shape is None else [*value.shape]
        fits = len(shape) == array.ndim and all(
            not isinstance(wanted, int) or wanted == size
            for wanted, size in zip(shape, array.shape, strict=True)
        )
        dtype = value.dtype
        if (value.shape is not None and not fits) or (
            dtype is not None and dtype != ir.DataType.from_numpy(array.dtype)
        ):
            wanted = "any type" if dtype is None else dtype.name.lower()
            raise LoadError(
                f"graph input {name!r} takes {wanted} of shape {tuple(map(str, shape))}, and "
                f"{path} holds {array.dtype} of shape {array.shape}",
                help="save the array as the graph takes it",
            )
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(array, name=name)
        value.shape = ir.Shape(array.shape)
        model.graph.initializers[name] = value
    model.ir_version = max(model.ir_version, _FIRST_WITHOUT_INPUT)
