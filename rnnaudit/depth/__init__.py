"""How deep a truncation must be on data: the error of every depth, measured at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rnnaudit import cells
from rnnaudit.cells.chain import Chain
from rnnaudit.depth.how import Clock, How, Progress
from rnnaudit.depth.layerwise import Search, study_layer
from rnnaudit.depth.restarts import study_together
from rnnaudit.depth.rounding import MERGED, floor_for
from rnnaudit.depth.study import DepthStudy, grid, merged, pool
from rnnaudit.model import Readout, Recurrence, Stack
from rnnaudit.results import EPSILONS, Norm

__all__ = [
    "DepthStudy",
    "Glance",
    "floor_for",
    "glance_at_stack",
    "grid",
    "merged",
    "pool",
    "study_recurrence",
    "study_stack",
]


def study_recurrence(
    recurrence: Recurrence,
    x: Tensor,
    *,
    readout: Readout | None = None,
    norm: Norm = "max",
    budget_s: float | None = None,
    progress: Progress | None = None,
    floor: float = MERGED,
    unit_eps: float | None = None,
    whole: bool = False,
) -> DepthStudy:
    """Measure every truncation depth of one recurrence on sequences x [N, T, I].

    Args:
        recurrence: The cell, its start and its direction.
        x: Inputs of this recurrence, aligned with time (a reverse one reads them backwards).
        readout: Errors are taken after this layer where it is given.
        norm: ``max`` over output units, or ``2``.
        budget_s: Stop after this many seconds; the study then says how far it came.
        progress: Called with the share of the work that is done.
        floor: Relative difference of states that counts as merged.
        unit_eps: Also say for each unit of the state at which depths it is off by more.
        whole: Whether no sequence can be longer than these.
    """
    system = Chain.of([recurrence], readout)
    how = How.of(norm, floor, budget_s, progress, unit_eps, whole=whole)
    return study_together(system, cells.reads(recurrence, x), how)


def study_stack(
    stack: Stack,
    x: Tensor,
    *,
    norm: Norm = "max",
    layerwise: bool | None = None,
    epsilons: Sequence[float] = EPSILONS,
    budget_s: float | None = None,
    progress: Progress | None = None,
    floor: float = MERGED,
    whole: bool = False,
) -> DepthStudy:
    """Measure truncation depths of a whole stack, through its readout, on x [N, T, I].

    Where all layers run in one direction they are restarted together: depth k is the model
    run on a window of its last k inputs. Otherwise, or where ``layerwise`` asks for it,
    each recurrence is truncated to the same depth on its own. With one layer every depth
    is evaluated; with several, those that decide for ``epsilons``, and all where that is cheap.

    Args:
        stack: The layers and the readout.
        x: Inputs, aligned with time.
        norm: ``max`` over output units, or ``2``.
        layerwise: Force one form or the other; layers of both directions have only one.
        epsilons: What depths are wanted for, where not every depth is evaluated; the one that
            matters most first.
        budget_s: Stop after this many seconds; the study then says how far it came.
        progress: Called with the share of the work that is done.
        floor: Relative difference of states that counts as merged.
        whole: Whether no sequence can be longer than these.
    """
    how = How.of(norm, floor, budget_s, progress, whole=whole)
    recurrences = list(stack.recurrences())
    one_way = len({r.reverse for r in recurrences}) == 1 and not any(
        layer.bidirectional for layer in stack.layers
    )
    if one_way and not layerwise:
        system = Chain.of(recurrences, stack.readout)
        return study_together(system, cells.reads(recurrences[0], x), how)
    if len(stack.layers) == 1:
        return study_layer(stack.layers[0], stack.readout, x, how)
    return Search(stack, x, epsilons, how).finish(how.clock)


@dataclass(frozen=True, slots=True, eq=False)
class Glance:
    """The depths 0 and the largest that data can tell of, and what goes on from there."""

    search: Search

    @property
    def study(self) -> DepthStudy:
        """What is known so far."""
        return self.search.study()

    def finish(self, budget_s: float | None) -> DepthStudy:
        """Evaluate what `study_stack` does, for ``budget_s`` more seconds."""
        return self.search.finish(Clock(budget_s))


def glance_at_stack(
    stack: Stack,
    x: Tensor,
    *,
    norm: Norm = "max",
    epsilons: Sequence[float] = EPSILONS,
    budget_s: float | None = None,
    progress: Progress | None = None,
    floor: float = MERGED,
    whole: bool = False,
) -> Glance:
    """Look whether a stack of several layers, cut layer by layer, forgets on x [N, T, I] at all.

    The arguments are those of `study_stack`.
    """
    how = How.of(norm, floor, budget_s, progress, whole=whole)
    return Glance(Search(stack, x, epsilons, how))
