"""A callback of Hugging Face's Trainer: λ, Λ₁ and k in its log, and a stop by a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rnnaudit.integrations.watching import Question, Schedule, Watch

if TYPE_CHECKING:
    from rnnaudit.policy import Policy
    from rnnaudit.results import Outcome


class AuditCallback(TrainerCallback):  # type: ignore[misc]
    """Audits the recurrences of a Trainer's model while it is trained.

    ``trainer.add_callback(AuditCallback(trainer, every_n_steps=500))``: numbers go through
    ``trainer.log``, and so to its history and whatever it reports to. Training itself is not
    touched. Process 0 audits and the others wait, so that every process must hold the whole
    model.

    Args:
        trainer: The Trainer, through which numbers are logged.
        every_n_epochs: Epochs between audits; None for none at the end of epochs.
        every_n_steps: Optimizer steps between audits; None for none within epochs.
        module: Name of the submodule to audit; empty for the whole model.
        policy: Stop training where it fails; None only logs.
        patience: How many audits in a row must fail.
        question: As in `rnnaudit.audit`; ``time_budget`` bounds the seconds of each audit.

    Raises:
        UsageError: An argument makes no sense.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        module: str = "",
        policy: Policy | None = None,
        patience: int = 1,
        **question: Unpack[Question],
    ) -> None:
        self._trainer = trainer
        self._schedule = Schedule(every_n_epochs, every_n_steps)
        self._watch = Watch(module, policy, patience, question)

    @property
    def outcome(self) -> Outcome | None:
        """The last audit: a report, or why there could be none."""
        return self._watch.outcome

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Audit every so many optimizer steps."""
        if self._schedule.at_step(state.global_step):
            self._look(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Audit every so many epochs, unless the last step has just done so."""
        if self._schedule.at_epoch(round(state.epoch or 0), state.global_step):
            self._look(state, control)

    def _look(self, state: TrainerState, control: TrainerControl) -> None:
        self._schedule.step = state.global_step
        if state.is_world_process_zero:
            model = self._trainer.accelerator.unwrap_model(self._trainer.model)
            found = self._watch.look(model)
            if found:
                self._trainer.log(found)
        (stops,) = broadcast_object_list([self._watch.stops])
        control.should_training_stop = control.should_training_stop or stops
