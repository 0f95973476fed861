"""``torch.export`` archives (.pt2): weights as raw bytes beside a graph in JSON.

The graph is read as data. It tells which calls use the weights, with which nonlinearity, and
whether dropout was left on or the number of steps was fixed.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rnnaudit.errors import LoadError, UnsupportedModelError
from rnnaudit.findings import finding
from rnnaudit.loaders.archive import Archive, opened
from rnnaudit.loaders.grouping import slot_of
from rnnaudit.loaders.interface import Loader, brief
from rnnaudit.loaders.named import Source, read_model
from rnnaudit.loaders.nested import named_tensors
from rnnaudit.loaders.state_dict import read_checkpoint
from rnnaudit.model import RELU, TANH, Activation, Model
from rnnaudit.results import Finding

_WEIGHTS = "data/weights/model_weights_config.json"
_OLD_WEIGHTS = "serialized_state_dict.pt"
_GRAPHS = ("models/model.json", "serialized_exported_program.json")
_DTYPES = {6: torch.float16, 7: torch.float32, 8: torch.float64, 13: torch.bfloat16}
"""The numbers of ``torch.export``'s schema; other kinds are no weights of a recurrence."""
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError, RuntimeError, OverflowError)
"""What reading JSON of another form, or tensors of impossible sizes, leads to."""


class ExportedLoader:
    """Read the weights of what ``torch.export.save`` wrote."""

    name = "torch.export"

    def recognises(self, head: bytes, path: Path) -> bool:
        """Whether this is a zip archive with exported weights, of the present form or the old."""
        archive = Archive.open(head, path)
        return archive is not None and (archive.has(_WEIGHTS) or archive.has(_OLD_WEIGHTS))

    def load(self, path: Path, sha256: str) -> Model:
        """Read the model.

        Raises:
            LoadError: The file is damaged or hostile.
            UnsupportedModelError: It holds no recurrence that can be read.
        """
        archive = opened(path)
        try:
            tensors = dict(_tensors(archive))
            graph = _Graph.read(archive)
            source = Source(
                path,
                self.name,
                sha256,
                activations=graph.activations(),
                unreadable=graph.foreign(),
                findings=(*graph.dropout(), *graph.fixed_steps()),
            )
        except _MALFORMED as error:
            raise LoadError(
                f"{path} is a damaged torch.export archive: {brief(error)}",
                help="write or download it again",
            ) from None
        return read_model(tensors, source)


