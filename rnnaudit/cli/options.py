"""The options that commands share: one meaning, one help text, one check each."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any

import typer

from rnnaudit.errors import UsageError


class Format(StrEnum):
    """The form of a report, one for each renderer."""

    TEXT = "text"
    JSON = "json"
    HTML = "html"


class Norm(StrEnum):
    """How the error over output units is counted."""

    MAX = "max"
    TWO = "2"


class Form(StrEnum):
    """How a truncated layer is written."""

    AUTO = "auto"
    WINDOW = "window"
    CHUNK = "chunk"
    LAST = "last"


class Evidence(StrEnum):
    """The weakest evidence that a depth may rest on."""

    PROVED = "proved"
    MEASURED = "measured"


def _flag(param: Any) -> str:
    return str(param.opts[0])


def _positive(param: typer.CallbackParam, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UsageError(f"{_flag(param)} must be a finite number above 0, got {value:g}")
    return value


def _share(param: typer.CallbackParam, value: float) -> float:
    if not 0 < value < 1:
        raise UsageError(f"{_flag(param)} must lie between 0 and 1, got {value:g}")
    return value


def _seed(param: typer.CallbackParam, value: int) -> int:
    if not 0 <= value < 2**63:
        raise UsageError(f"{_flag(param)} must be from 0 to 2⁶³ − 1, got {value}")
    return value


def _counting(param: typer.CallbackParam, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"{_flag(param)} must be at least 1, got {value}")
    return value


_DATA, _RUN, _OUT = "Inputs", "Run", "Output"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A PyTorch state_dict or an ONNX model.", show_default=False
    ),
]
Original = Annotated[
    str, typer.Argument(metavar="ORIGINAL", help="The model to agree with.", show_default=False)
]
Candidate = Annotated[
    str | None,
    typer.Argument(metavar="CANDIDATE", help="The ONNX model to judge.", show_default=False),
]
Eps = Annotated[
    float,
    typer.Option(
        "--eps", metavar="E", callback=_positive, help="Wanted accuracy of each output unit."
    ),
]
ErrorNorm = Annotated[
    Norm, typer.Option("--norm", help="Of an error over output units: the largest, or ‖·‖₂.")
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="PATH",
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
        help="Inputs that proofs cover; else the data's box, else -1:1.",
        rich_help_panel=_DATA,
    ),
]
StepSeconds = Annotated[
    float | None,
    typer.Option(
        "--step-seconds",
        metavar="S",
        callback=_positive,
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
Confidence = Annotated[
    float,
    typer.Option(
        "--confidence",
        metavar="P",
        callback=_share,
        help="Confidence of statements about unseen sequences.",
        rich_help_panel=_RUN,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        callback=_seed,
        help="Seed of everything random.",
        rich_help_panel=_RUN,
    ),
]
TimeBudget = Annotated[
    float | None,
    typer.Option(
        "--time-budget",
        metavar="S",
        callback=_positive,
        help="Seconds for the searches.",
        rich_help_panel=_RUN,
    ),
]
OutputFormat = Annotated[
    Format,
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
        "--depth", metavar="K", callback=_counting, help="Take this depth, whatever the evidence."
    ),
]
MaxDepth = Annotated[
    int,
    typer.Option("--max-depth", metavar="K", callback=_counting, help="Largest depth to take."),
]
LayerForm = Annotated[
    Form, typer.Option("--form", help="How the depth is written; auto takes what costs least.")
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
        callback=_counting,
        help="Length of the sequences to run; else that of the data.",
    ),
]
Proof = Annotated[
    Evidence | None,
    typer.Option("--evidence", help="Refuse anything weaker; else the strongest there is."),
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
