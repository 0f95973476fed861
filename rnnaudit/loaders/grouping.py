"""Which tensors belong to one recurrent module, told by PyTorch's names for them.

``weight_hh_l0``, ``bias_ih_l0_reverse`` … in ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM``, and
``weight_hh`` … in their single cells, behind any prefix. Checkpoints wrap the prefix in more
(``state_dict.model.module.encoder.``) and may hold the same module twice, as weights and as
their running average.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rnnaudit.findings import finding
from rnnaudit.results import Finding

_KEY = re.compile(
    r"(?P<prefix>(?:.*[._/])?)(?P<kind>weight|bias)_(?P<part>ih|hh|hr)"
    r"(?:_l(?P<layer>\d{1,4})(?P<reverse>_reverse)?)?"
)
_WRAPPERS = frozenset(
    {
        "state_dict",
        "model",
        "module",
        "net",
        "network",
        "model_state",
        "model_state_dict",
        "model_dict",
        "net_state_dict",
        "state",
        "params",
        "weights",
        "checkpoint",
        "_forward_module",
    }
)
_TRANSPARENT = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_COPY = re.compile(r"(?:^|_)(?:ema|swa|averaged|shadow|best|initial|last|previous)(?:_|$)")


class Slot(NamedTuple):
    """What a tensor is to its module; ``layer`` is -1 in a bare cell."""

    kind: str  # weight or bias
    part: str  # ih, hh or hr
    layer: int
    reverse: bool


@dataclass(slots=True)
class Group:
    """The tensors of one recurrent module: their full names by slot."""

    prefix: str
    keys: dict[Slot, str] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """The wrappers in front of the module's own name, e.g. ``state_dict.model.``."""
        return wrappers(self.prefix)[-1]

    @property
    def name(self) -> str:
        """The module's name without wrappers; empty when there is nothing else."""
        parts = self.prefix[len(self.root) :].rstrip("._/").split(".")
        return ".".join(part for part in parts if part not in _TRANSPARENT)

    @property
    def where(self) -> str:
        """The module's full name, for a reader who looks for it in the file."""
        return self.prefix.rstrip("._/") or "the root"

    @property
    def is_marked(self) -> bool:
        """Whether a wrapper says that this is an average or another copy."""
        return any(_COPY.search(part) for part in self.root.split("."))


def wrappers(name: str) -> list[str]:
    """Return every prefix of a name that is made of wrappers only, the empty one first."""
    found, end = [""], 0
    while (dot := name.find(".", end)) >= 0:
        part = name[end:dot]
        if part not in _WRAPPERS | _TRANSPARENT and not _COPY.search(part):
            break
        end = dot + 1
        found.append(name[:end])
    return found


def slot_of(name: str) -> tuple[str, Slot] | None:
    """Return the prefix and the slot that a tensor's name stands for, None for other names."""
    match = _KEY.fullmatch(name)
    if match is None:
        return None
    layer = -1 if match["layer"] is None else int(match["layer"])
    return match["prefix"], Slot(match["kind"], match["part"], layer, bool(match["reverse"]))


def groups(names: Iterable[str]) -> list[Group]:
    """Collect the recurrent modules among tensor names, in order of first appearance."""
    found: dict[tuple[str, bool], Group] = {}
    for name in names:
        if hit := slot_of(name):
            prefix, slot = hit
            group = found.setdefault((prefix, slot.layer < 0), Group(prefix))
            group.keys[slot] = name
    return list(found.values())


def one_of_each(
    candidates: Sequence[Group], tensors: Mapping[str, Tensor]
) -> tuple[list[Group], list[Group], list[Finding]]:
    """Keep one of the modules that are stored more than once.

    Copies share their name once wrappers (``model.``, ``ema.``) are taken off, and every
    shape; the first without a mark such as ``ema`` is kept. A module stored under two names,
    its tensors in the same memory, is kept once.

    Returns:
        The modules kept, those left out, and a finding for each of the latter.
    """
    kept: dict[object, Group] = {}
    dropped: list[Group] = []
    findings: list[Finding] = []
    for group in sorted(candidates, key=lambda group: group.is_marked):
        parts = {slot: tensors[name] for slot, name in group.keys.items() if name in tensors}
        copy = (group.name, frozenset((slot, part.shape) for slot, part in parts.items()))
        memory = frozenset((slot, part.shape, _place(part)) for slot, part in parts.items())
        twin = kept.get(copy) or kept.get(memory)
        if twin is None:
            kept[copy] = kept[memory] = group
            continue
        dropped.append(group)
        same = "is the same tensors" if kept.get(memory) else "has the same shapes"
        findings.append(
            finding(
                "RA120",
                twin.where,
                f"{group.where} {same}; {twin.where} was read, {group.where} was not",
            )
        )
    remaining = {id(group) for group in kept.values()}
    return [group for group in candidates if id(group) in remaining], dropped, findings


def _place(tensor: Tensor) -> int:
    """Say where a tensor's numbers lie; a sparse one stands for itself."""
    return tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)
