"""Closed-form steps and derivatives for every cell, batched."""

from rnnaudit.cells import elman, gru, lstm, traced  # noqa: F401  (registers the kinds)
from rnnaudit.cells.interface import (
    Linearization,
    advance,
    drive,
    effort,
    gate_values,
    jacobian,
    jvp,
    linearize,
    multiplications,
    output,
    step,
    vjp,
)
from rnnaudit.cells.rollout import (
    readout,
    reads,
    run,
    run_layer,
    run_stack,
    trajectory,
    truncated,
)
from rnnaudit.cells.single import run_single

__all__ = [
    "Linearization",
    "advance",
    "drive",
    "effort",
    "gate_values",
    "jacobian",
    "jvp",
    "linearize",
    "multiplications",
    "output",
    "readout",
    "reads",
    "run",
    "run_layer",
    "run_single",
    "run_stack",
    "step",
    "trajectory",
    "truncated",
    "vjp",
]