def _tensors(archive: Archive) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers by name.

    Raises:
        LoadError: A record holds fewer bytes than its tensor needs.
    """
    if not archive.has(_WEIGHTS):
        pickled = io.BytesIO(archive.read(prefix=_OLD_WEIGHTS)[_OLD_WEIGHTS])
        yield from named_tensors(read_checkpoint(archive.path, pickled)).items()
        return
    records = archive.read(prefix="data/weights/")
    for name, entry in json.loads(records[_WEIGHTS])["config"].items():
        meta = entry["tensor_meta"]
        dtype = _DTYPES.get(meta["dtype"])
        if dtype is None or entry["use_pickle"]:
            if slot_of(name):
                raise UnsupportedModelError(
                    f"{name} in {archive.path} is not stored as plain floating-point numbers",
                    help="export a float model without tensor subclasses",
                )
            continue
        sizes, strides = ([axis["as_int"] for axis in meta[key]] for key in ("sizes", "strides"))
        offset = meta["storage_offset"]["as_int"]
        record = records[f"data/weights/{entry['path_name']}"]
        if 0 in sizes:
            yield name, torch.zeros(sizes, dtype=dtype)
            continue
        stored = len(record) // dtype.itemsize
        if math.prod(sizes) > stored:
            raise LoadError(
                f"{name} in {archive.path} claims {math.prod(sizes)} elements, and {stored} are "
                "stored",
                help="write or download it again",
            )
        flat = torch.frombuffer(bytearray(record), dtype=dtype, count=stored)
        yield name, flat.as_strided(sizes, strides, offset)


@dataclass(frozen=True, slots=True)
class _Call:
    """One recurrent operator of the graph: its name, its arguments, the module it runs."""

    operator: str  # lstm, gru, rnn_tanh, rnn_relu, or one of these with _cell
    arguments: Mapping[str, Any]
    prefixes: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Graph:
    """What the graph says: recurrent calls, the class of each module, the sizes of values."""

    calls: tuple[_Call, ...]
    classes: Mapping[str, str]
    sizes: Mapping[str, list[Mapping[str, Any]]]
    names: tuple[str, ...]

    @classmethod
    def read(cls, archive: Archive) -> _Graph:
        """Read the first graph of the archive; without one nothing is known."""
        texts = [archive.read(prefix=name)[name] for name in _GRAPHS if archive.has(name)]
        if not texts:
            return cls((), {}, {}, ())
        module = json.loads(texts[0])["graph_module"]
        graph, specs = module["graph"], module["signature"]["input_specs"]
        parameters = {
            spec["parameter"]["arg"]["name"]: spec["parameter"]["parameter_name"]
            for spec in specs
            if "parameter" in spec
        }
        calls: list[_Call] = []
        classes: dict[str, str] = {}
        for node in graph["nodes"]:
            for level in node["metadata"].get("nn_module_stack", "").split(";"):
                _, _, rest = level.partition(",")
                where, _, kind = rest.rpartition(",")
                classes[where] = kind
            operator = node["target"].removeprefix("torch.ops.aten.").partition(".")[0]
            if operator.removesuffix("_cell") not in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
                continue
            arguments = {entry["name"]: entry["arg"] for entry in node["inputs"]}
            used = (parameters[name] for name in _names(arguments) if name in parameters)
            slots = (slot_of(name) for name in used)
            prefixes = frozenset(slot[0] for slot in slots if slot)
            calls.append(_Call(operator, arguments, prefixes))
        sizes = {name: value["sizes"] for name, value in graph["tensor_values"].items()}
        return cls(tuple(calls), classes, sizes, tuple(parameters.values()))

    def activations(self) -> dict[str, Activation]:
        """Tell the nonlinearity of Elman cells by the operator that runs them."""
        return {
            prefix: RELU if "relu" in call.operator else TANH
            for call in self.calls
            if call.operator.startswith("rnn_")
            for prefix in call.prefixes
        }

    def foreign(self) -> dict[str, str]:
        """Find weights with PyTorch's names in modules that do not run PyTorch's cells."""
        called = {prefix for call in self.calls for prefix in call.prefixes}
        found = {}
        for name in self.names:
            hit = slot_of(name)
            kind = self.classes.get(hit[0].rstrip("."), "") if hit else ""
            if hit and hit[0] not in called and kind and ".nn.modules.rnn." not in f".{kind}":
                found[hit[0]] = f"its class {kind} computes in its own way"
        return found

    def dropout(self) -> tuple[Finding, ...]:
        """Find the calls that an export in training mode has fixed to drop units for ever."""
        return tuple(
            finding(
                "RA125",
                _where(call),
                f"dropout {call.arguments['dropout']['as_float']} between layers is always on in "
                "this file; it is audited without",
            )
            for call in self.calls
            if call.arguments.get("train", {}).get("as_bool")
            and call.arguments["num_layers"]["as_int"] > 1
            and call.arguments["dropout"]["as_float"] > 0
        )

    def fixed_steps(self) -> tuple[Finding, ...]:
        """Find the calls that accept sequences of one length only."""
        found = []
        for call in self.calls:
            if call.operator.endswith("_cell") or "batch_first" not in call.arguments:
                continue
            sizes = self.sizes[call.arguments["input"]["as_tensor"]["name"]]
            axis = sizes[len(sizes) - 2 if call.arguments["batch_first"]["as_bool"] else 0]
            if "as_int" in axis:
                text = f"was exported for sequences of {axis['as_int']} steps and runs no others"
                found.append(finding("RA126", _where(call), f"{text}; it is audited for any"))
        return tuple(found)


def _names(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of all tensors among the arguments of a call."""
    for argument in arguments.values():
        for entry in (argument.get("as_tensor"), *(argument.get("as_tensors") or ())):
            if entry is not None:
                yield entry["name"]


def _where(call: _Call) -> str:
    return ", ".join(sorted(prefix.rstrip(".") or call.operator for prefix in call.prefixes))


LOADER: Loader = ExportedLoader()
