"""A short run of the fuzzer; ``make fuzz`` runs 20,000 inputs."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator, MutableSequence
from pathlib import Path

import onnx
import pytest

from rnnaudit.loaders.onnx.contents import RULES
from tests.fuzz import corpus
from tests.fuzz.__main__ import hang, make, outcome
from tests.fuzz.mutate import OPERATORS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="limits need timers"),
]


@pytest.fixture(autouse=True)
def alarm():
    """Let a load that takes too long end in a failure."""
    before = signal.signal(signal.SIGPROF, hang)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    signal.signal(signal.SIGPROF, before)


def test_the_corpus_holds_models() -> None:
    assert {name for name, _ in corpus.read()} == corpus.BUILDERS.keys()


@pytest.mark.parametrize("seed", range(5))
def test_mutated_files_end_in_a_model_or_in_one_line(tmp_path: Path, seed: int) -> None:
    said = [outcome(tmp_path, *make(1000 + seed, index)) for index in range(26)]
    assert [(index, s) for index, s in enumerate(said) if s.startswith("FAIL")] == []
    assert "RA101" in said


@pytest.mark.parametrize(("seed", "index"), [(71, 248), (71, 1142), (72, 1630), (72, 2834)])
def test_files_that_once_ended_in_a_traceback_end_in_one_line(
    tmp_path: Path, seed: int, index: int
) -> None:
    assert not outcome(tmp_path, *make(seed, index)).startswith("FAIL")


@pytest.mark.parametrize("name", sorted(corpus.BUILDERS))
def test_files_of_the_corpus_are_read(tmp_path: Path, name: str) -> None:
    assert outcome(tmp_path, name, (corpus.FOLDER / name).read_bytes()) == "model"


def lists(graph: onnx.GraphProto) -> Iterator[tuple[str, MutableSequence]]:
    """Yield every list of parts in a graph, those of its bodies included."""
    yield from ((f"{graph.name}.{name}", getattr(graph, name)) for name in ("input", "output"))
    yield f"{graph.name}.node", graph.node
    for node in graph.node:
        for name in ("input", "output", "attribute"):
            yield f"{graph.name}.{node.op_type}.{name}", getattr(node, name)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from lists(attribute.g)


@pytest.mark.parametrize("name", ["scan.onnx", "loop.onnx", "branches.onnx", "chain.onnx"])
def test_a_graph_that_lacks_any_one_part_is_read_or_refused(tmp_path: Path, name: str) -> None:
    whole = onnx.ModelProto.FromString((corpus.FOLDER / name).read_bytes())
    places = [(where, i) for where, parts in lists(whole.graph) for i in range(len(parts))]
    assert len(places) > 20
    for where, i in places:
        model = onnx.ModelProto.FromString((corpus.FOLDER / name).read_bytes())
        del dict(lists(model.graph))[where][i]
        assert not outcome(tmp_path, name, model.SerializeToString()).startswith("FAIL"), (where, i)


def body(model: onnx.ModelProto) -> onnx.GraphProto:
    return next(a.g for node in model.graph.node for a in node.attribute if a.HasField("g"))


@pytest.mark.parametrize("name", ["scan.onnx", "loop.onnx"])
def test_a_state_declared_huge_takes_no_memory(tmp_path: Path, name: str) -> None:
    model = onnx.ModelProto.FromString((corpus.FOLDER / name).read_bytes())
    for graph in (model.graph, body(model)):
        for value in (*graph.input, *graph.output):
            for dim in value.type.tensor_type.shape.dim:
                dim.dim_value = 2**31 - 1
    assert not outcome(tmp_path, name, model.SerializeToString()).startswith("FAIL")


@pytest.mark.parametrize("name", ["scan.onnx", "loop.onnx"])
def test_a_step_of_other_operators_is_read_or_refused(tmp_path: Path, name: str) -> None:
    for op in OPERATORS:
        for i in range(4):
            model = onnx.ModelProto.FromString((corpus.FOLDER / name).read_bytes())
            body(model).node[i].op_type = op
            assert not outcome(tmp_path, name, model.SerializeToString()).startswith("FAIL"), op


@pytest.mark.parametrize("op", sorted(RULES))
def test_an_operator_without_its_inputs_is_read_or_refused(tmp_path: Path, op: str) -> None:
    whole = onnx.ModelProto.FromString((corpus.FOLDER / "chain.onnx").read_bytes())
    name = whole.graph.initializer[0].name
    for given in ([], [""], ["", name], [name, ""], [name, "", name]):
        model = onnx.ModelProto()
        model.CopyFrom(whole)
        model.graph.node.insert(0, onnx.helper.make_node(op, given, ["new"]))
        assert outcome(tmp_path, "chain.onnx", model.SerializeToString()) == "model", given
