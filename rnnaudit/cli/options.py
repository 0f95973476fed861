"""The options that commands share: one meaning, one help text, one check each."""

from __future__ import annotations

from typing import Annotated

import typer

from rnnaudit.cli import choices, completion, values

_DATA, _RUN, _OUT, _POLICY = "Inputs", "Run", "Output", "Policy"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A PyTorch or ONNX model.",
        show_default=False,
        autocompletion=completion.models,
        callback=values.path,
    ),
]
MaybeModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A PyTorch or ONNX model; with --factory, the weights to load into it.",
        show_default=False,
        autocompletion=completion.models,
        callback=values.path,
    ),
]
Factory = Annotated[
    str | None,
    typer.Option(
        "--factory",
        metavar="PKG.MODULE:CALLABLE",
        help="Call this for a live nn.Module: runs your code.",
        rich_help_panel=_DATA,
    ),
]
TrustPickle = Annotated[
    bool,
    typer.Option(
        "--trust-pickle",
        help="Unpickle a file that needs code: runs whatever it says.",
        rich_help_panel=_DATA,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="FILE",
        callback=values.path,
        help="Values (.npz, .safetensors) of weights that are graph inputs, by name.",
        rich_help_panel=_DATA,
    ),
]
Original = Annotated[
    str,
    typer.Argument(
        metavar="ORIGINAL",
        help="The model to agree with.",
        show_default=False,
        autocompletion=completion.models,
        callback=values.path,
    ),
]
Candidate = Annotated[
    str | None,
    typer.Argument(
        metavar="CANDIDATE",
        help="The ONNX model to judge.",
        show_default=False,
        autocompletion=completion.models,
        callback=values.path,
    ),
]
ProofPath = Annotated[
    str,
    typer.Argument(
        metavar="CERT", help="A file that `rnnaudit certify` wrote.", show_default=False
    ),
]
CheckedModel = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The model that it speaks of.", show_default=False),
]
ProofOutput = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="CERT",
        help="The proof file to write.  \\[default: MODEL.proof.json, here]",
        rich_help_panel=_OUT,
    ),
]
ProofFormat = Annotated[
    choices.ProofFormat, typer.Option("--format", help="Form of the report.", rich_help_panel=_OUT)
]
Eps = Annotated[
    float,
    typer.Option(
        "--eps", metavar="E", callback=values.positive, help="Wanted accuracy of each output unit."
    ),
]
Norm = Annotated[
    choices.Norm,
    typer.Option("--norm", help="Of an error over output units: the largest, or ‖·‖₂."),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="PATH",
        callback=values.path,
        help="Sequences: .npy, .npz, .safetensors, .csv, .wav, a folder, or module:function.",
        rich_help_panel=_DATA,
    ),
]
TimeAxis = Annotated[
    int | None,
    typer.Option("--time-axis", metavar="N", help="Axis of the steps.", rich_help_panel=_DATA),
]
BatchAxis = Annotated[
    int | None,
    typer.Option("--batch-axis", metavar="N", help="Axis of the sequences.", rich_help_panel=_DATA),
]
InputRange = Annotated[
    str | None,
    typer.Option(
        "--input-range",
        metavar="LO:HI",
        help="Inputs that proofs cover, or one-hot; else the data's, else -1:1.",
        rich_help_panel=_DATA,
    ),
]
StepSeconds = Annotated[
    float | None,
    typer.Option(
        "--step-seconds",
        metavar="S",
        callback=values.positive,
        help="Length of a step, to show k as time.",
        rich_help_panel=_DATA,
    ),
]
Layer = Annotated[
    str | None,
    typer.Option("--layer", metavar="NAME", help="Only recurrences whose name holds NAME."),
]
Witness = Annotated[
    str | None,
    typer.Option(
        "--witness",
        metavar="FILE",
        help="Save the inputs that refute most depths (.npz).",
        rich_help_panel=_OUT,
    ),
]
Replayed = Annotated[
    str | None,
    typer.Option(
        "--witness", metavar="FILE", help="Replay this witness in ORIGINAL, without a CANDIDATE."
    ),
]
Confidence = Annotated[
    float,
    typer.Option(
        "--confidence",
        metavar="P",
        callback=values.share,
        help="Confidence of statements about unseen sequences.",
        rich_help_panel=_RUN,
    ),
]
Exceed = Annotated[
    float | None,
    typer.Option(
        "--exceed",
        metavar="P",
        callback=values.share,
        help="Share of unseen sequences that may exceed ε at the measured k.",
        rich_help_panel=_RUN,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        callback=values.seed,
        help="Seed of everything random.",
        rich_help_panel=_RUN,
    ),
]
TimeBudget = Annotated[
    float | None,
    typer.Option(
        "--time-budget",
        metavar="S",
        callback=values.positive,
        help="Seconds for the searches.",
        rich_help_panel=_RUN,
    ),
]
Format = Annotated[
    choices.Format,
    typer.Option("--format", help="Form of the report.", rich_help_panel=_OUT),
]
ReportFile = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the report there, not to the screen.",
        rich_help_panel=_OUT,
    ),
]
PageFile = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="The page to write.  \\[default: MODEL.report.html, here]",
        rich_help_panel=_OUT,
    ),
]
ModelFile = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="The model to write.  \\[default: MODEL.truncated.onnx, here]",
        rich_help_panel=_OUT,
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only the verdict.", rich_help_panel=_OUT)
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="Every recurrence, setting and version.", rich_help_panel=_OUT
    ),
]
Depth = Annotated[
    int | None,
    typer.Option(
        "--depth",
        metavar="K",
        callback=values.count,
        help="Take this depth, whatever the evidence.",
    ),
]
MaxDepth = Annotated[
    int,
    typer.Option("--max-depth", metavar="K", callback=values.count, help="Largest depth to take."),
]
Form = Annotated[
    choices.Form,
    typer.Option("--form", help="How the depth is written; auto takes what costs least."),
]
KeepOps = Annotated[
    bool,
    typer.Option("--keep-ops", help="Run chunks with ONNX's own LSTM, GRU and RNN operators."),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        metavar="T",
        callback=values.count,
        help="Length of the sequences to run; else that of the data.",
    ),
]
Streaming = Annotated[
    bool,
    typer.Option(
        "--streaming", help="Take new steps per call; a buffer of k − 1 inputs comes in, goes out."
    ),
]
Guard = Annotated[
    bool,
    typer.Option(
        "--guard", help="One more output: the distance from depth k to half of it, on each run."
    ),
]
Opset = Annotated[
    int | None,
    typer.Option("--opset", metavar="N", help="Opset of the written model; else the source's."),
]
Evidence = Annotated[
    choices.Evidence | None,
    typer.Option("--evidence", help="proved refuses anything weaker, measured passes proofs over."),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="PyTorch or ONNX models, or patterns.",
        show_default=False,
        autocompletion=completion.models,
        callback=values.paths,
    ),
]
Require = Annotated[
    choices.Require | None,
    typer.Option(
        "--require",
        help="The verdict to have.  \\[default: stable; not-unstable with weaker --evidence; "
        "any with --baseline]",
        rich_help_panel=_POLICY,
    ),
]
MaxLambda = Annotated[
    float | None,
    typer.Option(
        "--max-lambda",
        metavar="L",
        callback=values.limit,
        help="λ that every recurrence is proved to keep.",
        rich_help_panel=_POLICY,
    ),
]
MaxLambdaFound = Annotated[
    float | None,
    typer.Option(
        "--max-lambda-found",
        metavar="L",
        callback=values.limit,
        help="‖J‖ above which nothing may be found.",
        rich_help_panel=_POLICY,
    ),
]
GateDepth = Annotated[
    int | None,
    typer.Option(
        "--max-depth",
        metavar="K",
        callback=values.count,
        help="Largest k(ε) of the whole model.",
        rich_help_panel=_POLICY,
    ),
]
GateEvidence = Annotated[
    choices.GateEvidence,
    typer.Option(
        "--evidence",
        help="Weakest evidence for k: a proof, your data, or any inputs.",
        rich_help_panel=_POLICY,
    ),
]
MaxExceed = Annotated[
    float | None,
    typer.Option(
        "--max-exceed",
        metavar="P",
        callback=values.share,
        help="Share of sequences that may exceed ε at the measured k.",
        rich_help_panel=_POLICY,
    ),
]
FailOn = Annotated[
    choices.FailOn,
    typer.Option("--fail-on", help="Findings that fail: these or worse.", rich_help_panel=_POLICY),
]
AllowSkipped = Annotated[
    bool,
    typer.Option(
        "--allow-skipped",
        help="Pass models that were audited in part.",
        rich_help_panel=_POLICY,
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="ID:DATE:REASON",
        help="Accept a finding up to a day, such as RA121:2027-06-30:known.",
        rich_help_panel=_POLICY,
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="REPORT",
        help="An earlier JSON report: fail where a model is worse.",
        rich_help_panel=_POLICY,
    ),
]
Tolerance = Annotated[
    float,
    typer.Option(
        "--tolerance",
        metavar="P",
        callback=values.limit,
        help="Share by which λ and k may grow beyond the baseline.",
        rich_help_panel=_POLICY,
    ),
]
Cached = Annotated[
    bool,
    typer.Option(
        "--cache/--no-cache",
        help="Take up results of the same file and settings.",
        rich_help_panel=_RUN,
    ),
]
FindingId = Annotated[
    str | None,
    typer.Argument(
        metavar="ID",
        help="Such as RA203.",
        show_default=False,
        autocompletion=completion.findings,
    ),
]
