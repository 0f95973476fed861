"""A deeper plan is held to the inputs that a shallower one failed."""

import pytest
import torch

from rnnaudit import trial
from rnnaudit.examine import Settings, examine
from rnnaudit.loaders import load
from rnnaudit.observe import observe
from rnnaudit.planning import Wanted, chosen
from rnnaudit.truncation import AUTO

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_plan_is_judged_on_the_same_inputs(tmp_path, monkeypatch):
    torch.manual_seed(0)
    torch.save(torch.nn.RNN(2, 3).state_dict(), tmp_path / "rnn.pt")
    model = load(tmp_path / "rnn.pt")
    found = examine(
        model,
        observe(model, None, seed=0, sequences=5, length=32),
        Settings(eps=1e-3, time_budget=2.0),
    )
    order = [chosen(found, depth, Wanted(1e-3, 512)) for depth in (1, 2, 40)]
    judged = []

    def spy(*models, **settings):
        result = verify(*models, **settings)
        judged.append((settings["seed"], result.passed))
        return result

    verify = trial.verify
    monkeypatch.setattr(trial, "verify", spy)
    tried = trial.first_to_pass(
        found, iter(order), tmp_path / "cut.onnx", shape=AUTO, data=None, progress=None
    )
    assert [passed for _, passed in judged] == [False, False, True]
    assert {seed for seed, _ in judged} == {found.settings.seed}
    assert tried.judged.passed
