"""TorchScript archives: the weights, and what the stored code says of them; nothing is run.

``data.pkl`` is read by PyTorch's ``weights_only`` reader like any state_dict, each class of
the archive's own replaced by a plain record of attributes. The code is only searched as
text: for the nonlinearity of Elman cells, for dropout that a trace in training mode has
frozen into the model, and for tensors that one call leaves to the next.
"""

from __future__ import annotations

import io
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from rnnaudit.errors import LoadError, UnsupportedModelError
from rnnaudit.findings import finding
from rnnaudit.loaders.archive import Archive, opened
from rnnaudit.loaders.exact import overclaims
from rnnaudit.loaders.grouping import slot_of
from rnnaudit.loaders.interface import Loader, brief, listed
from rnnaudit.loaders.kept import LONGEST_LINE, kept
from rnnaudit.loaders.named import Source, read_model
from rnnaudit.loaders.nested import named_tensors
from rnnaudit.loaders.packed import Packed
from rnnaudit.loaders.state_dict import read_checkpoint
from rnnaudit.model import RELU, TANH, Activation, Model
from rnnaudit.results import Finding

MOST_CLASSES = 2000

_OWN = re.compile(r"__torch__\.torch\.nn\.modules\.rnn\.")
_CALL = re.compile(r"\btorch\.(?:lstm|gru|rnn_tanh|rnn_relu)(?:_cell)?\(")
_NAMED = re.compile(r'\b(?:mode|nonlinearity) : Final\[str\] = "(?:RNN_)?(TANH|RELU|tanh|relu)"')
_APPLIED = re.compile(r"\btorch\.(?:rnn_)?(tanh|relu)(?:_cell)?\(")
_TRAINING = re.compile(
    r"\btorch\.(?:lstm|gru|rnn_tanh|rnn_relu)\(.*, (?P<layers>\d+), (?P<dropout>[\d.e-]+), "
    r"True, (?:True|False), (?:True|False)\)"
)
_CONSTANT = re.compile(
    r"\b(num_layers|dropout) : Final\[(?:int|float)\] = (\d{1,4}(?:\.\d{0,9})?)$", re.MULTILINE
)
_BY_NAME = ("RA123", "RA124")
_QUANTISED = re.compile(r"\.classes\.rnn\.|\.quantized\.")
_PACKED = re.compile(
    r"\.classes\.rnn\.CellParamsBase$|\.classes\.quantized\.LinearPackedParamsBase$"
)


