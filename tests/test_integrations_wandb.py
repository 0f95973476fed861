"""W&B keeps of a report, offline too, its numbers, its verdict, and the files."""

import json
from pathlib import Path

import pytest

from rnnaudit.reports import JsonRenderer
from tests import reports_by_hand as by_hand

wandb = pytest.importorskip("wandb")
pytestmark = pytest.mark.filterwarnings("ignore")

from rnnaudit.integrations.metrics import metrics  # noqa: E402
from rnnaudit.integrations.wandb import log_report  # noqa: E402


def test_an_offline_run_keeps_numbers_verdict_and_files(tmp_path, monkeypatch):
    kept = []
    with wandb.init(
        mode="offline", dir=tmp_path, project="models", settings=wandb.Settings(silent=True)
    ) as run:
        keep = run.log_artifact
        monkeypatch.setattr(run, "log_artifact", lambda made: kept.append(made) or keep(made))
        log_report(by_hand.STABLE, run, step=3)
        run.log({"loss": 1.0}, step=4)  # W&B keeps a step when the next one begins
        summary = dict(run.summary)
    expected = metrics(by_hand.STABLE)
    assert {name: summary[name] for name in expected} == expected
    assert summary["rnnaudit/verdict"] == by_hand.STABLE.verdict
    assert summary["_step"] == 3
    (artifact,) = kept
    assert artifact.type == "rnnaudit-report"
    assert sorted(artifact.manifest.entries) == ["report.html", "report.json"]
    written = artifact.manifest.entries["report.json"].local_path
    with Path(written).open(encoding="utf-8") as file:
        assert json.load(file) == json.loads(JsonRenderer().render(by_hand.STABLE))
    assert list(tmp_path.rglob("*.wandb"))
