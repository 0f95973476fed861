"""``rnnaudit report``: one HTML page with the pictures, for people who would rather look."""

from __future__ import annotations

from pathlib import Path

import typer

from rnnaudit.cli import audits, choices, inputs, options, output

EXAMPLES = """Examples:

  rnnaudit report model.pt

  rnnaudit report model.onnx --data sequences.npz -o report.html"""


def report(  # noqa: PLR0917 (each parameter is an option)
    context: typer.Context,
    model: options.MaybeModel = None,
    output_file: options.PageFile = None,
    eps: options.Eps = 1e-3,
    norm: options.Norm = choices.Norm.MAX,
    layer: options.Layer = None,
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
    quiet: options.Quiet = False,
) -> None:
    """Write one self-contained HTML page: the verdict, its evidence, and the pictures.

    Shows error against depth, growth over r steps, the Lyapunov spectrum, eigenvalues, gates
    over time, and the memory of each unit, with the numbers behind each.
    """
    form = choices.Format.HTML
    called = inputs.named(model, factory, "report")
    with output.refusals(form, called):
        written = output_file or f"{Path(called).stem}.report.html"
        output.check_writable(written, model, data)
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
            pictures=True,
        )
        with output.progress(quiet=quiet) as progress:
            found = audits.find(
                question,
                inputs.model(model, factory=factory, trust_pickle=trust_pickle, weights=weights),
                cached=cached,
                verbose=False,
                progress=progress,
            )
        found = output.asked(found, context)
        output.emit(found, form, file=written, quiet=quiet, verbose=False)
        if not quiet:
            output.emit(found, choices.Format.TEXT, quiet=True, verbose=False)
            output.write(f"wrote    {written}\n")
