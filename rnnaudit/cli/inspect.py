"""``rnnaudit inspect``: what recurrences are inside, and how far back they remember."""

from __future__ import annotations

import typer

from rnnaudit.cli import audits, choices, inputs, options, output

EXAMPLES = """Examples:

  rnnaudit inspect model.pt

  rnnaudit inspect model.onnx --data sequences.npz --eps 1e-4

  rnnaudit inspect model.onnx --input-range 0:1 --format json -o report.json

  rnnaudit inspect model.pt --witness remembered.npz"""


def inspect(  # noqa: PLR0917 (each parameter is an option)
    context: typer.Context,
    model: options.MaybeModel = None,
    eps: options.Eps = 1e-3,
    norm: options.Norm = choices.Norm.MAX,
    layer: options.Layer = None,
    witness: options.Witness = None,
    data: options.Data = None,
    factory: options.Factory = None,
    trust_pickle: options.TrustPickle = False,
    weights: options.Weights = None,
    time_axis: options.TimeAxis = None,
    batch_axis: options.BatchAxis = None,
    input_range: options.InputRange = None,
    step_seconds: options.StepSeconds = None,
    confidence: options.Confidence = 0.95,
    exceed: options.Exceed = None,
    seed: options.Seed = 0,
    time_budget: options.TimeBudget = None,
    cached: options.Cached = True,
    form: options.Format = choices.Format.TEXT,
    output_file: options.ReportFile = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Show each recurrence: λ proved and found, memory, and k for every ε.

    Exits with 0 whatever the verdict, and with 3 where the model cannot be audited.
    """
    called = inputs.named(model, factory, "inspect")
    with output.refusals(form, called):
        output.check_writable(output_file, model, data)
        output.check_writable(witness, model, data)
        question = audits.Question(
            eps=eps,
            norm=norm.value,
            layer=layer,
            data=data,
            time_axis=time_axis,
            batch_axis=batch_axis,
            input_range=input_range,
            confidence=confidence,
            exceed=exceed,
            seed=seed,
            time_budget=time_budget,
            pictures=form is choices.Format.HTML,
        )
        with output.progress(quiet=quiet) as progress:
            report = audits.find(
                question,
                inputs.model(model, factory=factory, trust_pickle=trust_pickle, weights=weights),
                witness=witness,
                cached=cached,
                verbose=verbose,
                progress=progress,
            )
        report = output.asked(report, context)
        output.emit(report, form, file=output_file, quiet=quiet, verbose=verbose)
