"""Packed quantised weights of torch.ao's dynamic modules, unpacked as numbers.

A packed cell is pickled as plain parts: its kind, its biases, and one packed linear map for
each weight, itself an int8 tensor with its scale. They are read without ever making the
object that they stand for, and dequantised, scale · (q − zero), which float32 holds exactly
enough that PyTorch computes the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rnnaudit.loaders.grouping import slot_of

_LAYERED = re.compile(
    r"(?P<prefix>(?:.*\.)?)_all_weight_values\.(?P<index>\d{1,5})\.param\.(?P<leaf>\w+)"
)
_BARE = re.compile(r"(?P<prefix>(?:.*\.)?)_packed_weight_(?P<part>ih|hh)\.(?P<kind>weight|bias)")


class Packed(Mapping[str, object]):
    """Stands for a packed cell or linear map: its tensors by name, and nothing it does."""

    def __init__(self, *_: object) -> None:
        """Hold nothing, whatever the arguments."""
        self._parts: dict[str, object] = {}

    def __setstate__(self, state: object) -> None:
        """Keep the tensors of ``(kind, [b_ih, b_hh], …, [W_ih, W_hh])`` or ``(weight, bias)``."""
        parts = list(state) if isinstance(state, tuple) else []
        if parts and isinstance(parts[0], tuple):  # beside it the name of its class
            parts = list(parts[0])
        if len(parts) >= 5 and all(isinstance(part, list) for part in parts[1:5]):
            biases, maps = parts[1], parts[4]
            weights = [m["weight"] if isinstance(m, Packed) and "weight" in m else m for m in maps]
            named = ("weight_ih", "weight_hh", "weight_hr")
            self._parts = {
                **dict(zip(named, weights, strict=False)),
                **dict(zip(("bias_ih", "bias_hh"), biases, strict=False)),
            }
        else:
            self._parts = dict(zip(("weight", "bias"), parts, strict=False))

    def __getitem__(self, key: str) -> object:
        """Return a part."""
        return self._parts[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the parts."""
        return iter(self._parts)

    def __len__(self) -> int:
        """Count the parts."""
        return len(self._parts)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Tensors under PyTorch's names; the prefixes of quantised modules; what could not be told."""

    tensors: dict[str, Tensor]
    quantised: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)


def unpacked(tensors: Mapping[str, Tensor]) -> Unpacked:
    """Give packed weights PyTorch's names, and dequantise every recurrent weight."""
    result = Unpacked({})
    cells = _cells(tensors)
    for name, tensor in tensors.items():
        plain = _name(name, cells)
        if plain is None:
            prefix = _LAYERED.fullmatch(name)["prefix"]  # type: ignore[index]
            result.failed[f"{prefix}weight_hh_l0"] = (
                "its packed cells fit one layer in two directions and two layers in one"
            )
            continue
        slot = slot_of(plain)
        if slot is not None and tensor.is_quantized:
            result.quantised.add(slot[0])
            tensor = tensor.dequantize()  # noqa: PLW2901
        result.tensors[plain] = tensor
    return result


def _cells(tensors: Mapping[str, Tensor]) -> dict[str, dict[int, tuple[int, int]]]:
    """Return the widths (input, state) of every packed cell, by module and index."""
    found: dict[str, dict[int, list[int]]] = {}
    for name, tensor in tensors.items():
        match = _LAYERED.fullmatch(name)
        if match and match["leaf"] in ("weight_ih", "weight_hh") and tensor.ndim == 2:
            widths = found.setdefault(match["prefix"], {}).setdefault(int(match["index"]), [0, 0])
            widths[match["leaf"] == "weight_hh"] = tensor.shape[1]
    return {
        prefix: {index: (widths[0], widths[1]) for index, widths in cells.items()}
        for prefix, cells in found.items()
    }


def _name(name: str, cells: Mapping[str, Mapping[int, tuple[int, int]]]) -> str | None:
    """Return PyTorch's name for a part; None where the directions cannot be told."""
    if bare := _BARE.fullmatch(name):
        return f"{bare['prefix']}{bare['kind']}_{bare['part']}"
    match = _LAYERED.fullmatch(name)
    if match is None:
        return name
    both = _bidirectional(cells.get(match["prefix"], {}))
    if both is None:
        return None
    layer, reverse = divmod(int(match["index"]), 2) if both else (int(match["index"]), 0)
    return f"{match['prefix']}{match['leaf']}_l{layer}{'_reverse' if reverse else ''}"


def _bidirectional(cells: Mapping[int, tuple[int, int]]) -> bool | None:
    """Tell whether cells alternate in direction, by the widths they read; None where both fit."""
    if len(cells) < 2:
        return False
    inputs, hidden = cells.get(0, (0, 0))
    one_way = all(cells[i][0] == hidden for i in cells if i > 0)
    two_ways = len(cells) % 2 == 0 and all(
        cells[i][0] == (inputs if i == 1 else 2 * hidden) for i in cells if i > 0
    )
    return None if one_way and two_ways else two_ways
