"""A Lightning callback: λ, Λ₁ and k in the loggers, and training that stops by a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch

from rnnaudit.integrations.watching import Question, Schedule, Watch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback, LightningModule, Trainer

if TYPE_CHECKING:
    from rnnaudit.policy import Policy
    from rnnaudit.results import Outcome


class AuditCallback(Callback):  # type: ignore[misc]
    """Audits the recurrences of a ``LightningModule`` while it is trained.

    Numbers go to every logger and to ``trainer.callback_metrics``, so that ``EarlyStopping``
    and ``ModelCheckpoint`` can monitor them. Training itself is not touched: the weights come
    out the same with and without this callback. Process 0 audits and the others wait, so that
    every process must hold the whole model.

    Args:
        every_n_epochs: Epochs between audits; None for none at the end of epochs.
        every_n_steps: Optimizer steps between audits; None for none within epochs.
        module: Name of the submodule to audit; empty for all of it.
        policy: Stop training where it fails; None only logs.
        patience: How many audits in a row must fail.
        question: As in `rnnaudit.audit`; ``time_budget`` bounds the seconds of each audit.

    Raises:
        UsageError: An argument makes no sense.
    """

    def __init__(
        self,
        *,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        module: str = "",
        policy: Policy | None = None,
        patience: int = 1,
        **question: Unpack[Question],
    ) -> None:
        super().__init__()
        self._schedule = Schedule(every_n_epochs, every_n_steps)
        self._watch = Watch(module, policy, patience, question)

    @property
    def outcome(self) -> Outcome | None:
        """The last audit: a report, or why there could be none."""
        return self._watch.outcome

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Audit every so many optimizer steps."""
        if self._schedule.at_step(trainer.global_step):
            self._look(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Audit every so many epochs, unless the last step has just done so."""
        if self._schedule.at_epoch(trainer.current_epoch + 1, trainer.global_step):
            self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, module: LightningModule) -> None:
        self._schedule.step = trainer.global_step
        if trainer.is_global_zero:
            found = self._watch.look(module)
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)
            trainer.callback_metrics.update({key: torch.tensor(found[key]) for key in found})
        trainer.should_stop = trainer.strategy.broadcast(self._watch.stops) or trainer.should_stop
