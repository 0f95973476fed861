"""How far a graph's own outputs move when recurrences in it are cut, in ONNX Runtime.

What stands behind a recurrence may amplify its errors, or make them vanish. The graph is
run once on a few inputs; every choice of depths is then written and run on the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rnnaudit import runtime
from rnnaudit.data import Data
from rnnaudit.errors import UnsupportedModelError
from rnnaudit.examine import Examination
from rnnaudit.observe import LENGTH
from rnnaudit.truncation import Shape
from rnnaudit.verification.inputs import Feed, data_feeds, probe_feeds
from rnnaudit.verification.judge import judge
from rnnaudit.verification.originals import Answer, Cut, Graph
from rnnaudit.verification.slots import Slot

MOST_STEPS = 50_000
"""Steps of the user's sequences that are run for each choice of depths."""


@dataclass(slots=True, eq=False)
class Effects:
    """The largest error of a graph's outputs when recurrences are cut to given depths.

    Attributes:
        found: What was examined; its model has a graph.
        file: Where each truncated graph is written, over the one before.
        shape: The form that is wanted.
        data: The user's sequences; synthetic ones are run where there are none.
        unseen: Places among the synthetic inputs that no depth has to serve.
    """

    found: Examination
    file: Path
    shape: Shape
    data: Data | None
    unseen: Sequence[int] = ()
    _answers: dict[str, Sequence[Answer | None]] = field(default_factory=dict)

    def __call__(self, depths: Mapping[str, int]) -> float:
        """Return the error; infinite where the graphs cannot be run or compared."""
        from rnnaudit import export

        model = self.found.model
        # The last form may be open to all layers together and not to one alone.
        shape = replace(self.shape, form="auto") if self.shape.form == "last" else self.shape
        forms = export.choose(model, depths, shape, self.found.seen.lengths)
        graph = export.truncate_graph(model, depths, forms, opset=self.shape.opset)
        export.write(graph, self.file)
        interface = runtime.describe(self.file)
        original = Graph(model, interface, Cut({}, {}))
        todo = self._feeds(original.slots)
        ports = repr((interface.inputs, interface.outputs))
        if ports not in self._answers:
            self._answers[ports] = original.answer(todo)
        error = apart(original, self.file, todo, self._answers[ports])
        return math.inf if error is None else error

    def _feeds(self, slots: Sequence[Slot]) -> list[Feed]:
        """Make inputs like those that depths were measured on."""
        settings = self.found.settings
        if self.data is not None:
            made = data_feeds(slots, self.data, settings.seed)
            steps = itertools.accumulate(feed.cost for feed in made)
            most = max(MOST_STEPS, made[0].cost)
            return [feed for feed, sum_ in zip(made, steps, strict=True) if sum_ <= most]
        known = [place for places in self.found.seen.sources for place in places]
        n = next((size for slot in slots if (size := slot.fixed("batch"))), 1)
        count = n * (1 + max(known, default=0))
        made = probe_feeds(slots, count, LENGTH, settings.seed, settings.input_range)
        return [feed for place, feed in enumerate(made) if place not in self.unseen]


def apart(
    original: Graph, file: Path, todo: Sequence[Feed], answers: Sequence[Answer | None]
) -> float | None:
    """Return the largest error of a file's outputs; None where nothing can be compared.

    Args:
        original: The graph that answered.
        file: The truncated graph.
        todo: What both are given.
        answers: What the original said to each; None where it does not run.
    """
    run = [(f, a) for f, a in zip(todo, answers, strict=True) if a is not None]
    given = [original.feed(feed) for feed, _ in run]
    came = runtime.run(file, given, calls=original.calls).outputs if run else None
    if came is None:
        return None
    try:
        return judge([answer.outputs for _, answer in run], came, 1.0).max_abs_error
    except UnsupportedModelError:  # no outputs in common
        return None
