"""ONNX's own LSTM, GRU and RNN nodes, with a cell's weights in their order of gates."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import Tensor

from rnnaudit.cells.activations import TAKES_ALPHA, TAKES_BETA, parameters
from rnnaudit.errors import UnsupportedModelError
from rnnaudit.export.emit import Emitter
from rnnaudit.export.interface import ONNX_NAMES
from rnnaudit.model import (
    Activation,
    ElmanCell,
    GRUCell,
    LSTMCell,
    NamedCell,
    Recurrence,
    TracedCell,
)

_KINDS = {"elman": "RNN", "gru": "GRU", "lstm": "LSTM"}


class RecurrentNode:
    """Recurrences over the same input as one operator; the weights are stored when it is made."""

    def __init__(self, emit: Emitter, recurrences: Sequence[Recurrence]) -> None:
        """Store W, R, B and peepholes.

        Raises:
            UnsupportedModelError: A cell has an option that no ONNX operator has.
        """
        self._emit = emit
        cells = [_with_operator(r) for r in recurrences]
        self._kind = _KINDS[cells[0].kind]
        weights = [_onnx_weights(cell) for cell in cells]
        self._weights = [
            emit.constant(torch.stack([w[i] for w in weights]), name)
            for i, name in enumerate(("W", "R", "B"))
        ]
        names = [a for cell in cells for a in _activations(cell)]
        self._attributes: dict[str, object] = {
            "hidden_size": cells[0].hidden_size,
            "direction": "bidirectional" if len(cells) == 2 else recurrences[0].direction,
            "activations": [ONNX_NAMES[a.name] for a in names],
        }
        # ONNX reads these lists in order, one entry for each function that takes one.
        if alphas := [parameters(a)[0] for a in names if a.name in TAKES_ALPHA]:
            self._attributes["activation_alpha"] = alphas
        if betas := [parameters(a)[1] for a in names if a.name in TAKES_BETA]:
            self._attributes["activation_beta"] = betas
        if cells[0].clip is not None:
            self._attributes["clip"] = cells[0].clip
        self._peephole = None
        if isinstance(cells[0], GRUCell):
            self._attributes["linear_before_reset"] = int(cells[0].reset_after)
        if isinstance(cells[0], LSTMCell):
            self._attributes["input_forget"] = int(cells[0].input_forget)
            if any(isinstance(c, LSTMCell) and c.peephole is not None for c in cells):
                self._peephole = emit.constant(torch.stack([_peephole(c) for c in cells]), "P")

    def run(self, x: ir.Value, initial: Sequence[ir.Value], *, outputs: int) -> Sequence[ir.Value]:
        """Write the operator over x [T, N, I] from initial parts [D, N, width], if any.

        Returns:
            The first ``outputs`` of Y [T, D, N, H], Y_h and Y_c [D, N, H].
        """
        inputs: list[ir.Value | None] = [x, *self._weights, None, *initial]
        if self._peephole is not None:
            inputs += [None] * (7 - len(inputs)) + [self._peephole]
        names = ["Y", "Y_h", "Y_c"][:outputs]
        return self._emit.several(self._kind, *inputs, names=names, **self._attributes)


def _with_operator(recurrence: Recurrence) -> NamedCell:
    if isinstance(recurrence.cell, TracedCell):
        raise UnsupportedModelError(
            f"a layer that stays recurrent must have an ONNX operator, got {recurrence.label}, "
            "whose step was read from other operators",
            help="truncate it without --keep-ops, or leave it out",
        )
    return recurrence.cell


def _activations(cell: NamedCell) -> tuple[Activation, ...]:
    if isinstance(cell, ElmanCell):
        return (cell.activation,)
    if isinstance(cell, GRUCell):
        return (cell.gate, cell.candidate)
    return (cell.gate, cell.candidate, cell.squash)


def _reorder(blocks: Tensor, order: Sequence[int]) -> Tensor:
    parts = blocks.chunk(len(order))
    return torch.cat([parts[i] for i in order])


def _onnx_weights(cell: NamedCell) -> tuple[Tensor, Tensor, Tensor]:
    """Return (W, R, B) of one direction in ONNX's order of gates: z, r, h or i, o, f, c."""
    if isinstance(cell, ElmanCell):
        return cell.U, cell.W, torch.cat([cell.b, torch.zeros_like(cell.b)])
    if isinstance(cell, GRUCell):
        zrh = (1, 0, 2)
        b, c = _reorder(cell.b_input, zrh), _reorder(cell.b_recurrent, zrh)
        return _reorder(cell.W, zrh), _reorder(cell.U, zrh), torch.cat([b, c])
    if cell.projection is not None:
        raise UnsupportedModelError(
            "a layer that stays recurrent must have an ONNX operator, got an LSTM with a "
            "projection (proj_size)",
            help="truncate it without --keep-ops: the forms need no such operator",
        )
    if cell.clip is not None and cell.clip_output:
        raise UnsupportedModelError(
            "a layer that stays recurrent must run as it was read, got an LSTM whose clip also "
            "bounds the cell state's tanh, which ONNX Runtime leaves out",
            help="truncate it without --keep-ops: the forms need no such operator",
        )
    iofc = (0, 3, 1, 2)
    b = _reorder(cell.b, iofc)
    return _reorder(cell.W, iofc), _reorder(cell.U, iofc), torch.cat([b, torch.zeros_like(b)])


def _peephole(cell: NamedCell) -> Tensor:
    """Return the peepholes of one direction in ONNX's order i, o, f."""
    assert isinstance(cell, LSTMCell)
    if cell.peephole is None:
        return cell.U.new_zeros(3 * cell.cell_size)
    i, f, o = cell.peephole
    return torch.cat([i, o, f])
