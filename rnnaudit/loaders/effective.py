"""Weights that a module computes from others: weight_norm, spectral_norm, weight drop.

The effective weight is rebuilt as PyTorch computes it in eval mode and in the stored
precision, so that it is the very matrix that the module multiplies by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rnnaudit.loaders.exact import overclaims

_LEAF = r"(?P<leaf>weight(?:_(?:ih|hh|hr)(?:_l\d+(?:_reverse)?)?)?)"
_SUFFIXED = re.compile(rf"(?P<prefix>(?:.*[._/])?){_LEAF}_(?P<part>g|v|orig|u|raw)")
_PARAMETRIZED = re.compile(rf"(?P<prefix>(?:.*\.)?)parametrizations\.{_LEAF}\.(?P<part>[\w.]+)")


@dataclass(frozen=True, slots=True)
class Effective:
    """Tensors under the names that the module uses, and why some could not be rebuilt."""

    tensors: dict[str, Tensor]
    failed: dict[str, str] = field(default_factory=dict)


def effective(tensors: Mapping[str, Tensor]) -> Effective:
    """Replace the parts of every reparametrised weight by the weight itself.

    - weight_norm, g v / ‖v‖ (Salimans & Kingma, 2016): ``_g`` and ``_v``, or
      ``parametrizations.….original0`` and ``original1``;
    - spectral_norm, W / (uᵀ W v) (Miyato et al., 2018): ``_orig``, ``_u`` and ``_v``, or
      ``original``, ``0._u`` and ``0._v``;
    - weight drop (Merity et al., 2018): ``_raw`` is the weight in eval mode, and what
      stands beside it under the plain name is the last that training dropped from.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    base_of: dict[str, str] = {}
    for name, tensor in tensors.items():
        match = _PARAMETRIZED.fullmatch(name) or _SUFFIXED.fullmatch(name)
        if match:
            base_of[name] = match["prefix"] + match["leaf"]
            parts.setdefault(base_of[name], {})[match["part"]] = tensor
    raw = {base: _beside(base, tensors) for base in parts if "raw" in parts[base]}
    stale = set(raw.values()) - set(raw)
    result = Effective({})
    for name, tensor in tensors.items():
        base = base_of.get(name, name)
        if name in stale or base in result.tensors or base in result.failed:
            continue
        weight = _rebuild(parts[base]) if base in parts else tensor
        if isinstance(weight, Tensor):
            result.tensors[raw.get(base, base)] = weight
        else:
            result.failed[base] = weight
    return result


def _beside(base: str, tensors: Mapping[str, Tensor]) -> str:
    """Name the plain weight beside ``base_raw``; some wrappers keep it under ``module.``."""
    prefix, dot, leaf = base.rpartition(".")
    wrapped = f"{prefix}{dot}module.{leaf}"
    return wrapped if wrapped in tensors else base


def _rebuild(parts: Mapping[str, Tensor]) -> Tensor | str:
    """Return the weight that the parts make, or why it cannot be told."""
    names = set(parts)
    if names == {"raw"}:
        return parts["raw"]
    if any(overclaims(part) for part in parts.values()):
        return "its parts claim more elements than are stored"
    try:
        if names == {"g", "v"}:
            return _weight_norm(parts["v"], parts["g"])
        if names == {"original0", "original1"}:
            return _weight_norm(parts["original1"], parts["original0"])
        if names == {"orig", "u", "v"}:
            return _spectral_norm(parts["orig"], parts["u"], parts["v"])
        if names == {"original", "0._u", "0._v"}:
            return _spectral_norm(parts["original"], parts["0._u"], parts["0._v"])
    except (RuntimeError, ValueError):
        shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in parts.items())
        return f"its parts do not fit together ({shapes})"
    return f"the parametrisation stored as {', '.join(sorted(names))} is not known"


def _weight_norm(v: Tensor, g: Tensor) -> Tensor:
    if g.ndim == 0:  # dim=None: one norm for the whole weight
        norm: Tensor = torch.linalg.vector_norm(v)
        return v * (g / norm)
    for dim, width in enumerate(v.shape):
        if tuple(g.shape) == tuple(width if axis == dim else 1 for axis in range(v.ndim)):
            weight: Tensor = torch._weight_norm(v, g, dim)
            return weight
    raise ValueError("one norm for each index of one axis was expected")


def _spectral_norm(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    # Rows first, as for every layer but transposed convolutions.
    matrix = weight if u.shape[0] == weight.shape[0] else weight.mT
    sigma: Tensor = torch.dot(u, torch.mv(matrix, v))
    return weight / sigma
