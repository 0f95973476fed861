"""``rnnaudit check``: prove a proof file again, without the search that found it."""

from __future__ import annotations

from pathlib import Path

import typer

from rnnaudit.cli import choices, inputs, options, output

EXAMPLES = """Examples:

  rnnaudit check model.proof.json model.pt

  rnnaudit check model.proof.json model.onnx --format json"""


def check(
    context: typer.Context,
    certificate: options.ProofPath,
    model: options.CheckedModel = None,
    form: options.ProofFormat = choices.ProofFormat.TEXT,
    quiet: options.Quiet = False,
) -> None:
    """Prove again what the file CERT claims of MODEL.

    Exits with 1 where any of it does not hold: a changed number, other weights, a metric
    that is none. Exits with 3 where a file cannot be read.
    """
    if model is None:
        certificate, model = (
            inputs.before_lone(context, "certificate", "CERT and MODEL"),
            certificate,
        )
    with output.refusals(choices.Format(form), model):
        from rnnaudit import checking, loaders

        # Not by the public API, which imports what the search needs.
        report = checking.check(Path(certificate), loaders.load(model))
        output.emit_proof(report, form, written=False, quiet=quiet)
    if report.proof_file is None or not report.proof_file.valid:
        raise typer.Exit(1)
