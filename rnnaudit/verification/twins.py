"""Two models of the same GRU weights are no twins where one resets before the product.

ONNX's ``linear_before_reset`` chooses between r ⊙ (U h) and U (r ⊙ h): the weights fit both
equations, and the outputs differ.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rnnaudit import loaders
from rnnaudit.errors import RnnauditError
from rnnaudit.findings import finding
from rnnaudit.model import GRUCell, Model
from rnnaudit.results import Finding

_EQUATION = {True: "r ⊙ (U h)", False: "U (r ⊙ h)"}


def contradictions(original: Model, candidate: Path) -> tuple[Finding, ...]:
    """Name each GRU of the candidate that is one of the original's in the other equation."""
    grus = [(r.label, r.cell) for r in original.recurrences() if isinstance(r.cell, GRUCell)]
    if not grus:
        return ()
    try:
        twins = list(loaders.load(candidate).recurrences())
    except RnnauditError:  # a truncated model holds no recurrence
        return ()
    return tuple(
        finding(
            "RA133",
            twin.label,
            f"it holds the weights of {label} in the original, which computes "
            f"{_EQUATION[cell.reset_after]}, and computes {_EQUATION[twin.cell.reset_after]}",
        )
        for label, cell in grus
        for twin in twins
        if isinstance(twin.cell, GRUCell)
        and twin.cell.reset_after != cell.reset_after
        and torch.equal(twin.cell.W, cell.W)
        and torch.equal(twin.cell.U, cell.U)
    )
