"""``rnnaudit gate``: a policy over many models, pass or fail, for pipelines."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rnnaudit.cli import audits, choices, options, output
from rnnaudit.errors import RnnauditError, UsageError
from rnnaudit.results import Outcome, Refusal, Report

if TYPE_CHECKING:  # `--help` needs no policy
    from rnnaudit.policy import Allowance, Require

EXAMPLES = """Examples:

  rnnaudit gate models/*.onnx

  rnnaudit gate model.pt --data sequences.npz --max-depth 64 --evidence measured

  rnnaudit gate models/*.onnx --format json -o baseline.json --require any

  rnnaudit gate models/*.onnx --baseline baseline.json --tolerance 0.1

  rnnaudit gate model.pt --fail-on warning --allow RA121:2027-06-30:"it is tanh"

Exit codes: 0 every model passed, 1 a model failed, 2 wrong options, 3 a file could not be
audited (also where others failed)."""


def gate(  # noqa: PLR0917 (each parameter is an option)
    models: options.Models,
    require: options.Require = None,
    max_lambda: options.MaxLambda = None,
    max_lambda_found: options.MaxLambdaFound = None,
    max_depth: options.GateDepth = None,
    evidence: options.GateEvidence = choices.GateEvidence.PROVED,
    max_exceed: options.MaxExceed = None,
    fail_on: options.FailOn = choices.FailOn.ERROR,
    allow_skipped: options.AllowSkipped = False,
    allow: options.Allow = None,
    baseline: options.Baseline = None,
    tolerance: options.Tolerance = 0.05,
    eps: options.Eps = 1e-3,
    norm: options.Norm = choices.Norm.MAX,
    layer: options.Layer = None,
    data: options.Data = None,
    time_axis: options.TimeAxis = None,
    batch_axis: options.BatchAxis = None,
    input_range: options.InputRange = None,
    weights: options.Weights = None,
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
    """Hold models to a policy, for a pipeline to stop at.

    Without options every recurrence must be proved stable, and nothing be skipped. A file that
    cannot be audited never hides the others.
    """
    gatherer = output.gatherer(form, file=output_file, quiet=quiet, verbose=verbose)
    paths = list(dict.fromkeys(path for model in models for path in _expanded(model)))
    output.check_writable(output_file, *paths, data, baseline)
    from rnnaudit.policy import Policy, judge

    policy = Policy(
        require=_required(require, evidence, baseline),
        max_lambda=max_lambda,
        max_lambda_found=max_lambda_found,
        max_depth=max_depth,
        evidence=evidence.value,
        max_exceed=max_exceed,
        fail_on=fail_on.value,
        allow_skipped=allow_skipped,
        allow=tuple(map(_allowance, allow or ())),
        tolerance=tolerance,
    )
    before = None if baseline is None else _baseline(baseline)
    question = audits.Question(
        eps=eps,
        norm=norm.value,
        layer=layer,
        data=data,
        weights=weights,
        time_axis=time_axis,
        batch_axis=batch_axis,
        input_range=input_range,
        confidence=confidence,
        exceed=exceed,
        seed=seed,
        time_budget=time_budget,
        pictures=form is choices.Format.HTML,
    )
    outcomes: list[Outcome] = []
    with output.progress(quiet=quiet) as progress:
        for path in paths:
            found = _outcome(question, path, cached=cached, verbose=verbose, progress=progress)
            if isinstance(found, Report):
                verdict = judge(found, policy, today=date.today(), baseline=before)
                found = replace(found, gate=verdict)
            outcomes.append(found)
    output.put(gatherer.render_all(outcomes), output_file)
    raise typer.Exit(_code(outcomes))


def _expanded(model: str) -> list[str]:
    """Find the files of a pattern, which no shell expands in a configuration or on Windows."""
    found = sorted(glob(model, recursive=True)) if has_magic(model) else []  # noqa: PTH207
    return found or [model]


def _required(
    require: choices.Require | None, evidence: choices.GateEvidence, baseline: str | None
) -> Require:
    """Return the verdict that is wanted: what weaker evidence or a baseline leaves open is open."""
    if require is not None:
        return require.value
    if baseline is not None:
        return "any"
    return "stable" if evidence is choices.GateEvidence.PROVED else "not-unstable"


def _allowance(text: str) -> Allowance:
    from rnnaudit.findings import FINDINGS
    from rnnaudit.policy import Allowance

    id_, _, rest = text.partition(":")
    until, _, reason = rest.partition(":")
    try:
        day = date.fromisoformat(until)
    except ValueError:
        day = None
    if id_ not in {entry.id for entry in FINDINGS} or day is None or not reason.strip():
        raise UsageError(
            f"--allow must be ID:DATE:REASON, such as RA121:2027-06-30:known, got {text!r}",
            help="rnnaudit explain lists the ids",
        )
    return Allowance(id_, day, reason.strip())


def _baseline(path: str) -> tuple[Report, ...]:
    from rnnaudit.reports.reading import read_all

    try:
        return read_all(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(
            f"--baseline must be a file that can be read, got {path}: {error.strerror}",
            help="write one with rnnaudit gate MODEL --format json -o FILE",
        ) from error
    except ValueError as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else error
        raise UsageError(
            f"--baseline must be a JSON report of rnnaudit, got {path}: {why}",
            help="write one with rnnaudit gate MODEL --format json -o FILE",
        ) from error


def _outcome(
    question: audits.Question,
    path: str,
    *,
    cached: bool,
    verbose: bool,
    progress: output.Progress | None,
) -> Outcome:
    """Audit a file, or say why that cannot be done; only wrong options end the whole run."""
    if has_magic(path) and not Path(path).exists():
        return Refusal(
            path,
            "RA101",
            f"a pattern that matches a file was wanted, got {path}, which matches none",
            "check the pattern, and the folder that it begins in",
        )
    try:
        return audits.answer(question, path, cached=cached, verbose=verbose, progress=progress)
    except UsageError:
        raise
    except RnnauditError as error:
        return Refusal(path, error.id, str(error.args[0]), error.help)
    except Exception as error:
        traceback.print_exc()
        fault = f"rnnaudit itself failed: {type(error).__name__}"
        return Refusal(path, "RA900", fault, "please report the traceback")


def _code(outcomes: Sequence[Outcome]) -> int:
    if any(isinstance(outcome, Refusal) for outcome in outcomes):
        return 3
    return int(any(isinstance(o, Report) and o.gate and not o.gate.passed for o in outcomes))