class Record(Mapping[str, object]):
    """An object of a class that only the archive knows: its attributes, and nothing it does."""

    kind = ""
    attributes: Mapping[str, object] = MappingProxyType({})

    def __setstate__(self, state: object) -> None:
        """Keep the attributes; a packed state is not looked into."""
        self.attributes = state if isinstance(state, dict) else {}

    def __getitem__(self, key: str) -> object:
        """Return an attribute."""
        return self.attributes[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the attributes."""
        return iter(self.attributes)

    def __len__(self) -> int:
        """Count the attributes."""
        return len(self.attributes)


def _value(value: object, *_: object) -> object:
    """Return what TorchScript wraps to remember its type."""
    return value


_BUILDERS = tuple(
    (_value, f"torch.jit._pickle.{name}")
    for name in (
        "restore_type_tag",
        "build_intlist",
        "build_doublelist",
        "build_boollist",
        "build_tensorlist",
    )
)


class TorchScriptLoader:
    """Read the weights of what ``torch.jit.save`` wrote."""

    name = "TorchScript"

    def recognises(self, head: bytes, path: Path) -> bool:
        """Whether this is a zip archive with a pickle beside a folder of code."""
        archive = Archive.open(head, path)
        return archive is not None and archive.has("data.pkl") and archive.has("code/")

    def load(self, path: Path, sha256: str) -> Model:
        """Read the model.

        Raises:
            LoadError: The file is damaged or hostile.
            UnsupportedModelError: It holds no recurrence that can be read: none at all, or
                weights that are quantised, or folded into the code.
        """
        archive = opened(path)
        code = {
            name[len("code/") : -len(".py")]: text.decode("utf-8", "replace")
            for name, text in archive.read(prefix="code/", suffix=".py").items()
        }
        classes = _classes(path, archive.read(prefix="data.pkl")["data.pkl"])
        kinds = [
            (Packed if _PACKED.search(name) else type("Record", (Record,), {"kind": name}), name)
            for name in classes
        ]
        root = read_checkpoint(path, _weights_only(archive), (*_BUILDERS, *kinds))
        tensors = {
            name: tensor
            for name, tensor in named_tensors(root).items()
            if "_flat_weights." not in name  # the same tensors once more
        }
        modules = {
            f"{where}." if where else "": (record, _text(record.kind, code))
            for where, record in _recurrent(root)
        }
        source = Source(
            path,
            self.name,
            sha256,
            activations=_activations(modules),
            unreadable=_foreign(modules),
            findings=(*_dropout(modules), *_training(modules)),
        )
        try:
            model = read_model(tensors, source)
        except UnsupportedModelError as error:
            raise _explained(path, error, classes, code) from None
        state = {each.where: each for each in _kept(root, code)}
        # What the code says of a tensor goes before what its name says.
        said = (e for e in model.findings if e.where not in state or e.id not in _BY_NAME)
        return replace(model, findings=(*said, *state.values()))


def _weights_only(archive: Archive) -> io.BytesIO:
    """Copy the weights, and not the code, to an archive of their own."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as plain:
        for part in ("data.pkl", "version", "byteorder", "data/"):
            for name, record in archive.read(prefix=part).items():
                plain.writestr(f"archive/{name}", record)
    buffer.seek(0)
    return buffer


def _classes(path: Path, pickled: bytes) -> list[str]:
    """Name the archive's own classes, from the opcodes of its pickle alone."""
    try:
        with warnings.catch_warnings():  # pickletools warns of what damage escapes
            warnings.simplefilter("ignore", DeprecationWarning)
            found = {
                str(argument).replace(" ", ".")
                for opcode, argument, _ in pickletools.genops(pickled)
                if opcode.name == "GLOBAL" and str(argument).startswith("__torch__")
            }
    except (ValueError, UnicodeDecodeError) as error:
        raise LoadError(
            f"{path} is a damaged TorchScript archive: {brief(error)}",
            help="write or download it again",
        ) from None
    if len(found) > MOST_CLASSES:
        raise LoadError(
            f"{path} names {len(found)} classes, and at most {MOST_CLASSES} are read",
            help="save the model's state_dict instead",
        )
    return sorted(found)


def _kept(root: object, code: Mapping[str, str]) -> Iterator[Finding]:
    """Find the tensors that the code of one call sets and that of the next reads."""
    records = dict(_records(root))
    for where, record in records.items():
        if record.kind.startswith("__torch__.torch."):  # a normalisation counts its batches
            continue
        for module, name in kept(_text(record.kind, code), (where, record), Record):
            value = records[module].get(name) if module in records else None
            tensors = _tensors(value)
            if not tensors and value is not None:
                continue
            message = "a tensor that the code sets, and reads again at the next call"
            if any(not overclaims(each) and bool(each.any()) for each in tensors):
                message += "; it was saved with values in it, and the audit starts from zero"
            yield finding("RA124", f"{module}.{name}".lstrip("."), message)


def _tensors(value: object) -> list[Tensor]:
    """Return a tensor, or the tensors of a list of them; nothing of anything else."""
    held = list(value) if isinstance(value, list | tuple) else [value]
    tensors = [each for each in held if isinstance(each, Tensor)]
    return tensors if len(tensors) == len(held) else []


def _recurrent(root: object) -> Iterator[tuple[str, Record]]:
    """Yield the records that hold recurrent weights themselves, with their paths."""
    for where, record in _records(root):
        if any(slot_of(str(name)) for name in record):
            yield where, record


def _records(root: object) -> Iterator[tuple[str, Record]]:
    """Yield every object of the archive once, with its path."""
    todo, seen = [("", root)], set[int]()
    while todo:
        where, node = todo.pop()
        if not isinstance(node, Record) or id(node) in seen:
            continue
        seen.add(id(node))
        yield where, node
        todo.extend((f"{where}.{name}" if where else str(name), node[name]) for name in node)


def _text(kind: str, code: Mapping[str, str]) -> str:
    """Return the code of one class, e.g. of ``__torch__.a.b.Net`` from ``__torch__/a/b``."""
    folder, _, name = kind.rpartition(".")
    text = code.get(folder.replace(".", "/"), "")
    match = re.search(rf"^class {re.escape(name)}\(.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    return match[0] if match else ""


Modules = Mapping[str, tuple[Record, str]]
"""Records and the code of their classes, by prefix."""


def _activations(modules: Modules) -> dict[str, Activation]:
    """Tell the nonlinearity of Elman cells where the code names one and only one."""
    found = {}
    for prefix, (record, text) in modules.items():
        names = {name.lower() for name in _NAMED.findall(text) or _APPLIED.findall(text)}
        stored = record.attributes.get("nonlinearity")
        if isinstance(stored, str):
            names = {stored}
        if names in ({"tanh"}, {"relu"}):
            found[prefix] = RELU if "relu" in names else TANH
    return found


def _foreign(modules: Modules) -> dict[str, str]:
    """Find weights with PyTorch's names in classes that do not call PyTorch's cells."""
    return {
        prefix: f"its class {record.kind.removeprefix('__torch__.')} computes in its own way"
        for prefix, (record, text) in modules.items()
        if not _OWN.match(record.kind) and not _CALL.search(text)
    }


def _dropout(modules: Modules) -> tuple[Finding, ...]:
    """Find the calls that a trace in training mode has fixed to drop units for ever."""
    return tuple(
        finding(
            "RA125",
            prefix.rstrip("."),
            f"dropout {match['dropout']} between layers is always on in this file; it is audited "
            "without",
        )
        for prefix, (_, text) in modules.items()
        for line in text.splitlines()
        if len(line) <= LONGEST_LINE and (match := _TRAINING.search(line))
        if int(match["layers"]) > 1 and match["dropout"].strip("0.") != ""
    )


def _training(modules: Modules) -> tuple[Finding, ...]:
    """Find scripted modules that were saved in training mode, and drop units until ``eval``."""
    found = []
    for prefix, (record, text) in modules.items():
        constants = {name: float(value) for name, value in _CONSTANT.findall(text)}
        traced = _TRAINING.search(text) is not None  # has said so already
        if traced or record.get("training") is not True or constants.get("num_layers", 1) < 2:
            continue
        if dropout := constants.get("dropout"):
            message = (
                f"was saved in training mode, and drops {dropout:g} of what passes between its "
                "layers until eval() is called; it is audited without"
            )
            found.append(finding("RA125", prefix.rstrip("."), message))
    return tuple(found)


def _explained(
    path: Path, error: UnsupportedModelError, classes: list[str], code: Mapping[str, str]
) -> UnsupportedModelError:
    """Say why there are no weights where the archive shows it."""
    quantised = [name.removeprefix("__torch__.") for name in classes if _QUANTISED.search(name)]
    if quantised:
        return UnsupportedModelError(
            f"{path} holds quantised modules ({listed(quantised)}), whose packed weights are not "
            "read",
            help="save the model as it was before quantisation",
        )
    if any(_CALL.search(text) and "CONSTANTS." in text for text in code.values()):
        return UnsupportedModelError(
            f"the recurrent weights in {path} are constants of its code (torch.jit.freeze)",
            help="save the module before it is frozen, or its state_dict",
        )
    return error


LOADER: Loader = TorchScriptLoader()
