"""In Lightning: what is logged is what an audit says, training is the same, a policy stops it."""

import csv
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from rnnaudit.errors import UnsupportedModelError, UsageError
from rnnaudit.policy import Policy
from rnnaudit.results import Refusal, Report

L = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and loggers

from lightning.pytorch.loggers import CSVLogger  # noqa: E402

import rnnaudit  # noqa: E402
from rnnaudit.integrations.lightning import AuditCallback  # noqa: E402
from rnnaudit.integrations.metrics import metrics  # noqa: E402

STEPS = 3
ANY = Policy(require="any", fail_on="never")


class Net(L.LightningModule):
    """A recurrence and a head, trained on noise."""

    def __init__(self, gain=0.2, rate=1e-3):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head, self.rate = nn.RNN(1, 2, batch_first=True), nn.Linear(2, 1), rate
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(gain * torch.eye(2))

    def training_step(self, batch, _):
        x = batch[0]
        return (self.head(self.rnn(x)[0][:, -1]) - x[:, 0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.rate)


def fit(net, folder, *callbacks, epochs=2):
    torch.manual_seed(1)
    x = torch.randn(STEPS, 5, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=1)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=CSVLogger(folder),
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, loader)
    return trainer


def logged(trainer):
    """Read the rows of the logger's file that an audit wrote."""
    trainer.logger.save()
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
            if row["rnnaudit/stable"]
        ]


def test_what_is_logged_is_the_audit_and_training_is_the_same(tmp_path):
    watched, alone = Net(), Net()
    callback = AuditCallback(eps=0.1)
    trainer = fit(watched, tmp_path, callback)
    fit(alone, tmp_path / "alone")
    for name, weight in alone.state_dict().items():
        assert torch.equal(watched.state_dict()[name], weight), name
    assert isinstance(callback.outcome, Report)
    expected = metrics(rnnaudit.audit(watched, eps=0.1))
    assert metrics(callback.outcome) == expected
    assert expected["rnnaudit/stable"] == 1
    rows = logged(trainer)
    assert [row["step"] for row in rows] == [STEPS, 2 * STEPS]
    assert {name: rows[-1][name] for name in expected} == expected
    seen = {name: float(trainer.callback_metrics[name]) for name in expected}
    assert seen == pytest.approx(expected)


def test_steps_are_counted_apart_from_epochs_and_none_is_audited_twice(tmp_path):
    callback = AuditCallback(every_n_steps=3, every_n_epochs=1, module="rnn", eps=0.1)
    trainer = fit(Net(), tmp_path, callback, epochs=1)
    assert [row["step"] for row in logged(trainer)] == [3]
    assert callback.outcome.model.path == "RNN"


def test_a_policy_stops_training_and_says_why(tmp_path, caplog):
    policy = Policy(require="any", max_depth=1)
    callback = AuditCallback(
        every_n_steps=1, every_n_epochs=None, policy=policy, patience=2, eps=1e-2
    )
    trainer = fit(Net(gain=0.5), tmp_path, callback, epochs=5)
    assert trainer.global_step == 2
    assert not callback.outcome.gate.passed
    (said,) = [record.getMessage() for record in caplog.records if "training stops" in record.msg]
    assert "max-depth: wanted k(1e-2) ≤ 1 proved" in said


def test_weights_that_become_nan_stop_training_under_any_policy(tmp_path, caplog):
    callback = AuditCallback(every_n_steps=1, policy=ANY)
    trainer = fit(Net(rate=math.inf), tmp_path, callback)
    assert trainer.global_step == 1
    assert isinstance(callback.outcome, Refusal)
    assert "Net could not be audited (RA104)" in caplog.text


def test_wrong_arguments_are_refused_before_and_during_training(tmp_path):
    with pytest.raises(UsageError, match="every_n_epochs must be at least 1, got 0"):
        AuditCallback(every_n_epochs=0)
    with pytest.raises(UsageError, match="patience must be at least 1, got 0"):
        AuditCallback(patience=0)
    with pytest.raises(UsageError, match="module must name a part of Net, got 'decoder'"):
        fit(Net(), tmp_path, AuditCallback(module="decoder"))
    with pytest.raises(UnsupportedModelError, match="no recurrence in Linear"):
        fit(Net(), tmp_path, AuditCallback(module="head"))
