"""A report in MLflow: its numbers as metrics, the verdict as a tag, JSON and HTML as artifacts."""

from __future__ import annotations

import mlflow

from rnnaudit.integrations.metrics import metrics
from rnnaudit.integrations.tracking import documents
from rnnaudit.results import Report


def log_report(
    report: Report, *, step: int | None = None, html: bool = True, run_id: str | None = None
) -> None:
    """Log a report to an MLflow run.

    Args:
        report: The audit.
        step: Of the training, for the metrics' curves.
        html: Also log the page with the pictures (``pip install 'rnnaudit[report]'``).
        run_id: Of the run; the active one, or a new one, without.

    Raises:
        UsageError: The page is wanted, and what draws it is not installed.
    """
    files = documents(report, html=html)
    run = run_id or (mlflow.active_run() or mlflow.start_run()).info.run_id
    mlflow.log_metrics(metrics(report), step=step, run_id=run)
    client = mlflow.MlflowClient()
    client.set_tag(run, "rnnaudit.verdict", report.verdict)
    for name, text in files.items():
        client.log_text(run, text, f"rnnaudit/{name}")
