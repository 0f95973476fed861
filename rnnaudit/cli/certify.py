"""``rnnaudit certify``: prove how fast a model forgets, and write the proof to a file."""

from __future__ import annotations

from pathlib import Path

import typer

from rnnaudit.cli import choices, inputs, options, output

EXAMPLES = """Examples:

  rnnaudit certify model.pt -o model.proof.json

  rnnaudit certify model.pt --input-range 0:1 --eps 1e-4

  rnnaudit certify model.onnx --data sequences.npz --time-budget 60 --format json"""


def certify(  # noqa: PLR0917 (each parameter is an option)
    context: typer.Context,
    model: options.Model,
    output_file: options.ProofOutput = None,
    eps: options.Eps = 1e-3,
    norm: options.Norm = choices.Norm.MAX,
    layer: options.Layer = None,
    data: options.Data = None,
    time_axis: options.TimeAxis = None,
    batch_axis: options.BatchAxis = None,
    input_range: options.InputRange = None,
    seed: options.Seed = 0,
    time_budget: options.TimeBudget = None,
    form: options.ProofFormat = choices.ProofFormat.TEXT,
    quiet: options.Quiet = False,
) -> None:
    """Prove λ and k for every input of the domain, and write the proof to a file.

    The file is checked before it is written; `rnnaudit check` does so again, with none of
    the search. Exits with 1 where nothing was proved: then nothing is written.
    """
    with output.refusals(choices.Format(form), model):
        written = output_file or f"{Path(model).stem}.proof.json"
        output.check_writable(written, model, data)
        bounds = inputs.bounds(input_range)
        sequences = inputs.sequences(data, time_axis=time_axis, batch_axis=batch_axis)
        with output.progress(quiet=quiet) as progress:
            from rnnaudit import api

            report = api.certify(
                model,
                written,
                eps=eps,
                norm=norm.value,
                layer=layer,
                data=sequences,
                input_range=bounds,
                seed=seed,
                time_budget=time_budget,
                progress=progress,
            )
        report = output.asked(report, context, "data", "layer", "input_range")
        output.emit_proof(report, form, written=True, quiet=quiet)
    if report.proof_file is None:
        raise typer.Exit(1)
