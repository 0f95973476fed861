"""MLflow keeps of a report its numbers, its verdict, and the files as they were rendered."""

import json

import pytest

from rnnaudit.reports import JsonRenderer
from tests import reports_by_hand as by_hand

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore")

from rnnaudit.integrations.metrics import metrics  # noqa: E402
from rnnaudit.integrations.mlflow import log_report  # noqa: E402


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("models")
    yield mlflow.MlflowClient()
    while mlflow.active_run():
        mlflow.end_run()


def text(client, run, name):
    return mlflow.artifacts.load_text(f"runs:/{run}/rnnaudit/{name}")


def test_numbers_verdict_and_files_come_back_as_they_were(client):
    with mlflow.start_run() as run:
        log_report(by_hand.UNDECIDED, step=7)
    kept = client.get_run(run.info.run_id)
    assert kept.data.metrics == metrics(by_hand.UNDECIDED)
    assert kept.data.tags["rnnaudit.verdict"] == by_hand.UNDECIDED.verdict
    history = client.get_metric_history(run.info.run_id, "rnnaudit/stable")
    assert [point.step for point in history] == [7]
    found = text(client, run.info.run_id, "report.json")
    assert json.loads(found) == json.loads(JsonRenderer().render(by_hand.UNDECIDED))
    assert "<html" in text(client, run.info.run_id, "report.html")


def test_a_run_is_opened_where_there_is_none_or_taken_by_its_id(client):
    log_report(by_hand.STABLE, html=False)
    run = mlflow.active_run().info.run_id
    mlflow.end_run()
    assert client.get_run(run).data.metrics == metrics(by_hand.STABLE)
    assert [f.path for f in client.list_artifacts(run, "rnnaudit")] == ["rnnaudit/report.json"]
    log_report(by_hand.LONGER, html=False, run_id=run)
    assert mlflow.active_run() is None
    assert client.get_run(run).data.tags["rnnaudit.verdict"] == by_hand.LONGER.verdict
