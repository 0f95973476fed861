"""In Hugging Face's Trainer: the log holds what an audit says, and a policy stops training."""

import pytest
import torch
from torch import nn

from rnnaudit.policy import Policy

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")

import rnnaudit  # noqa: E402
from rnnaudit.integrations.metrics import metrics  # noqa: E402
from rnnaudit.integrations.transformers import AuditCallback  # noqa: E402


class Net(nn.Module):
    """A recurrence and a head that return their loss, as a Trainer wants."""

    def __init__(self, gain):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.RNN(1, 2, batch_first=True), nn.Linear(2, 1)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(gain * torch.eye(2))

    def forward(self, x, labels):
        y = self.head(self.rnn(x)[0][:, -1])
        return {"loss": (y - labels).square().mean(), "logits": y}


def trained(folder, gain=0.2, watch=True, epochs=2, **options):
    torch.manual_seed(1)
    data = [{"x": torch.randn(5, 1), "labels": torch.randn(1)} for _ in range(3)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = transformers.Trainer(model=Net(gain), args=arguments, train_dataset=data)
    callback = AuditCallback(trainer, **options) if watch else None
    if callback is not None:
        trainer.add_callback(callback)
    trainer.train()
    return trainer, callback


def test_the_log_holds_the_audit_and_training_is_the_same(tmp_path):
    trainer, callback = trained(tmp_path, eps=0.1)
    alone, _ = trained(tmp_path, watch=False)
    for name, weight in alone.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], weight), name
    logged = [row for row in trainer.state.log_history if "rnnaudit/stable" in row]
    assert [row["step"] for row in logged] == [3, 6]
    expected = metrics(rnnaudit.audit(trainer.model, eps=0.1))
    assert {name: logged[-1][name] for name in expected} == expected
    assert metrics(callback.outcome) == expected


def test_a_policy_stops_training_and_says_why(tmp_path, caplog):
    policy = Policy(require="any", max_depth=1)
    trainer, callback = trained(
        tmp_path, gain=0.5, every_n_steps=1, policy=policy, patience=2, eps=1e-2, module="rnn"
    )
    assert trainer.state.global_step == 2
    assert not callback.outcome.gate.passed
    assert "training stops: RNN fails its gate. max-depth: wanted k(1e-2) ≤ 1" in caplog.text
