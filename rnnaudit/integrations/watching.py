"""A model in training is audited now and then, and training stops where a policy says so."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from datetime import date
from typing import TYPE_CHECKING, TypedDict

from rnnaudit.errors import LoadError, UsageError
from rnnaudit.integrations.metrics import metrics
from rnnaudit.reports.paragraph import paragraph
from rnnaudit.results import Norm, Outcome, Refusal, Report

if TYPE_CHECKING:  # torch takes seconds
    from torch import nn

    from rnnaudit.api import Sequences, Source
    from rnnaudit.data import InputRange
    from rnnaudit.policy import Policy

_log = logging.getLogger(__name__)


class Question(TypedDict, total=False):
    """What is asked of a model, as in `rnnaudit.audit`."""

    eps: float
    norm: Norm
    data: Sequences | None
    input_range: InputRange | None
    layer: str | None
    seed: int
    confidence: float
    exceed: float | None
    time_budget: float | None


def judged(model: Source, policy: Policy, question: Question) -> Report:
    """Audit a model and hold it to a policy, as of today."""
    from rnnaudit.api import audit
    from rnnaudit.policy import judge

    report = audit(model, **question)
    return replace(report, gate=judge(report, policy, today=date.today()))


@dataclass(slots=True)
class Watch:
    """Audits of one model while it is trained.

    Attributes:
        module: Name of the submodule that is audited; empty for the whole module.
        policy: What the model must keep to; None only watches.
        patience: How many audits in a row must fail before training stops.
        question: Of each audit.
        outcome: The last audit, or why there could be none.
        failures: How many audits in a row have failed.
    """

    module: str
    policy: Policy | None
    patience: int
    question: Question
    outcome: Outcome | None = None
    failures: int = field(default=0)

    def __post_init__(self) -> None:
        """Refuse a patience that makes no sense."""
        positive(patience=self.patience)

    def look(self, root: nn.Module) -> dict[str, float]:
        """Audit the module as it is now, and return what is to be logged.

        Weights that have become NaN or infinite log nothing, and fail a policy.

        Raises:
            UsageError: An argument makes no sense.
            UnsupportedModelError: There is no recurrence that can be audited.
        """
        self.outcome = self._outcome(root)
        if isinstance(self.outcome, Refusal):
            _log.warning(paragraph(self.outcome))
            failed = True
        else:
            failed = self.outcome.gate is not None and not self.outcome.gate.passed
        self.failures = self.failures + 1 if failed else 0
        if self.stops:
            _log.warning("training stops: %s", paragraph(self.outcome))
        return metrics(self.outcome) if isinstance(self.outcome, Report) else {}

    @property
    def stops(self) -> bool:
        """Whether the policy has failed often enough for training to stop."""
        return self.policy is not None and self.failures >= self.patience

    def _outcome(self, root: nn.Module) -> Outcome:
        from rnnaudit.api import audit

        module = _submodule(root, self.module)
        try:
            if self.policy is None:
                return audit(module, **self.question)
            return judged(module, self.policy, self.question)
        except LoadError as error:
            name = self.module or type(root).__name__
            return Refusal(name, error.id, str(error.args[0]), error.help)


@dataclass(slots=True)
class Schedule:
    """When a model in training is audited.

    Attributes:
        every_n_epochs: Epochs between audits; None for none at the end of epochs.
        every_n_steps: Optimizer steps between audits; None for none within epochs.
        step: The optimizer step of the last audit.
    """

    every_n_epochs: int | None
    every_n_steps: int | None
    step: int = 0

    def __post_init__(self) -> None:
        """Refuse intervals that make no sense."""
        positive(every_n_epochs=self.every_n_epochs, every_n_steps=self.every_n_steps)

    def at_step(self, step: int) -> bool:
        """Whether to audit after this many optimizer steps."""
        return (
            self.every_n_steps is not None and step > self.step and step % self.every_n_steps == 0
        )

    def at_epoch(self, epoch: int, step: int) -> bool:
        """Whether to audit after this many epochs, unless the last step has just done so."""
        every = self.every_n_epochs
        return every is not None and epoch % every == 0 and step != self.step


def _submodule(root: nn.Module, name: str) -> nn.Module:
    try:
        return root.get_submodule(name)
    except AttributeError as error:
        raise UsageError(
            f"module must name a part of {type(root).__name__}, got {name!r}",
            help="named_modules() lists them",
        ) from error


def positive(**counts: int | None) -> None:
    """Refuse a count below 1.

    Raises:
        UsageError: One of the counts is.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"{name} must be at least 1, got {count}")
