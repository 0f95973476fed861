"""Recurrences by name and shape: ``weight_hh`` has 1, 3 or 4 rows for each hidden unit.

``rows / columns`` of ``weight_hh`` [G·H, H] is 1 in an Elman cell, 3 in a GRU and 4 in an
LSTM. Beside a projection ``weight_hr`` [P, H] it is an LSTM whose ``weight_hh`` is [4H, P],
and H is read from the rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from rnnaudit.errors import LoadError, UnsupportedModelError
from rnnaudit.findings import finding
from rnnaudit.loaders.effective import Effective, effective
from rnnaudit.loaders.exact import UnreadableError, exact
from rnnaudit.loaders.grouping import Group, groups, one_of_each, slot_of
from rnnaudit.loaders.interface import ROUNDED, listed
from rnnaudit.loaders.packed import unpacked
from rnnaudit.loaders.surroundings import (
    is_start,
    not_audited,
    other_starts,
    readout,
    surroundings,
)
from rnnaudit.model import (
    TANH,
    Activation,
    Cell,
    ElmanCell,
    GRUCell,
    InitialState,
    Layer,
    LSTMCell,
    Model,
    Recurrence,
    Stack,
)
from rnnaudit.results import Finding, Skipped

_NORMALISED = re.compile(r"(?:^|[._])(?:ln|(?:layer|batch)?_?norm\w*|bn)(?:[._]|$)", re.IGNORECASE)

MOST_NAME = 1000

Cells = tuple[tuple[Cell, ...], ...]
"""The cells of each layer, forward before reverse."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the tensors came from, and what the format says beyond them.

    ``ordered`` says that tensors stand in the order in which the modules were made.
    ``activations`` gives the nonlinearity of Elman cells by prefix, where it is stored, and
    ``unreadable`` why a module is not what its names say. ``modules`` are the live modules
    by prefix, where there are any.
    """

    path: Path
    format: str
    sha256: str
    ordered: bool = True
    activations: Mapping[str, Activation] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    modules: Mapping[str, nn.Module] = field(default_factory=dict)


def read_model(tensors: Mapping[str, Tensor], source: Source) -> Model:
    """Read every recurrence among named tensors.

    Raises:
        LoadError: A weight is NaN or infinite, or larger than what is stored of it.
        UnsupportedModelError: There is no recurrence, or none that can be read.
    """
    if (longest := max((len(name) for name in tensors), default=0)) > MOST_NAME:
        raise LoadError(
            f"{source.path} names a tensor with {longest} characters, and at most {MOST_NAME} "
            "are read",
            help="save the model's state_dict on its own",
        )
    plain = unpacked({name: t for name, t in tensors.items() if not t.is_nested})
    weights = effective(plain.tensors)
    weights.failed.update(plain.failed)
    weights.failed.update(
        {name: "it is a nested tensor" for name, t in tensors.items() if t.is_nested}
    )
    candidates = groups([*weights.tensors, *weights.failed])
    if not any(slot.part == "hh" for group in candidates for slot in group.keys):
        raise _nothing(source.path, tensors)
    kept, dropped, findings = one_of_each(candidates, weights.tensors)
    strange = _strangers(kept, weights.tensors)
    read: list[tuple[Group, Cells]] = []
    skipped: list[Skipped] = []
    for group in kept:
        try:
            if group.prefix in source.unreadable:
                raise UnreadableError(source.unreadable[group.prefix])
            if group.prefix in strange:
                raise UnreadableError(
                    f"{strange[group.prefix]} is no parameter of nn.RNN, nn.GRU or nn.LSTM, so "
                    "that what the cell computes is not known"
                )
            activation = source.activations.get(group.prefix, TANH)
            read.append((group, _cells(group, weights, activation)))
        except UnreadableError as reason:
            skipped.append(Skipped(group.where, str(reason)))
    if not read:
        raise UnsupportedModelError(
            f"no recurrence in {source.path} can be read: "
            + "; ".join(f"{skip.where}: {skip.reason}" for skip in skipped[:3]),
            help="export the model to ONNX, which stores what a cell computes",
        )
    names = _names(read)
    rounded = [ROUNDED if group.prefix in plain.quantised else "" for group, _ in read]
    stacks = [
        _stack(name, cells, why) for name, (_, cells), why in zip(names, read, rounded, strict=True)
    ]
    modules = [group for group, _ in read]
    around = surroundings(modules, dropped, weights.tensors, ordered=source.ordered)
    head = None if skipped else readout(around, stacks)
    if head is not None:
        stacks[-1] = replace(stacks[-1], readout=head)
    assumed = [
        name
        for name, (group, cells) in zip(names, read, strict=True)
        if isinstance(cells[0][0], ElmanCell) and group.prefix not in source.activations
    ]
    return Model(
        path=source.path,
        format=source.format,
        sha256=source.sha256,
        stacks=tuple(stacks),
        whole=len(stacks) == 1
        and not skipped
        and not any(rounded)
        and not around.before
        and len(around.after) == (head is not None),
        dtype=_dtype(modules, weights.tensors),
        skipped=tuple(skipped),
        source={
            name: source.modules[group.prefix]
            for name, group in zip(names, modules, strict=True)
            if group.prefix in source.modules
        },
        findings=(
            *source.findings,
            *findings,
            *_assumed_tanh(assumed),
            *(finding("RA127", name, why) for name, why in zip(names, rounded, strict=True) if why),
            *(not_audited(around, stacks[-1].name) if head is None else ()),
            *other_starts(around, stacks),
        ),
    )


def _dtype(modules: Sequence[Group], tensors: Mapping[str, Tensor]) -> str:
    """Name the widest precision among the stored weights."""
    dtypes = {tensors[name].dtype for group in modules for name in group.keys.values()}
    return str(max(dtypes, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")


def _nothing(path: Path, tensors: Mapping[str, Tensor]) -> UnsupportedModelError:
    if not tensors:
        return UnsupportedModelError(
            f"no recurrence in {path}: it holds no named tensors at all",
            help="save the model's state_dict: torch.save(model.state_dict(), path)",
            id="RA105",
        )
    return UnsupportedModelError(
        f"no recurrence in {path}: none of its {len(tensors)} tensors is a recurrent weight "
        f"weight_hh ({listed(list(tensors))})",
        help="weights under other names can be audited from an ONNX export",
        id="RA105",
    )


def _assumed_tanh(names: Sequence[str]) -> tuple[Finding, ...]:
    return tuple(
        finding(
            "RA121",
            name,
            "the file does not say which nonlinearity this Elman cell has: tanh is assumed, and "
            "ReLU is possible",
        )
        for name in names
    )


def _names(read: Sequence[tuple[Group, Cells]]) -> list[str]:
    """Name each stack as briefly as is unique."""
    short = [group.name or cells[0][0].kind for group, cells in read]
    times = Counter(short)
    full = [
        name if times[name] == 1 else group.where
        for name, (group, _) in zip(short, read, strict=True)
    ]
    times = Counter(full)
    return [name if times[name] == 1 else f"{name}#{i}" for i, name in enumerate(full)]


def _stack(name: str, cells: Cells, rounded: str) -> Stack:
    layers = tuple(
        Layer(
            tuple(
                Recurrence(
                    name=name,
                    layer=number,
                    cell=cell,
                    initial=InitialState(torch.zeros(cell.state_size, dtype=torch.float64)),
                    reverse=direction == 1,
                    rounded=rounded,
                )
                for direction, cell in enumerate(layer)
            )
        )
        for number, layer in enumerate(cells)
    )
    return Stack(name, layers)


def _cells(group: Group, weights: Effective, activation: Activation) -> Cells:
    """Read the cells of one module, layer by layer."""
    for name in group.keys.values():
        if name in weights.failed:
            raise UnreadableError(f"{name}: {weights.failed[name]}")
    numbers = sorted({slot.layer for slot in group.keys})
    if numbers not in ([-1], list(range(len(numbers)))):
        missing = sorted(set(range(numbers[-1] + 1)) - set(numbers))
        raise UnreadableError(f"layer {missing[0]} of {numbers[-1] + 1} is missing")
    directions = (False, True) if any(slot.reverse for slot in group.keys) else (False,)
    cells = tuple(
        tuple(
            _cell(_parts(group, number, reverse, weights.tensors), activation)
            for reverse in directions
        )
        for number in numbers
    )
    for number, layer in enumerate(cells):
        if len({(type(cell), cell.input_size, cell.hidden_size) for cell in layer}) > 1:
            raise UnreadableError(f"the two directions of layer {number} differ in shape")
    for number, (below, above) in enumerate(pairwise(cells), start=1):
        width = sum(cell.hidden_size for cell in below)
        if above[0].input_size != width:
            raise UnreadableError(
                f"layer {number} reads {above[0].input_size} inputs, "
                f"and layer {number - 1} gives {width}"
            )
    return cells


def _strangers(modules: Sequence[Group], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name one parameter, by module, that PyTorch's own cells do not have.

    A cell with parameters of its own beside its weights, or with a normalisation below
    them, is not one of PyTorch's, whatever its weights are called.
    """
    named = {group.prefix: bool(group.name) for group in modules}
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if slot_of(name) or not tensor.is_floating_point():
            continue
        start = 0
        while start >= 0:
            prefix, own = name[:start], name[start:]
            if prefix in named and prefix not in found:
                if "." in own:
                    strange = named[prefix] and _NORMALISED.search(own) is not None
                else:
                    strange = not is_start(own)
                if strange:
                    found[prefix] = name
            start = name.find(".", start) + 1 or -1
    return found


