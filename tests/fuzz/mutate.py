"""Mutations: of bytes, and of what each format is made of (fields, members, headers)."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper

EXTREMES = (0, 1, -1, 2, 3, 7, 127, 255, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, 1e-45, 1e308, float("inf"), float("-inf"), float("nan"))
OPERATORS = (
    "LSTM", "GRU", "RNN", "If", "Loop", "Scan", "Reshape", "Transpose", "Slice", "Concat", "Split",
    "Gather", "Expand", "ConstantOfShape", "Tile", "Squeeze", "Unsqueeze", "Where", "Shape", "Cast",
    "ScatterND", "DequantizeLinear", "MatMul", "Gemm", "Identity", "DynamicQuantizeLSTM", "Dropout",
)  # fmt: skip
ATTRIBUTES = (
    "axis", "axes", "perm", "hidden_size", "layout", "clip", "direction", "value", "split", "to",
    "num_scan_inputs", "activations", "scan_input_axes", "linear_before_reset",
)  # fmt: skip


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Return a file like ``data`` with one to four things changed."""
    structured = _structured(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        if structured is not None and rng.random() < 0.75:
            data = structured(data, rng)
        else:
            data = rng.choice(BYTES)(data, others, rng)
    return data


def _structured(data: bytes) -> Callable[[bytes, random.Random], bytes] | None:
    if data[:2] == b"PK":
        return _archive
    if data[8:9] == b"{":
        return _safetensors
    return _graph if data[:1] == b"\x08" else None


# ------------------------------------------------------------------------------- bytes


def _flip(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _i in range(rng.randint(1, 8)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    form = rng.choice(["<B", "<H", "<I", "<Q"])
    patch = struct.pack(form, rng.choice(EXTREMES) % (1 << (8 * struct.calcsize(form))))
    return data[:at] + patch + data[at + len(patch) :]


def _cut(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _delete(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.randint(1, 64) :]


def _repeat(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    chunk = data[start : start + rng.randint(1, 256)]
    return data[:start] + chunk * rng.randint(2, 50) + data[start:]


def _splice(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    other = rng.choice(others)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


BYTES = (_flip, _flip, _overwrite, _overwrite, _cut, _delete, _repeat, _splice)


# ------------------------------------------------------------------------------ archives


def _archive(data: bytes, rng: random.Random) -> bytes:
    """Change a member, its name or its presence, with checksums that fit again."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    except Exception:  # an earlier mutation broke it
        return _flip(data, (), rng)
    if not members:
        return data
    at = rng.randrange(len(members))
    name, content = members[at]
    match rng.randrange(8):
        case 0:
            del members[at]
        case 1:
            members.append((name, content))
        case 2:
            members[at] = (rng.choice(("../" + name, "/" + name, name * 3, "data.pkl")), content)
        case 3:
            members[at] = (name, rng.choice(members)[1])
        case _:
            edit = _json if content[:1] in (b"{", b"[") else rng.choice(BYTES)
            members[at] = (name, edit(content, (content,), rng))
    buffer = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name_, content_ in members:
            archive.writestr(zipfile.ZipInfo(name_), content_, method)
    return buffer.getvalue()


def _json(data: bytes, _: Sequence[bytes], rng: random.Random) -> bytes:
    try:
        return json.dumps(_tree(json.loads(data), rng)).encode()
    except ValueError:
        return _flip(data, (), rng)


def _tree(root: Any, rng: random.Random) -> Any:
    """Change one leaf, chosen by a random walk."""
    holder, key, node = None, None, root
    while isinstance(node, dict | list) and node and rng.random() < 0.92:
        holder, key = node, rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = holder[key]
    new = rng.choice((*EXTREMES, *FLOATS[:4], None, "", "x" * 2000, [], {}, True, [[[[0]]]], node))
    if holder is None:
        return new
    if rng.random() < 0.15:
        del holder[key]
    else:
        holder[key] = new
    return root


def _safetensors(data: bytes, rng: random.Random) -> bytes:
    """Change the header, and mostly let its length fit."""
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    header = _json(header, (), rng)
    claimed = len(header) if rng.random() < 0.85 else rng.choice(EXTREMES) % 2**64
    return struct.pack("<Q", claimed) + header + rest


# --------------------------------------------------------------------------------- ONNX


def _graph(data: bytes, rng: random.Random) -> bytes:
    """Change a field of the protobuf: of a node, a stored tensor, a value or the model."""
    try:
        model = onnx.ModelProto.FromString(data)
    except DecodeError:
        return _flip(data, (), rng)
    graphs = [model.graph]
    for graph in graphs:
        graphs += [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    graph = rng.choice(graphs)
    try:
        rng.choice((_node, _node, _node, _wires, _wires, _stored, _stored, _whole))(
            model, graph, rng
        )
        return model.SerializeToString()
    except (ValueError, TypeError, IndexError, RecursionError):
        return data


def _node(_: onnx.ModelProto, graph: onnx.GraphProto, rng: random.Random) -> None:
    node = rng.choice(graph.node)
    match rng.randrange(7):
        case 0:
            node.op_type = rng.choice(OPERATORS)
        case 1:
            node.domain = rng.choice(("", "ai.onnx", "com.microsoft", "nowhere"))
        case 2:
            del node.attribute[rng.randrange(len(node.attribute)) :]
        case 3:
            attribute = rng.choice(node.attribute)
            attribute.type = rng.randrange(15)
        case 4:
            value = rng.choice((*EXTREMES, *FLOATS, [1] * 9, [rng.choice(EXTREMES)] * 2, "reverse"))
            node.attribute.append(helper.make_attribute(rng.choice(ATTRIBUTES), value))
        case 5:
            attribute = rng.choice(node.attribute)
            attribute.i = rng.choice(EXTREMES)
            attribute.f = rng.choice((*FLOATS[:3], 2.5))
            for i in range(len(attribute.ints)):
                attribute.ints[i] = rng.choice(EXTREMES)
        case _:
            copies = [node] * rng.choice((1, 2, 40))
            graph.node.extend(copies)


def _wires(_: onnx.ModelProto, graph: onnx.GraphProto, rng: random.Random) -> None:
    """Join what should not be joined: cycles, values that nothing gives, names given twice."""
    names = [name for node in graph.node for name in (*node.input, *node.output)]
    names += [value.name for value in (*graph.input, *graph.output, *graph.initializer)]
    node = rng.choice(graph.node)
    side = rng.choice((node.input, node.output))
    match rng.randrange(4):
        case 0:
            side[rng.randrange(len(side))] = rng.choice((*names, "", "nothing"))
        case 1:
            side.append(rng.choice(names))
        case 2:
            del side[rng.randrange(len(side))]
        case _:
            one, two = rng.randrange(len(graph.node)), rng.randrange(len(graph.node))
            first, second = onnx.NodeProto(), onnx.NodeProto()
            first.CopyFrom(graph.node[one])
            second.CopyFrom(graph.node[two])
            graph.node[one].CopyFrom(second)
            graph.node[two].CopyFrom(first)


def _stored(_: onnx.ModelProto, graph: onnx.GraphProto, rng: random.Random) -> None:
    if rng.random() < 0.3:
        value = rng.choice((*graph.input, *graph.output))
        shape = value.type.tensor_type.shape
        if rng.random() < 0.5:
            del shape.dim[:]
        else:
            rng.choice(shape.dim).dim_value = rng.choice(EXTREMES)
        return
    tensor = rng.choice(graph.initializer)
    match rng.randrange(6):
        case 0:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(EXTREMES)
        case 1:
            tensor.dims.append(rng.choice((1, 2, 2**40)))
        case 2:
            tensor.data_type = rng.randrange(30)
        case 3:
            tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
        case 4:
            tensor.data_location = TensorProto.EXTERNAL
            for key in ("location", "offset", "length"):
                entry = tensor.external_data.add()
                entry.key = key
                entry.value = rng.choice(("../x", "/etc/passwd", "", "0", "-1", str(2**63), "x"))
        case _:
            tensor.name = rng.choice(graph.initializer).name


def _whole(model: onnx.ModelProto, graph: onnx.GraphProto, rng: random.Random) -> None:
    match rng.randrange(5):
        case 0:
            model.opset_import[0].version = rng.choice(EXTREMES)
        case 1:
            model.ir_version = rng.choice(EXTREMES)
        case 2:
            function = model.functions.add()
            function.name, function.domain = rng.choice(graph.node).op_type, ""
            function.node.extend(graph.node)
        case 3:
            node = rng.choice(graph.node)  # a body that holds the graph it is in
            copy = onnx.GraphProto()
            copy.CopyFrom(graph)
            node.op_type = rng.choice(("If", "Loop", "Scan"))
            node.attribute.append(helper.make_attribute("body", copy))
            node.attribute.append(helper.make_attribute("then_branch", copy))
        case _:
            del graph.node[rng.randrange(len(graph.node))]
