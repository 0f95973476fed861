"""Whatever a stranger's file holds, loading runs no code and ends in one line or in a model."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper
from safetensors.torch import save, save_file
from torch import nn

from rnnaudit.errors import LoadError, RnnauditError, UnsupportedModelError
from rnnaudit.loaders import load

MIB = 1 << 20


def torch_bytes(checkpoint: object, *, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def rewritten(data: bytes, change: Callable[[str, bytes], bytes], method: int = 0) -> bytes:
    """Write a zip archive again, each record changed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", method) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return buffer.getvalue()


def refused(path: Path, match: str, kind: type[RnnauditError] = LoadError) -> None:
    with pytest.raises(kind, match=match) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3
    assert caught.value.id.startswith("RA1")


# Files that are no models.


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "none.pt", r"no such file: .*none\.pt; check the path")
    refused(Path("with\0null.pt"), "cannot read|no such file")


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    refused(tmp_path, "a model file was expected, and .* is a folder")


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "empty.pt").touch()
    refused(tmp_path / "empty.pt", r"empty\.pt is empty \(0 bytes\)")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    refused(tmp_path / "pipe.pt", "is not a regular file")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"# my model\nimport torch\n", r"is a text file \('# my model'\)"),
        ("modèle: 3\n".encode() * 600, "is a text file"),
        (json.dumps({"weight_map": {}}).encode(), "is a text file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(64), "is an HDF5 file"),
        (gzip.compress(b"weights" * 100), "is a gzip file"),
        (bytes(4) + b"TFL3" + bytes(60), "is a TensorFlow Lite model"),
        (b"GGUF" + bytes(60), "is a GGUF file"),
        (pickle.dumps({"weight_hh": [1.0]}), "is a Python pickle, which is never unpickled"),
        (b"\xff\xfe\xfd\xfc" * 16, r"of an unknown kind \(it begins with ff fe fd fc"),
        (struct.pack("<Q", 10**6) + b'{"a":{}}', "is a damaged safetensors file"),
    ],
    ids=["py", "yaml", "json", "hdf5", "gzip", "tflite", "gguf", "pickle", "noise", "header"],
)
def test_other_kinds_of_file_are_told_apart(tmp_path: Path, data: bytes, kind: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    refused(path, kind)


def test_zip_archives_without_a_model_are_told_apart(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", weight_hh=np.zeros((4, 1)))
    refused(tmp_path / "arrays.npz", "is a zip archive that holds no PyTorch model")


# Pickles that want code.


class Canary:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_is_executed(tmp_path: Path, zipped: bool) -> None:
    path, trace = tmp_path / "canary.pt", tmp_path / "trace"
    path.write_bytes(torch_bytes({"x": Canary(trace)}, zipped=zipped))
    refused(path, r"holds a pickled (posix|nt)\.mkdir, and reading it would run code")
    assert not trace.exists()


class Net(nn.Module):
    """A model that only its own script knows."""


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_a_pickled_module_is_refused_by_its_class_with_the_way_out(
    tmp_path: Path, zipped: bool
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(torch_bytes(Net(), zipped=zipped))
    refused(
        path,
        r"holds a pickled tests\.test_load_hostile\.Net, and reading it would run code; "
        r"save the weights alone, torch\.save\(model\.state_dict\(\), path\), where that class "
        r"is known, or run its code with --trust-pickle if you trust whoever made the file",
    )
    path.write_bytes(torch_bytes(nn.GRU(2, 3), zipped=zipped))
    refused(path, r"holds a pickled torch\.nn\.modules\.rnn\.GRU")
    with pytest.raises(LoadError) as caught:
        load(path)
    assert caught.value.id == "RA103"


# Sizes that lie.


def test_a_zip_bomb_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    zeros = bytes(MIB)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", b"\x80\x02}.")
        with archive.open("bomb/data/0", "w") as record:
            for _ in range(256):
                record.write(zeros)
    assert path.stat().st_size < MIB
    tracemalloc.start()
    refused(path, r"declares 268435\d+ bytes in a file of \d+")
    assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    tracemalloc.stop()


def test_a_tensor_declared_larger_than_its_record_is_refused(tmp_path: Path) -> None:
    def enlarge(name: str, record: bytes) -> bytes:
        return record.replace(b"K\x0c", b"K\xc8") if name.endswith("data.pkl") else record

    path = tmp_path / "model.pt"
    path.write_bytes(rewritten(torch_bytes({"weight_hh": torch.ones(12)}), enlarge))
    refused(path, r"is a damaged PyTorch file: record size \(48 bytes\) does not match")


def test_a_tensor_of_repeated_elements_is_not_unrolled(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    huge = torch.ones(1).expand(4 * 10**6, 10**6)
    torch.save({"weight_hh": huge, "weight_ih": huge}, path)
    refused(path, r"weight_\wh claims 4000000000000 elements, more than are stored")
    torch.save({"weight_hh_g": torch.ones(1), "weight_hh_v": huge}, path)
    refused(path, "its parts claim more elements than are stored", UnsupportedModelError)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_file_is_damaged(tmp_path: Path, zipped: bool, keep: float) -> None:
    path = tmp_path / "model.pt"
    data = torch_bytes(nn.LSTM(3, 8).state_dict(), zipped=zipped)
    path.write_bytes(data[: int(keep * len(data))])
    refused(path, "is a damaged (zip archive|PyTorch file): ")


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}, "is a damaged safe"),
        ({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]}}, "is a damaged safe"),
        ({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "is a damaged safe"),
        ({"w": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}, "is a damaged safe"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, "is a damaged safe"),
        ({"w": 3}, "is a damaged safe"),
    ],
)
def test_a_safetensors_header_that_lies_is_refused(
    tmp_path: Path, header: dict[str, object], match: str
) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    refused(path, match)


