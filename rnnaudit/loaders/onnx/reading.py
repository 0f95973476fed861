"""From bytes to a graph, trusting nothing: sizes are checked before memory is taken.

External data is read beside the model only: its location is a bare relative path without
``..``, and after symbolic links are followed it still lies in the model's folder (the
folder as given, or the one that the model itself is a link into, as download caches do).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from rnnaudit.errors import LoadError
from rnnaudit.loaders.interface import brief

MAX_BYTES = 2**31 - 1
"""A protobuf message cannot be larger; larger models keep their weights outside."""

MAX_NODES = 200_000

Array = np.ndarray[Any, Any]

# onnx_ir warns of dangling names and the like; what matters of it is said by the loader.
logging.getLogger("onnx_ir").addHandler(logging.NullHandler())


def read_graph(path: Path) -> ir.Model:
    """Parse an ONNX file into its graph; weights stay where they are until they are asked for.

    Raises:
        LoadError: Not an ONNX model, a damaged one, or one that reaches outside its folder.
    """
    model = _deserialised(path)
    for tensor in _external(model):
        _place(tensor, path)
    return model


def beside(path: Path) -> frozenset[Path]:
    """Return the files that a model keeps its weights in, as its folder names them.

    Links are not followed: what a link leads to may be another file the next time.

    Raises:
        LoadError: As `read_graph`.
    """
    found = _external(_deserialised(path))
    return frozenset(path.parent / str(tensor.location) for tensor in found)


def _deserialised(path: Path) -> ir.Model:
    proto = _parse(path)
    if not proto.HasField("graph") or not proto.graph.node:
        raise LoadError(
            f"an ONNX model was expected, and {path} holds no graph", help="export it again"
        )
    nodes, readable = _census(proto)
    if not readable:
        raise LoadError(
            f"names must be UTF-8 text, and some in {path} are not",
            help="the file is damaged; export it again",
        )
    if nodes > MAX_NODES:
        raise LoadError(
            f"{path} has {nodes:,} nodes or more, and at most {MAX_NODES:,} are read",
            help="cut out the recurrent part, e.g. with onnx.utils.extract_model",
        )
    try:
        model = ir.serde.deserialize_model(proto)
    except (ir.serde.SerdeError, ValueError, TypeError, KeyError, RecursionError) as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        raise LoadError(
            f"{path} is not a valid ONNX model: {brief(root)}", help="export it again"
        ) from None
    return model


def _parse(path: Path) -> onnx.ModelProto:
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise LoadError(
            f"an ONNX file is at most 2 GiB, and {path} has {size:,} bytes",
            help="save it with external data",
        )
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(path.read_bytes())
    except (DecodeError, OSError) as error:
        raise LoadError(
            f"an ONNX model was expected, and {path} is damaged or something else ({brief(error)})",
            help="download or export it again",
        ) from None
    return proto


def _census(proto: onnx.ModelProto) -> tuple[int, bool]:
    """Count the nodes of every graph, function and body, and check that all names are text.

    Counting ends where there are too many.
    """
    total, readable = 0, True
    waiting: list[Any] = [proto.graph, *proto.functions]
    while waiting:
        graph = waiting.pop()
        total += len(graph.node)
        if total > MAX_NODES:
            return total, readable
        names = [graph.name]
        if isinstance(graph, onnx.GraphProto):
            values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
            names += [value.name for value in values]
        else:
            names += [graph.domain, *graph.input, *graph.output]
        for node in graph.node:
            names += [node.name, node.op_type, node.domain, *node.input, *node.output]
            for attribute in node.attribute:
                names.append(attribute.name)
                if attribute.type == onnx.AttributeProto.GRAPH:
                    waiting.append(attribute.g)
                waiting.extend(attribute.graphs)
        # The protobuf library hands out bytes where text is not UTF-8.
        readable = readable and all(isinstance(name, str) for name in names)
    return total, readable


def _external(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    while graphs:
        graph = graphs.pop()
        if isinstance(graph, ir.Graph):
            for value in graph.initializers.values():
                if isinstance(value.const_value, ir.ExternalTensor):
                    yield value.const_value
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    graphs.append(attribute.as_graph())
                elif attribute.type == ir.AttributeType.TENSOR and isinstance(
                    attribute.value, ir.ExternalTensor
                ):
                    yield attribute.value


def _place(tensor: ir.ExternalTensor, path: Path) -> None:
    """Let an external tensor be read beside the model, or say why it cannot be."""
    location = str(tensor.location)
    what = f"tensor {tensor.name!r} of {path}"
    if _escapes(location):
        raise LoadError(
            f"{what} must keep its data beside the model, got the location {location!r}",
            help="external data is read from the model's folder only",
        )
    data = path.parent / location
    if not data.is_file():
        raise LoadError(
            f"{what} keeps its data in {location!r}, and {data} is missing",
            help="put the data file beside the model",
        )
    homes = {path.parent.resolve(), path.resolve().parent}
    if not any(data.resolve().is_relative_to(home) for home in homes):
        raise LoadError(
            f"{what} must keep its data beside the model, and {data} is a link that leads away",
            help="copy the data file into the model's folder",
        )
    wanted = math.ceil(math.prod(_static(tensor.shape)) * tensor.dtype.bitwidth / 8)
    offset, held = tensor.offset or 0, data.stat().st_size
    length = held - offset if tensor.length is None else tensor.length
    if offset < 0 or offset + length > held or length < wanted:
        raise LoadError(
            f"{what} needs {wanted:,} bytes from {offset:,} on, and {data} has {held:,}",
            help="the data file belongs to another model or is cut off",
        )
    home = next(home for home in homes if data.resolve().is_relative_to(home))
    tensor.base_dir = str(home)
    if data.resolve() != (home / location).resolve():  # the model is a link, its data too
        tensor._location = str(data.resolve().relative_to(home))


def _static(shape: ir.Shape) -> tuple[int, ...]:
    return tuple(int(d) for d in shape)  # type: ignore[arg-type]


def _escapes(location: str) -> bool:
    posix, windows = PurePosixPath(location), PureWindowsPath(location)
    return (
        not location
        or "\0" in location
        or posix.is_absolute()
        or bool(windows.drive)
        or windows.root != ""
        or ".." in posix.parts
        or ".." in windows.parts
    )


def array(tensor: ir.TensorProtocol, what: str) -> Array:
    """Return a stored tensor's values.

    Raises:
        LoadError: Its data does not fit its declared shape or type.
    """
    try:
        return np.asarray(tensor.numpy())
    except (
        ValueError,
        TypeError,
        OSError,
        OverflowError,
        NotImplementedError,
        AssertionError,
    ) as error:
        raise LoadError(
            f"{what} has a declared shape or type that its data does not fit: {brief(error)}",
            help="the file is damaged; export it again",
        ) from None
