"""A cached report is the one that was found, and only of what has not changed in any byte."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from rnnaudit.cli import audits, cache
from rnnaudit.loaders.onnx.reading import beside
from rnnaudit.reports.json import JsonRenderer
from rnnaudit.reports.reading import read
from tests import reports_by_hand as by_hand
from tests.program import run
from tests.test_cli import api  # noqa: F401 (a fixture)


@pytest.fixture
def folder(monkeypatch, tmp_path, api):  # noqa: F811
    """Run in a folder with a model, data and a cache of its own; nothing is audited for real."""
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "cache"))
    Path("m.pt").write_bytes(b"weights")
    np.save("x.npy", np.zeros((4, 9, 3)))
    return tmp_path / "cache"


INSPECT = ("inspect", "m.pt", "--data", "x.npy")


@pytest.mark.parametrize("form", ["text", "json", "sarif"])
def test_an_unchanged_model_is_audited_once(folder, api, capsys, form):  # noqa: F811
    first = run(capsys, *INSPECT, "--format", form)
    second = run(capsys, *INSPECT, "--format", form, "--verbose")
    again = run(capsys, *INSPECT, "--format", form)
    assert len(api.calls) == 1
    assert again == first
    assert second[2].startswith("cached: m.pt and all that its audit depends on are unchanged")
    assert run(capsys, "gate", "m.pt", "--data", "x.npy")[0] == 0
    assert len(api.calls) == 1  # gate asks what inspect asked


CHANGES = {
    "the model": lambda: Path("m.pt").write_bytes(b"other"),
    "the data": lambda: np.save("x.npy", np.ones((4, 9, 3))),
    "our code": lambda: None,
    "an option": lambda: ("--eps", "0.1"),
    "the seed": lambda: ("--seed", "1"),
    "no cache": lambda: ("--no-cache",),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_is_audited_again(folder, api, capsys, monkeypatch, what):  # noqa: F811
    run(capsys, *INSPECT)
    more = CHANGES[what]()
    if what == "our code":
        monkeypatch.setattr(cache, "_code", lambda: "other")
    run(capsys, *INSPECT, *(more if isinstance(more, tuple) else ()))
    assert len(api.calls) == 2


@pytest.mark.parametrize("more", [("--time-budget", "9"), ("--witness", "w.npz")])
def test_what_need_not_repeat_is_not_kept(folder, api, capsys, more):  # noqa: F811
    for _ in range(2):
        run(capsys, *INSPECT, *more)
    assert len(api.calls) == 2
    assert not folder.exists()


def test_data_that_code_makes_are_never_cached():
    question = audits.Question(
        eps=1e-3,
        norm="max",
        layer=None,
        data="module:function",
        time_axis=None,
        batch_axis=None,
        input_range=None,
        confidence=0.95,
        seed=0,
        time_budget=None,
        pictures=False,
    )
    assert not question.repeatable
    assert replace(question, data="folder/x.npz").repeatable


HOSTILE = ["", "null", "[]", "{", "[" * 100_000, '{"beside": {}, "report": {}}', "\udc80"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_an_entry_that_is_damaged_is_replaced_in_silence(folder, api, capsys, text):  # noqa: F811
    first = run(capsys, *INSPECT)
    (entry,) = folder.iterdir()
    good = entry.read_bytes()
    entry.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert run(capsys, *INSPECT) == first
    assert (len(api.calls), entry.read_bytes()) == (2, good)
    entry.write_bytes(good[: len(good) // 2])
    assert run(capsys, *INSPECT) == first
    assert (len(api.calls), entry.read_bytes()) == (3, good)


def test_a_folder_that_cannot_be_written_is_no_error(folder, api, capsys):  # noqa: F811
    folder.write_text("a file")
    assert run(capsys, *INSPECT)[0] == 0
    assert run(capsys, *INSPECT)[0] == 0
    assert len(api.calls) == 2


def test_runs_side_by_side_see_whole_entries_only(folder):
    model, name = Path("m.pt"), "a" * 64

    def turn(i):
        report = replace(by_hand.STABLE, data=f"{i} " * 5_000)
        cache.keep(name, report, {})
        found = cache.find(name, model)
        return found is not None and len(set(found.data.split())) == 1

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(turn, range(40)))
    assert [path.name for path in folder.iterdir()] == [f"{name}.json"]


def test_the_oldest_entries_go(folder, monkeypatch):
    monkeypatch.setattr(cache, "MOST", 3)
    for i in range(5):
        cache.keep(f"{i}", by_hand.STABLE, {})
        time.sleep(0.01)
    assert sorted(path.stem for path in folder.iterdir()) == ["2", "3", "4"]


def test_numbers_that_json_cannot_hold_are_not_kept(folder):
    endless = replace(by_hand.BACH, lower=replace(by_hand.BACH.lower, value=float("inf")))
    cache.keep("a", replace(by_hand.STABLE, recurrences=(endless,)), {})
    assert not folder.exists()


def test_weights_beside_an_onnx_model_are_part_of_it(folder):
    beside_weights(2.0)
    path = Path("m.onnx")
    assert {file.name for file in beside(path)} == {"w.bin"}
    cache.keep("a", by_hand.STABLE, cache.digests(path, beside(path)))
    assert cache.find("a", path) is not None
    Path("w.bin").write_bytes(b"\1" * 256)
    assert cache.find("a", path) is None
    Path("w.bin").unlink()
    assert cache.find("a", path) is None


def beside_weights(values):
    """Write m.onnx, a sum with weights that lie beside it in w.bin."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64])],
        [onnx.numpy_helper.from_array(np.full(64, values, np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)


FILES = {
    "the weights beside it": lambda: Path("w.bin").write_bytes(b"\1" * 256),
    "the model": lambda: Path("m.onnx").write_bytes(Path("m.onnx").read_bytes() + b"\x1a\0"),
    "the data": lambda: np.save("x.npy", np.ones((4, 9, 3))),
    "nothing": lambda: None,
}


@pytest.mark.parametrize("what", FILES)
def test_what_changes_while_it_is_audited_is_not_kept(folder, api, capsys, monkeypatch, what):  # noqa: F811
    beside_weights(2.0)
    audit = api.audit

    def slowly(*arguments, **settings):
        FILES[what]()
        return audit(*arguments, **settings)

    monkeypatch.setattr(api, "audit", slowly)
    assert run(capsys, "inspect", "m.onnx", "--data", "x.npy")[0] == 0
    assert folder.exists() == (what == "nothing")


def test_weights_behind_a_link_that_is_turned_are_other_weights(folder):
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Add", ["x", "w"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64])],
            [onnx.numpy_helper.from_array(np.zeros(64, np.float32), "w")],
        )
    )
    for place in ("store", "store/old", "store/new", "here"):
        Path(place).mkdir()
    stored = Path("store/old/w.bin")
    onnx.save(
        model, "store/old/m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    Path("store/old/m.onnx").rename("store/m.onnx")
    Path("store/new/w.bin").write_bytes(b"\1" * stored.stat().st_size)
    path, link = Path("here/m.onnx"), Path("here/w.bin")
    path.symlink_to("../store/m.onnx")
    link.symlink_to("../store/old/w.bin")
    cache.keep("a", by_hand.STABLE, cache.digests(path, beside(path)))
    assert cache.find("a", path) == by_hand.STABLE
    link.unlink()
    link.symlink_to("../store/new/w.bin")
    assert cache.find("a", path) is None


def test_a_cached_verdict_needs_nothing_slow(folder, capsys):
    run(capsys, "inspect", "m.pt")
    code = (
        "import sys\nfrom rnnaudit.cli.app import main\n"
        "code = main(['gate', 'm.pt', '--format', 'json'])\n"
        "slow = ('torch', 'onnx', 'onnx_ir', 'scipy', 'onnxruntime', 'numpy', 'matplotlib')\n"
        "print(code, [m for m in slow if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stderr == "0 []\n"
    assert json.loads(result.stdout)["passed"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1" + "0" * 400])
def test_a_number_that_no_report_holds_is_refused(number):
    text = JsonRenderer().render(by_hand.STABLE).replace('"seed": 0', f'"seed": {number}')
    assert number in text
    with pytest.raises(ValueError, match=r"too large|invalid literal"):
        read(text)