# Shapes that never end.


def test_a_list_that_holds_itself_is_walked_once(tmp_path: Path) -> None:
    loop: dict[str, object] = dict(nn.GRU(2, 3).state_dict())
    loop["again"] = [loop, {"twice": loop}]
    path = tmp_path / "model.pt"
    torch.save(loop, path)
    assert [stack.name for stack in load(path).stacks] == ["gru"]


def test_lists_of_lists_of_the_same_list_take_no_time(tmp_path: Path) -> None:
    laughs: list[object] = []
    for _ in range(40):
        laughs = [laughs] * 40
    path = tmp_path / "model.pt"
    torch.save({"model": nn.GRU(2, 3).state_dict(), "lol": laughs}, path)
    start = time.monotonic()
    assert len(load(path).stacks) == 1
    assert time.monotonic() - start < 5


def test_a_bottomless_checkpoint_is_refused(tmp_path: Path) -> None:
    nested: dict[str, object] = {}
    for _ in range(200):
        nested = {"model": nested}
    path = tmp_path / "model.pt"
    torch.save(nested, path)
    refused(path, "this one is nested too deeply")


def test_a_hundred_thousand_keys_are_no_trouble(tmp_path: Path) -> None:
    names = [*(f"layers.{i}.weight" for i in range(100_000)), "rnn.weight_ih", "rnn.weight_hh"]
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * i, 4 * i + 4]}
            for i, name in enumerate(names)
        }
    ).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * len(names)))
    start = time.monotonic()
    assert [stack.name for stack in load(path).stacks] == ["rnn"]
    assert time.monotonic() - start < 60


def test_thousands_of_stacks_are_no_trouble(tmp_path: Path) -> None:
    one = nn.RNNCell(1, 1).state_dict()
    path = tmp_path / "m.safetensors"
    save_file({f"c{i}.{k}": v.clone() for i in range(2_000) for k, v in one.items()}, path)
    start = time.monotonic()
    assert len(load(path).stacks) == 2_000
    assert time.monotonic() - start < 30


def test_a_name_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"model." * 50_000 + "weight_hh": torch.ones(1, 1)}, path)
    refused(path, "names a tensor with 300009 characters, and at most 1000 are read")


def test_names_are_never_paths(tmp_path: Path) -> None:
    def renamed(name: str) -> str:
        return name.replace("archive/", "../../archive/")

    data = torch_bytes(nn.GRU(2, 3).state_dict())
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for entry in old.infolist():
            new.writestr(renamed(entry.filename), old.read(entry))
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(buffer.getvalue())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RnnauditError):
        load(folder / "model.pt")
    assert sorted(tmp_path.rglob("*")) == before


# Graphs without end.

CORPUS = Path(__file__).parent / "fuzz" / "corpus"


def graph_file(path: Path, nodes: list[onnx.NodeProto], functions: Sequence[Any] = ()) -> Path:
    """Write a graph from x to y."""
    x, y = (helper.make_tensor_value_info(name, 1, ["N"]) for name in "xy")
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y]), functions=functions)
    path.write_bytes(model.SerializeToString())
    return path


