"""A report in Weights & Biases: numbers, the verdict in the summary, JSON and HTML kept."""

from __future__ import annotations

import re

import wandb

from rnnaudit.integrations.metrics import metrics
from rnnaudit.integrations.tracking import documents
from rnnaudit.results import Report


def log_report(
    report: Report, run: wandb.Run, *, step: int | None = None, html: bool = True
) -> None:
    """Log a report to a run: once with all its numbers, and an artifact of its files.

    Args:
        report: The audit.
        run: What ``wandb.init`` returned.
        step: Of the training; without, the run's own.
        html: Also show and keep the page with the pictures (``pip install 'rnnaudit[report]'``).

    Raises:
        UsageError: The page is wanted, and what draws it is not installed.
    """
    files = documents(report, html=html)
    shown = {"rnnaudit/report": wandb.Html(files["report.html"], inject=False)} if html else {}
    run.log({**metrics(report), **shown}, step=step)
    run.summary["rnnaudit/verdict"] = report.verdict
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", report.model.path).strip("-")
    artifact = wandb.Artifact(f"rnnaudit-{name}"[:128], type="rnnaudit-report")
    for file, text in files.items():
        with artifact.new_file(file, encoding="utf-8") as opened:
            opened.write(text)
    run.log_artifact(artifact)
