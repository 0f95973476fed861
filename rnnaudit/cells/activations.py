"""Elementwise functions of the ONNX recurrent operators: value, slope and slope interval.

Slopes are written so that saturation does not cancel: tanh' = sech², σ' = σ(v) σ(−v).
At a kink the slope is the one-sided derivative that autograd takes (0 for ReLU at 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.errors import UnsupportedModelError
from rnnaudit.model import Activation


@dataclass(frozen=True, slots=True)
class _Kind:
    """Value and slope as functions of (v, alpha, beta), and the slope's interval [lo, hi]."""

    value: Callable[[Tensor, float, float], Tensor]
    slope: Callable[[Tensor, float, float], Tensor]
    interval: Callable[[float, float], tuple[float, float] | None]
    alpha: float | None = None
    beta: float | None = None


def _sech2(v: Tensor) -> Tensor:
    """Return sech² without the cancellation of 1 − tanh²: 4 σ(2v) σ(−2v)."""
    return 4 * torch.sigmoid(2 * v) * torch.sigmoid(-2 * v)


def _ordered(a: float, b: float) -> tuple[float, float]:
    return (a, b) if a <= b else (b, a)


_KINDS: dict[str, _Kind] = {
    "tanh": _Kind(
        lambda v, a, b: torch.tanh(v), lambda v, a, b: _sech2(v), lambda a, b: (0.0, 1.0)
    ),
    "relu": _Kind(
        lambda v, a, b: torch.relu(v),
        lambda v, a, b: (v > 0).to(v.dtype),
        lambda a, b: (0.0, 1.0),
    ),
    "sigmoid": _Kind(
        lambda v, a, b: torch.sigmoid(v),
        lambda v, a, b: torch.sigmoid(v) * torch.sigmoid(-v),
        lambda a, b: (0.0, 0.25),
    ),
    "affine": _Kind(
        lambda v, a, b: a * v + b,
        lambda v, a, b: torch.full_like(v, a),
        lambda a, b: (a, a),
        1.0,
        0.0,
    ),
    "leakyrelu": _Kind(
        lambda v, a, b: torch.where(v > 0, v, a * v),
        lambda v, a, b: torch.where(v > 0, torch.ones_like(v), torch.full_like(v, a)),
        lambda a, b: _ordered(a, 1.0),
        0.01,
    ),
    "thresholdedrelu": _Kind(
        lambda v, a, b: torch.where(v > a, v, torch.zeros_like(v)),
        lambda v, a, b: (v > a).to(v.dtype),
        # A jump of height a: only a = 0 (which is ReLU) has a finite slope.
        lambda a, b: (0.0, 1.0) if a == 0 else None,
        1.0,
    ),
    "scaledtanh": _Kind(
        lambda v, a, b: a * torch.tanh(b * v),
        lambda v, a, b: a * b * _sech2(b * v),
        lambda a, b: _ordered(0.0, a * b),
        1.0,
        1.0,
    ),
    "hardsigmoid": _Kind(
        lambda v, a, b: torch.clamp(a * v + b, 0.0, 1.0),
        lambda v, a, b: torch.where(
            (a * v + b >= 0) & (a * v + b <= 1), torch.full_like(v, a), torch.zeros_like(v)
        ),
        lambda a, b: _ordered(0.0, a),
        0.2,
        0.5,
    ),
    "elu": _Kind(
        lambda v, a, b: torch.where(v > 0, v, a * torch.expm1(v.clamp(max=0))),
        lambda v, a, b: torch.where(v > 0, torch.ones_like(v), a * torch.exp(v.clamp(max=0))),
        lambda a, b: (min(0.0, a), max(1.0, a)),
        1.0,
    ),
    "softsign": _Kind(
        lambda v, a, b: v / (1 + v.abs()),
        lambda v, a, b: 1 / (1 + v.abs()) ** 2,
        lambda a, b: (0.0, 1.0),
    ),
    "softplus": _Kind(
        lambda v, a, b: torch.nn.functional.softplus(v, threshold=40.0),
        lambda v, a, b: torch.sigmoid(v),
        lambda a, b: (0.0, 1.0),
    ),
}

NAMES = frozenset(_KINDS)
TAKES_ALPHA = frozenset(n for n, k in _KINDS.items() if k.alpha is not None)
TAKES_BETA = frozenset(n for n, k in _KINDS.items() if k.beta is not None)


def _kind(activation: Activation) -> tuple[_Kind, float, float]:
    kind = _KINDS.get(activation.name)
    if kind is None:
        raise UnsupportedModelError(
            f"activation must be one of {', '.join(sorted(NAMES))}, got {activation.name!r}",
            help="rename it to its ONNX name",
        )
    alpha = activation.alpha if activation.alpha is not None else kind.alpha
    beta = activation.beta if activation.beta is not None else kind.beta
    return kind, 0.0 if alpha is None else alpha, 0.0 if beta is None else beta


def parameters(activation: Activation) -> tuple[float, float]:
    """Return (alpha, beta) with the defaults filled in; 0 where the function takes none."""
    _, alpha, beta = _kind(activation)
    return alpha, beta


def value(activation: Activation, v: Tensor) -> Tensor:
    """Apply the activation elementwise to pre-activations of any shape."""
    kind, alpha, beta = _kind(activation)
    return kind.value(v, alpha, beta)


def slope(activation: Activation, v: Tensor) -> Tensor:
    """Differentiate the activation elementwise at pre-activations of any shape."""
    kind, alpha, beta = _kind(activation)
    return kind.slope(v, alpha, beta)


def slope_interval(activation: Activation) -> tuple[float, float] | None:
    """Return an interval that holds every difference quotient, or None where none is finite."""
    kind, alpha, beta = _kind(activation)
    interval = kind.interval(alpha, beta)
    if interval is None or not all(math.isfinite(end) for end in interval):
        return None
    return interval


def clipped_value(activation: Activation, v: Tensor, clip: float | None) -> Tensor:
    """Apply the activation to pre-activations that are first bounded to ±clip."""
    return value(activation, v if clip is None else v.clamp(-clip, clip))


def clipped_complement(activation: Activation, v: Tensor, clip: float | None) -> Tensor:
    """Return 1 − ``clipped_value``, for a sigmoid as σ(−v), which keeps its digits near 0."""
    if activation.name == "sigmoid":
        return clipped_value(activation, -v, clip)
    return 1 - clipped_value(activation, v, clip)


def clipped_slope(activation: Activation, v: Tensor, clip: float | None) -> Tensor:
    """Differentiate ``clipped_value``: zero where the clip has taken hold."""
    if clip is None:
        return slope(activation, v)
    held = (v >= -clip) & (v <= clip)
    return torch.where(held, slope(activation, v.clamp(-clip, clip)), torch.zeros_like(v))
