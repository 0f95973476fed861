"""``rnnaudit check``: prove a proof file again, without the search that found it."""

from __future__ import annotations

from pathlib import Path

import typer

from rnnaudit.cli import options, output
from rnnaudit.errors import UsageError

EXAMPLES = """Examples:

  rnnaudit check model.proof.json model.pt

  rnnaudit check model.proof.json model.onnx --format json"""


def check(
    context: typer.Context,
    certificate: options.ProofPath,
    model: options.Proved = None,
    form: options.ProofFormat = options.ProofForm.TEXT,
    quiet: options.Quiet = False,
) -> None:
    """Prove again what the file CERT claims of MODEL.

    Exits with 1 where any of it does not hold: a changed number, other weights, a metric
    that is none. Exits with 3 where a file cannot be read.
    """
    certificate, model = _both(context, certificate, model)
    with output.refusals(options.Format(form), model):
        from rnnaudit import checking, loaders

        # Not by the public API, which imports what the search needs.
        report = checking.check(Path(certificate), loaders.load(model))
        output.emit_proof(report, form, written=False, quiet=quiet)
    if report.proof_file is None or not report.proof_file.valid:
        raise typer.Exit(1)


def _both(context: typer.Context, certificate: str, model: str | None) -> tuple[str, str]:
    """Take a lone argument as the certificate where the configuration names the model."""
    if model is not None:
        return certificate, model
    configured = (context.default_map or {}).get("certificate")
    source = context.get_parameter_source("certificate")
    if configured is None or source is None or source.name != "COMMANDLINE":
        raise UsageError("wanted CERT and MODEL, got one file", help="name both")
    return certificate, str(configured)
