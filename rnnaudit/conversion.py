"""A given graph in another opset: converted, and run beside the original before it is cut.

Operators change their meaning from opset to opset, and the converter of onnx is another program:
what it makes of the graph is held to ε like any other candidate.
"""

from __future__ import annotations

from pathlib import Path

from rnnaudit import export, runtime
from rnnaudit.errors import RnnauditError, UnsupportedModelError
from rnnaudit.model import Model
from rnnaudit.reports.numbers import epsilon, up
from rnnaudit.verification import verify

SECONDS = 15.0
"""The time budget of the comparison."""


def check(model: Model, opset: int | None, file: Path, *, eps: float, seed: int) -> None:
    """Refuse an opset in which a model's graph, not truncated, does not run as it did.

    Args:
        model: The model as loaded.
        opset: Opset that is wanted; without, what the forms need.
        file: Where the converted graph is written, to be run.
        eps: Largest error that passes.
        seed: Of the inputs.

    Raises:
        UnsupportedModelError: The graph cannot be converted, or errs by more than ``eps``.
    """
    if model.graph is None or not _runs(model):
        return
    was, target, converted = export.converted(model.graph, opset)
    if was == target:
        return
    try:
        export.write(converted, file)
        judged = verify(model, file, eps=eps, depths={}, seed=seed, time_budget=SECONDS)
    except UnsupportedModelError as error:
        raise _refused(was, target, opset, str(error.args[0])) from error
    if judged.max_abs_error is None:
        raise _refused(was, target, opset, judged.reason)
    if not judged.passed:
        raise _refused(
            was,
            target,
            opset,
            f"not truncated, it errs by {up(judged.max_abs_error)}, more than ε = {epsilon(eps)}",
        )


def _runs(model: Model) -> bool:
    try:
        runtime.describe(model.runnable())
    except RnnauditError:
        return False  # then there is nothing to compare with
    return True


def _refused(was: int, target: int, wanted: int | None, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a graph of opset {target} was wanted, and that of opset {was} does not convert: {reason}",
        help=export.without_opset(wanted, target),
    )
