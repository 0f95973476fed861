"""What every kind of cell can do in a graph: read its inputs, and take one step, on rows.

A row is one (time, batch) position. The input drive is written once; a step maps rows of
states and of drives to rows of states, so that every truncated form is made of steps.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Protocol

import onnx_ir as ir

from rnnaudit.cells.activations import parameters
from rnnaudit.export.emit import Emitter
from rnnaudit.model import Activation, Cell

Rows = tuple[ir.Value, ...]


class Steps(Protocol):
    """The graph-writing half of a cell; its weights are stored when it is made.

    ``widths`` are those of the parts of the state: (H,), or (P, H) for an LSTM's (h, c).
    """

    widths: tuple[int, ...]

    def drive(self, x: ir.Value) -> Rows:
        """Write the input's part of the pre-activations for rows x [M, I]."""
        ...

    def advance(self, s: Rows, z: Rows) -> Rows:
        """Write one step from states s (each [M, width]) under the drive z."""
        ...


@singledispatch
def steps(cell: Cell, emit: Emitter) -> Steps:
    """Store the cell's weights and return what writes its drive and its steps."""
    raise NotImplementedError(type(cell).__name__)


ONNX_NAMES = {
    "tanh": "Tanh",
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "affine": "Affine",
    "scaledtanh": "ScaledTanh",
    "leakyrelu": "LeakyRelu",
    "thresholdedrelu": "ThresholdedRelu",
    "hardsigmoid": "HardSigmoid",
    "elu": "Elu",
    "softsign": "Softsign",
    "softplus": "Softplus",
}
"""Activations as the recurrent operators spell them; all but Affine and ScaledTanh, which are
written as products and sums, are operators of their own too."""

_ALPHA = frozenset({"leakyrelu", "thresholdedrelu", "hardsigmoid", "elu"})


class Function:
    """An activation of pre-activations that are first bounded to ±clip, as nodes."""

    def __init__(
        self, emit: Emitter, activation: Activation, clip: float | None, name: str
    ) -> None:
        """Store the constants that the nodes share, under ``name``."""
        self._emit = emit
        self._kind = activation.name
        self._alpha, self._beta = parameters(activation)
        self._bounds = (
            None
            if clip is None
            else (emit.constant(-clip, f"{name}_low"), emit.constant(clip, f"{name}_high"))
        )
        if self._kind in ("affine", "scaledtanh"):
            self._factors = (
                emit.constant(self._alpha, f"{name}_alpha"),
                emit.constant(self._beta, f"{name}_beta"),
            )

    def __call__(self, v: ir.Value, name: str) -> ir.Value:
        """Write the function of rows v; the result is called ``name``."""
        emit = self._emit
        if self._bounds is not None:
            v = emit.op("Clip", v, *self._bounds, name=f"{name}_clip")
        if self._kind == "affine":
            alpha, beta = self._factors
            return emit.op("Add", emit.op("Mul", v, alpha, name=f"{name}_scaled"), beta, name=name)
        if self._kind == "scaledtanh":
            alpha, beta = self._factors
            inner = emit.op("Mul", v, beta, name=f"{name}_scaled")
            return emit.op("Mul", emit.op("Tanh", inner, name=f"{name}_tanh"), alpha, name=name)
        attributes = {"alpha": self._alpha} if self._kind in _ALPHA else {}
        if self._kind == "hardsigmoid":
            attributes["beta"] = self._beta
        return emit.op(ONNX_NAMES[self._kind], v, name=name, **attributes)
