"""``rnnaudit truncate``: write the feed-forward model that replaces a recurrence, verified."""

from __future__ import annotations

from pathlib import Path

import typer

from rnnaudit.cli import choices, inputs, options, output
from rnnaudit.results import MAX_DEPTH

EXAMPLES = """Examples:

  rnnaudit truncate model.pt --eps 1e-3

  rnnaudit truncate model.onnx --data sequences.npz -o small.onnx

  rnnaudit truncate model.pt --depth 32 --format json"""


def truncate(  # noqa: PLR0917 (each parameter is an option)
    context: typer.Context,
    model: options.MaybeModel = None,
    eps: options.Eps = 1e-3,
    output_file: options.ModelFile = None,
    depth: options.Depth = None,
    evidence: options.Evidence = None,
    max_depth: options.MaxDepth = MAX_DEPTH,
    layer: options.Layer = None,
    layer_form: options.Form = choices.Form.AUTO,
    keep_ops: options.KeepOps = False,
    steps: options.Steps = None,
    streaming: options.Streaming = False,
    guard: options.Guard = False,
    opset: options.Opset = None,
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
    form: options.Format = choices.Format.TEXT,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Write a feed-forward ONNX model that agrees to ε, and verify it.

    The depth rests on the strongest evidence that gives one: a proof, your data, synthetic
    inputs. Exits with 1 where the written model errs by more than ε.
    """
    called = inputs.named(model, factory, "truncate")
    with output.refusals(form, called):
        written = Path(output_file or f"{Path(called).stem}.truncated.onnx")
        output.check_writable(str(written), model, data)
        bounds = inputs.bounds(input_range)
        sequences = inputs.sequences(data, time_axis=time_axis, batch_axis=batch_axis)
        with output.progress(quiet=quiet) as progress:
            from rnnaudit import api

            report = api.truncate(
                inputs.model(model, factory=factory, trust_pickle=trust_pickle, weights=weights),
                written,
                eps=eps,
                depth=depth,
                evidence=None if evidence is None else evidence.value,
                max_depth=max_depth,
                layer=layer,
                form=layer_form.value,
                keep_ops=keep_ops,
                steps=steps,
                streaming=streaming,
                guard=guard,
                opset=opset,
                data=sequences,
                input_range=bounds,
                confidence=confidence,
                exceed=exceed,
                seed=seed,
                time_budget=time_budget,
                progress=progress,
            )
        report = output.asked(report, context)
        output.emit(report, form, quiet=quiet, verbose=verbose)
    if report.equivalence is not None and not report.equivalence.passed:
        raise typer.Exit(1)