def test_a_million_nodes_are_refused_in_bounded_time(tmp_path: Path) -> None:
    node = onnx.GraphProto(node=[helper.make_node("Identity", ["x"], ["y"])]).SerializeToString()
    model = helper.make_model(onnx.GraphProto.FromString(node * 10**6))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    tracemalloc.start()
    start = time.process_time()
    refused(path, "has 1,000,000 nodes or more, and at most 200,000 are read")
    assert time.process_time() - start < 20
    assert tracemalloc.get_traced_memory()[1] < 128 * MIB
    tracemalloc.stop()


def test_functions_that_double_at_each_level_are_not_written_out(tmp_path: Path) -> None:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
    functions = [
        helper.make_function(
            "d",
            f"f{i}",
            ["x"],
            ["y"],
            [
                helper.make_node(f"f{i + 1}", ["x"], ["z"], domain="d"),
                helper.make_node(f"f{i + 1}", ["z"], ["y"], domain="d"),
            ],
            imports,
        )
        for i in range(60)
    ]
    call = helper.make_node("f0", ["x"], ["y"], domain="d")
    path = graph_file(tmp_path / "m.onnx", [call], functions)
    refused(path, r"the functions of the model make 1,152,921,504,606,846,976 nodes, more than")
    functions[-1].node[0].op_type = "f0"
    refused(graph_file(path, [call], functions), "a function must not call itself, and f")


def field(number: int, payload: bytes) -> bytes:
    """Encode one field of a protobuf message."""
    size, length = b"", len(payload)
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + payload


@pytest.mark.parametrize("depth", [5, 25, 1000])
def test_branches_inside_branches_end_in_one_line(tmp_path: Path, depth: int) -> None:
    kind = onnx.AttributeProto(name="then_branch", type="GRAPH").SerializeToString()
    graph = field(1, onnx.NodeProto(op_type="Neg", output=["y"]).SerializeToString())
    for _ in range(depth):
        node = onnx.NodeProto(op_type="If", output=["y"]).SerializeToString()
        graph = field(1, node + field(5, kind + field(6, graph)))
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.ModelProto(ir_version=8).SerializeToString() + field(7, graph))
    if depth < 30:
        refused(path, f"no recurrence found .*: looked at {depth + 1} nodes", UnsupportedModelError)
    else:
        refused(path, "is damaged or something else")


# Every format, cut or blown up.


@pytest.mark.parametrize("name", sorted(path.name for path in CORPUS.iterdir()))
def test_a_file_of_any_format_that_was_cut_is_refused(tmp_path: Path, name: str) -> None:
    data = (CORPUS / name).read_bytes()
    path = tmp_path / name
    for keep in (0.05, 0.35, 0.65, 0.95):
        path.write_bytes(data[: int(keep * len(data))])
        refused(path, r"damaged|is of an unknown kind|no recurrence|holds no", RnnauditError)


@pytest.mark.parametrize("name", ["script.pt", "exported.pt2"])
def test_an_archive_of_any_format_that_blows_up_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with zipfile.ZipFile(CORPUS / name) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            new.writestr(entry, old.read(entry))
        folder = old.namelist()[0].partition("/")[0]
        new.writestr(f"{folder}/data/999", bytes(256 * MIB), zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    refused(path, r"declares 268\d{6} bytes in a file of \d+")
    assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    tracemalloc.stop()


# Random damage.

ORIGINALS = [
    torch_bytes({"model": nn.LSTM(2, 3).state_dict(), "epoch": 1}),
    torch_bytes(nn.GRU(2, 3).state_dict(), zipped=False),
    save(nn.RNN(2, 3).state_dict()),
]


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    original=st.sampled_from(ORIGINALS),
    edits=st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4)), min_size=1, max_size=4),
    cut=st.one_of(st.none(), st.floats(0, 1)),
)
def test_damage_of_any_kind_ends_in_a_model_or_in_one_line(
    tmp_path: Path,
    original: bytes,
    edits: list[tuple[float, bytes]],
    cut: float | None,
) -> None:
    data = bytearray(original)
    for where, patch in edits:
        at = int(where * len(data))
        data[at : at + len(patch)] = patch
    path = tmp_path / "model.bin"
    path.write_bytes(data if cut is None else data[: int(cut * len(data))])
    try:
        load(path)
        line = ""
    except RnnauditError as error:
        line = str(error)
    assert "\n" not in line
    assert len(line) < 1000
