"""Which function a recurrent node applies where, with alpha and beta in order of use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rnnaudit.loaders.onnx.refusal import Refused
from rnnaudit.model import Activation

DEFAULTS: dict[str, tuple[str, ...]] = {
    "RNN": ("Tanh",),
    "GRU": ("Sigmoid", "Tanh"),
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
}

_OPERATOR_DEFAULTS: dict[str, tuple[float, float | None]] = {
    "affine": (1.0, 0.0),
    "elu": (1.0, None),
    "hardsigmoid": (0.2, 0.5),
    "leakyrelu": (0.01, None),
    "scaledtanh": (1.0, 1.0),
    "thresholdedrelu": (1.0, None),
}

_PLAIN = frozenset({"relu", "sigmoid", "softplus", "softsign", "tanh"})

_ZERO_IN_ONNX_RUNTIME = frozenset({"affine", "scaledtanh", "thresholdedrelu"})


@dataclass(frozen=True, slots=True)
class Resolved:
    """The functions of every direction, and those whose missing parameters runtimes read apart.

    ``by_text`` holds them again, with the operators' own defaults for what is missing.
    """

    directions: tuple[tuple[Activation, ...], ...]
    disputed: tuple[str, ...]
    by_text: tuple[tuple[Activation, ...], ...]


def resolve(
    op: str,
    directions: int,
    names: Sequence[str] | None,
    alphas: Sequence[float],
    betas: Sequence[float],
) -> Resolved:
    """Give each function its alpha and beta as ONNX Runtime does.

    Values are consumed in the order of the functions that take one, forward direction
    first. Where they run out, LeakyRelu, Elu and HardSigmoid take the operator's default
    and Affine, ScaledTanh and ThresholdedRelu take 0 (so that the first two are constant),
    though the operators' own defaults are 1 and 0: those are named in ``disputed``.

    Raises:
        Refused: An unknown function, or not one for each use.
    """
    wanted = len(DEFAULTS[op])
    given = list(names) if names else list(DEFAULTS[op]) * directions
    if len(given) != wanted * directions:
        raise Refused(
            f"{op} with {directions} direction(s) must name {wanted * directions} activations, "
            f"got {len(given)} ({', '.join(given[:8])})"
        )
    left_alpha, left_beta = list(alphas), list(betas)
    found, disputed, by_text = [], [], []
    for written in given:
        name = written.lower()
        if name not in _PLAIN | _OPERATOR_DEFAULTS.keys():
            raise Refused(f"activation {written!r} is not one of ONNX's")
        alpha, beta = _OPERATOR_DEFAULTS.get(name, (None, None))
        alpha, taken_alpha = _parameter(name, alpha, left_alpha)
        beta, taken_beta = _parameter(name, beta, left_beta)
        by_text.append(Activation(name, alpha, beta))
        found.append(Activation(name, taken_alpha, taken_beta))
        if found[-1] != by_text[-1]:
            disputed.append(written)
    return Resolved(
        _by_direction(found, directions), tuple(disputed), _by_direction(by_text, directions)
    )


def _by_direction(
    each: Sequence[Activation], directions: int
) -> tuple[tuple[Activation, ...], ...]:
    wanted = len(each) // directions
    return tuple(tuple(each[d * wanted : (d + 1) * wanted]) for d in range(directions))


def _parameter(
    name: str, default: float | None, left: list[float]
) -> tuple[float | None, float | None]:
    """Return what a parameter is by the text, and in ONNX Runtime; None where there is none."""
    if default is None:
        return None, None
    if left:
        given = left.pop(0)
        return given, given
    return default, 0.0 if name in _ZERO_IN_ONNX_RUNTIME else default
