"""``rnnaudit verify``: run two models on the same inputs and judge their largest difference."""

from __future__ import annotations

import typer

from rnnaudit.cli import choices, inputs, options, output
from rnnaudit.errors import UsageError

EXAMPLES = """Examples:

  rnnaudit verify model.pt model.truncated.onnx --eps 1e-3

  rnnaudit verify model.pt model.truncated.onnx --seed 1 -o verdict.txt

  rnnaudit verify model.onnx small.onnx --data sequences.npz --format json

  rnnaudit verify model.pt --witness remembered.npz"""


def verify(  # noqa: PLR0917 (each parameter is an option)
    context: typer.Context,
    original: options.Original,
    candidate: options.Candidate = None,
    witness: options.Replayed = None,
    eps: options.Eps = 1e-3,
    data: options.Data = None,
    trust_pickle: options.TrustPickle = False,
    weights: options.Weights = None,
    time_axis: options.TimeAxis = None,
    batch_axis: options.BatchAxis = None,
    seed: options.Seed = 0,
    time_budget: options.TimeBudget = None,
    form: options.Format = choices.Format.TEXT,
    output_file: options.ReportFile = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Judge whether CANDIDATE gives ORIGINAL's outputs to within ε.

    Both run on normal and saturating inputs, and on yours, at several lengths and batch
    sizes. Exits with 1 where any output differs by more than ε, or is NaN.

    With --witness, run a counterexample that inspect saved again in ORIGINAL's own runtime:
    exits with 1 where it no longer refutes the depth that it did.
    """
    if witness is not None:
        _replay(original, candidate, witness, trust_pickle, form, output_file, quiet, verbose)
        return
    if candidate is None:
        wanted = "ORIGINAL and CANDIDATE"
        original, candidate = inputs.before_lone(context, "original", wanted), original
    with output.refusals(form, original):
        output.check_writable(output_file, original, candidate, data)
        sequences = inputs.sequences(data, time_axis=time_axis, batch_axis=batch_axis)
        with output.progress(quiet=quiet) as progress:
            from rnnaudit import api

            report = api.verify(
                inputs.model(original, factory=None, trust_pickle=trust_pickle, weights=weights),
                candidate,
                eps=eps,
                data=sequences,
                seed=seed,
                time_budget=time_budget,
                progress=progress,
            )
        output.emit(report, form, file=output_file, quiet=quiet, verbose=verbose)
    if report.equivalence is not None and not report.equivalence.passed:
        raise typer.Exit(1)


def _replay(  # noqa: PLR0917 (what the command was called with)
    original: str,
    candidate: str | None,
    witness: str,
    trust_pickle: bool,
    form: choices.Format,
    output_file: str | None,
    quiet: bool,
    verbose: bool,
) -> None:
    if candidate is not None:
        raise UsageError(
            f"--witness is replayed in one model, got {original} and {candidate}", help="name one"
        )
    with output.refusals(form, original):
        output.check_writable(output_file, original, witness)
        from rnnaudit import api

        model = inputs.model(original, factory=None, trust_pickle=trust_pickle)
        report = api.replay(model, witness)
        output.emit(report, form, file=output_file, quiet=quiet, verbose=verbose)
    if report.replay is None or not report.replay.passed:
        raise typer.Exit(1)