def _parts(
    group: Group, layer: int, reverse: bool, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of one cell in float64 by ``weight_ih`` …, checked one by one."""
    parts = {
        f"{slot.kind}_{slot.part}": exact(name, tensors[name])
        for slot, name in group.keys.items()
        if (slot.layer, slot.reverse) == (layer, reverse)
    }
    end = "" if layer < 0 else f"_l{layer}{'_reverse' if reverse else ''}"
    for wanted in ("weight_ih", "weight_hh"):
        if wanted not in parts:
            raise UnreadableError(f"{wanted}{end} is missing")
        if parts[wanted].ndim != 2 or 0 in parts[wanted].shape:
            raise UnreadableError(
                f"{wanted}{end} must be a matrix, got shape {tuple(parts[wanted].shape)}"
            )
    if ("bias_ih" in parts) != ("bias_hh" in parts):
        raise UnreadableError(f"one of bias_ih{end} and bias_hh{end} is missing")
    return parts


def _cell(parts: Mapping[str, Tensor], activation: Activation) -> Cell:
    """Tell the kind of cell from the shapes."""
    W, U = parts["weight_ih"], parts["weight_hh"]
    rows, columns = U.shape
    zero = torch.zeros(rows, dtype=torch.float64)
    b_input, b_recurrent = parts.get("bias_ih", zero), parts.get("bias_hh", zero)
    gates, rest = divmod(rows, columns)
    projection = parts.get("weight_hr")
    if projection is not None:
        if rows % 4 or tuple(projection.shape) != (columns, rows // 4):
            raise UnreadableError(
                f"a projection weight_hr of shape {tuple(projection.shape)} does not fit "
                f"weight_hh of shape {tuple(U.shape)}"
            )
        gates, rest = 4, 0
    if rest or gates not in (1, 3, 4):
        raise UnreadableError(
            f"weight_hh of shape {tuple(U.shape)} has {rows / columns:.4g} rows for each unit; "
            "an RNN has 1, a GRU 3, an LSTM 4"
        )
    for name in ("bias_ih", "bias_hh"):
        if name in parts and tuple(parts[name].shape) != (rows,):
            raise UnreadableError(
                f"{name} must have the {rows} rows of weight_hh, "
                f"got shape {tuple(parts[name].shape)}"
            )
    try:
        if gates == 1:
            return ElmanCell(U, W, b_input + b_recurrent, activation)
        if gates == 3:
            return GRUCell(W, U, b_input, b_recurrent)
        return LSTMCell(W, U, b_input + b_recurrent, projection=projection)
    except ValueError:
        shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in parts.items())
        raise UnreadableError(f"the shapes do not fit together: {shapes}") from None
