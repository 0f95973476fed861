"""Cells that feed one another and are restarted together, as one recurrent system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rnnaudit.cells.interface import advance, drive, output
from rnnaudit.model import Cell, Readout, Recurrence


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A causal stack as one system: its state is the cells' states side by side.

    Attributes:
        cells: The layers' cells, the first one next to the input.
        start: s_start [S].
        readout: The linear layer that the output goes through, if any.
    """

    cells: tuple[Cell, ...]
    start: Tensor
    readout: Readout | None = None

    @classmethod
    def of(cls, recurrences: Sequence[Recurrence], readout: Readout | None = None) -> Chain:
        """Join recurrences that all run in one direction."""
        return cls(
            tuple(r.cell for r in recurrences),
            torch.cat([r.initial.value for r in recurrences]),
            readout,
        )

    @property
    def input_size(self) -> int:
        """Width I of the first cell's input."""
        return self.cells[0].input_size

    @property
    def width(self) -> int:
        """Numbers that one step of one state touches, about."""
        return max(5 * cell.state_size for cell in self.cells)

    def drive(self, x: Tensor) -> Tensor:
        """Map inputs x [..., I] to the first cell's drive."""
        return drive(self.cells[0], x)

    def advance(self, s: Tensor, z: Tensor) -> Tensor:
        """Step every cell once from s [..., S]; z [..., Z] drives the first."""
        if len(self.cells) == 1:
            return advance(self.cells[0], s, z)
        sizes = [cell.state_size for cell in self.cells]
        states: list[Tensor] = []
        for cell, before in zip(self.cells, s.split(sizes, dim=-1), strict=True):
            if states:
                z = drive(cell, output(self.cells[len(states) - 1], states[-1]))
            states.append(advance(cell, before, z))
        return torch.cat(states, dim=-1)

    def output(self, s: Tensor) -> Tensor:
        """Return the last cell's output h [..., H] of a state, before the readout."""
        return output(self.cells[-1], s[..., s.shape[-1] - self.cells[-1].state_size :])

    def deviation(self, gap: Tensor) -> Tensor:
        """Return how a state's gap [..., S] shows in the output, through the readout."""
        shown = self.output(gap)
        return shown if self.readout is None else shown @ self.readout.A.mT
