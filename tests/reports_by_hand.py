"""Reports made by hand, one for each thing that a renderer must be able to say."""

from dataclasses import replace
from datetime import date

from rnnaudit.policy import Allowance, Policy, judge
from rnnaudit.results import (
    EPSILONS,
    Attempt,
    CurvePoint,
    Depth,
    Equivalence,
    Export,
    Finding,
    Location,
    LowerBound,
    LyapunovExponent,
    LyapunovSpectrum,
    MeasuredDepth,
    ModelInfo,
    NoProof,
    NormCurve,
    RecurrenceReport,
    Refusal,
    Report,
    Skipped,
    Truncation,
    UnitMemory,
    UpperBound,
)

TOOL = {
    "name": "rnnaudit",
    "version": "0.1.0",
    "torch": "2.13.0",
    "onnx": "1.23.2",
    "onnxruntime": "1.32.0",
}


def measured(k, *, n=77, longer_than=None, synthetic=False):
    return MeasuredDepth(
        k=k,
        longer_than=longer_than,
        sequences=n,
        exceed_probability=None if k is None else 1 - 0.05 ** (1 / n),
        confidence=0.95,
        synthetic=synthetic,
    )


PROVED = (26, 40, 53, 66, 80, 93)
SEEN = (4, 12, 31, 52, 71, 99)

BACH = RecurrenceReport(
    name="rnn",
    cell="elman",
    input_size=88,
    hidden_size=112,
    direction="forward",
    layer=0,
    verdict="stable",
    cell_options={"activation": "tanh"},
    upper=UpperBound(0.84213, "weighted 2-norm", "numerical radius", "every input"),
    no_proof=None,
    lower=LowerBound(0.87196, "2", "power iteration on 4,096 Jacobians (2,048 in the box)"),
    norms=NormCurve((1, 2, 4, 8), (0.87196, 0.6, 0.3, 0.08)),
    lyapunov=LyapunovExponent(-0.2243, 0.0041, 9600),
    depths=tuple(Depth(e, p, measured(k)) for e, p, k in zip(EPSILONS, PROVED, SEEN, strict=True)),
    curve=(CurvePoint(1, 0.2, 0.5, 0.9), CurvePoint(31, 1e-4, 6e-4, 9.9e-4)),
    spectral_norm=0.942,
    spectrum=LyapunovSpectrum((-0.2243, -0.31871, None), (0.0041, 0.0052, None), 9600),
    unit_memory=UnitMemory(1e-3, {"h": (31, 4, 28, 9, 3, 2, 17, None)}),
    others=(
        Attempt("spectral norm", 0.94217, "2-norm", 96),
        Attempt("comparison matrix", None, "", None, "ρ(|W|) is not below 1"),
    ),
)

STABLE = Report(
    model=ModelInfo("sample_models/bach_rnn.pt", "PyTorch state_dict", "ab" * 32),
    settings={"eps": 1e-3, "seed": 0, "data": "sample_models/chorales.npz", "confidence": 0.95},
    verdict="stable",
    recurrences=(BACH,),
    eps=1e-3,
    norm="max",
    depth=Depth(1e-3, 53, measured(31)),
    table=BACH.depths,
    scope="end to end",
    domain="|x| ≤ 1",
    data="77 sequences of 240 to 640 steps from chorales.npz",
    tool=TOOL,
)

UNDECIDED = replace(
    STABLE,
    model=ModelInfo("bach_lstm.onnx", "ONNX, opset 17", "cd" * 32),
    settings={"eps": 1e-3, "seed": 0, "data": None, "step_seconds": 0.25},
    verdict="undecided",
    recurrences=(
        replace(
            BACH,
            name="lstm",
            cell="lstm",
            hidden_size=64,
            verdict="undecided",
            cell_options={
                "activations": ["sigmoid", "tanh", "tanh"],
                "peephole": True,
                "clip": 3.0,
            },
            upper=None,
            no_proof=NoProof("the forget gate can reach 0.9998 for |x| ≤ 1"),
            lower=LowerBound(1.31, "2-norm", "power iteration on 4,096 sampled Jacobians"),
            norms=NormCurve((1, 2, 4, 8, 16, 32, 64), (1.31, 1.5, 1.7, 1.2, 0.9, 0.3, 4.2e-5)),
            lyapunov=LyapunovExponent(-0.0981, 0.0125, 8192),
            depths=tuple(
                Depth(e, None, measured(k, n=32, synthetic=True))
                for e, k in zip(EPSILONS, SEEN, strict=True)
            ),
            spectral_norm=None,
            initial_state="constant",
        ),
    ),
    depth=Depth(1e-3, None, measured(31, n=32, synthetic=True)),
    table=tuple(
        Depth(e, None, measured(k, n=32, synthetic=True))
        for e, k in zip(EPSILONS, SEEN, strict=True)
    ),
    data="32 synthetic sequences of 256 steps",
    findings=(
        Finding(
            "RA205",
            "note",
            "",
            "every measured number comes from synthetic inputs",
            "give your own sequences with --data",
        ),
        Finding(
            "RA203",
            "warning",
            "lstm[0]",
            "32 sequences: at 95% confidence up to 9% of others may exceed ε",
            "measure on 59 sequences or more",
        ),
    ),
)

LATCHED = Depth(
    1e-3,
    None,
    measured(None, longer_than=128, n=32, synthetic=True),
    refuted_below=513,
    refuted_in="latch[0]",
    searched=512,
    float32_noise=3.1e-6,
)

LONGER = replace(
    UNDECIDED,
    model=ModelInfo("latch.onnx", "ONNX, opset 17", "ef" * 32),
    settings={"eps": 1e-3, "seed": 0, "data": None},
    verdict="unstable",
    recurrences=(
        replace(
            BACH,
            name="latch",
            input_size=1,
            hidden_size=2,
            verdict="unstable",
            upper=None,
            no_proof=NoProof("‖W‖₂ = 2.5 is not below 1"),
            lower=LowerBound(2.4, "2-norm", "Jacobians along 32 synthetic sequences"),
            norms=NormCurve((1, 2, 4), (2.4, 3.1, 2.9)),
            lyapunov=LyapunovExponent(0.01, 0.002, 8192),
            depths=(LATCHED,),
            spectral_norm=2.5,
        ),
    ),
    depth=LATCHED,
    table=tuple(replace(LATCHED, eps=e) for e in EPSILONS),
    findings=(
        Finding(
            "RA202",
            "warning",
            "latch[0]",
            "k(0.001) is longer than the data show: more than 128 of 256 steps on at least "
            "one of 32 sequences",
            "measure on longer sequences, or keep the recurrence",
        ),
    ),
)


def _gru(i):
    return replace(
        UNDECIDED.recurrences[0],
        name=f"/dpgrnn{i // 4}/{'intra' if i % 4 < 2 else 'inter'}_rnn/rnn{i % 2}/GRU",
        cell="gru",
        input_size=8,
        hidden_size=16,
        direction="reverse" if i % 2 else "forward",
        cell_options={"linear_before_reset": 1, "activations": ["sigmoid", "tanh"]},
        depths=(
            Depth(
                1e-3,
                None,
                measured(None, longer_than=128, n=32, synthetic=True)
                if i == 5
                else measured(20 + 7 * i, n=32, synthetic=True),
            ),
        ),
        initial_state="zero",
    )


MANY = replace(
    UNDECIDED,
    model=ModelInfo("gtcrn.tar", "PyTorch state_dict", "01" * 32),
    recurrences=tuple(_gru(i) for i in range(14)),
    depth=Depth(1e-3),
    table=tuple(Depth(e) for e in EPSILONS),
    scope="each stack's own output",
    findings=tuple(
        Finding("RA204", "warning", _gru(i).label, "the sequences are short", "give longer ones")
        for i in range(5)
    ),
)

SKIPPED = replace(
    STABLE,
    skipped=(
        Skipped("decoder/LSTM_3", "input_forget together with a projection is not read"),
        Skipped("head", "Gemm with a second input is no linear readout"),
    ),
)

NOTHING = replace(
    STABLE,
    verdict="undecided",
    recurrences=(),
    depth=Depth(1e-3),
    table=(),
    findings=(
        Finding(
            "RA105", "warning", "", "no recurrence found: looked at 214 nodes", "is it an RNN?"
        ),
    ),
)

PASS = Equivalence(
    passed=True,
    eps=1e-3,
    max_abs_error=3.0417e-4,
    required_eps=3.0417e-4,
    where=Location("normal, T = 464", "y", 2, 457, 12),
    percentiles={"p90": 1.1e-5, "p95": 4.2e-5, "p99": 1.9e-4},
    inputs_tried=48,
    truncation_error=3.039e-4,
    conversion_error=9.1e-7,
    reference="bach_rnn.pt in float64, and torch.nn.RNN",
    seconds=3.2,
)

TRUNCATE_PASS = replace(
    STABLE,
    equivalence=PASS,
    export=Export(
        path="bach_rnn.truncated.onnx",
        form="chunk of 48",
        form_reason="2.7× less work than a window, as counted for 256 steps",
        truncations=(Truncation("rnn[0]", 53, "proved"),),
        opset=17,
        bytes_before=123_456,
        bytes_after=139_012,
        milliseconds_before=1.311,
        milliseconds_after=0.62,
        latency_shape="1 × 128 steps, median in ONNX Runtime",
        inputs=(("x", ("time", "batch", 88), "float"),),
        outputs=("y",),
    ),
)

TRUNCATE_FAIL = replace(
    UNDECIDED,
    model=ModelInfo("models/bach gru.pt", "PyTorch state_dict", "23" * 32),
    equivalence=replace(
        PASS,
        passed=False,
        max_abs_error=0.0731,
        required_eps=0.0731,
        truncation_error=0.0731,
    ),
    export=replace(
        TRUNCATE_PASS.export,
        path="bach gru.truncated.onnx",
        truncations=(Truncation("lstm[0]", 4, "chosen"),),
        milliseconds_after=2.4,
        inputs=(
            ("x", ("batch", "time", 88), "float"),
            ("mask", ("batch", "time"), "int64"),
            ("scale", (1,), "double"),
        ),
        outputs=("y", "h"),
        initial_state="constant",
    ),
    findings=(),
)

TRUNCATE_NOTHING = replace(
    TRUNCATE_FAIL, model=ModelInfo("gru.pt", "PyTorch state_dict", "45" * 32), export=None
)

VERIFY_NOTHING = replace(
    STABLE,
    settings={"eps": 1e-3, "seed": 0, "data": None, "candidate": "out.onnx"},
    recurrences=(),
    depth=Depth(1e-3),
    table=(),
    equivalence=Equivalence(
        passed=False,
        eps=1e-3,
        max_abs_error=None,
        required_eps=None,
        where=None,
        percentiles={},
        inputs_tried=0,
        truncation_error=None,
        conversion_error=None,
        reason="out.onnx gave NaN on the first input",
    ),
)

REPORTS = {
    "stable": STABLE,
    "undecided": UNDECIDED,
    "longer": LONGER,
    "many": MANY,
    "skipped": SKIPPED,
    "nothing": NOTHING,
    "truncate_pass": TRUNCATE_PASS,
    "truncate_fail": TRUNCATE_FAIL,
    "truncate_nothing": TRUNCATE_NOTHING,
    "verify_nothing": VERIFY_NOTHING,
}

POLICY = Policy(
    require="not-unstable",
    max_lambda=0.9,
    max_depth=64,
    evidence="measured",
    max_exceed=0.05,
    fail_on="warning",
    allow=(
        Allowance("RA203", date(2027, 6, 30), "few | on <purpose>"),
        Allowance("RA202", date(2026, 1, 31), "until retrained"),
    ),
)

REFUSED = Refusal(
    "models/corrupt.onnx",
    "RA101",
    "an ONNX model was expected, and models/corrupt.onnx is damaged",
    "download or export it again",
)


def judged(report, policy=POLICY, **more):
    return replace(report, gate=judge(report, policy, today=date(2026, 12, 2), **more))


GATED = (
    judged(STABLE),
    judged(UNDECIDED),
    judged(LONGER),
    judged(
        replace(SKIPPED, model=ModelInfo("models/a b|<c>.pt", "PyTorch state_dict", "67" * 32)),
        baseline=(replace(STABLE, depth=Depth(1e-3, 40, measured(31))),),
    ),
    REFUSED,
)
"""One model that passes, three that fail, each for other reasons, and one that is refused."""


def golden(folder):
    """Yield the path of each golden file and the text that belongs in it."""
    from rnnaudit.reports import (
        JsonRenderer,
        JunitRenderer,
        MarkdownRenderer,
        SarifRenderer,
        SummaryRenderer,
        TerminalRenderer,
    )

    yield folder / "gate.txt", SummaryRenderer().render_all(GATED)
    yield folder / "gate.verbose.txt", SummaryRenderer(verbose=True).render_all(GATED[:2])
    yield folder / "gate.quiet.txt", SummaryRenderer(quiet=True).render_all(GATED[:1])
    yield folder / "gate.json", JsonRenderer().render_all(GATED)
    yield folder / "gate.md", MarkdownRenderer().render_all(GATED)
    yield folder / "gate.xml", JunitRenderer().render_all(GATED)
    yield folder / "gate.sarif", SarifRenderer().render_all(GATED)
    for name in ("stable", "skipped", "truncate_fail"):
        yield folder / f"{name}.md", MarkdownRenderer().render(REPORTS[name])
    yield folder / "truncate_fail.xml", JunitRenderer().render(TRUNCATE_FAIL)
    yield folder / "skipped.sarif", SarifRenderer().render(SKIPPED)
    for name, report in REPORTS.items():
        yield folder / f"{name}.txt", TerminalRenderer().render(report)
        yield folder / f"{name}.json", JsonRenderer().render(report)
    yield folder / "stable.verbose.txt", TerminalRenderer(verbose=True).render(STABLE)
    yield folder / "truncate_pass.verbose.txt", TerminalRenderer(verbose=True).render(TRUNCATE_PASS)
    yield folder / "undecided.quiet.txt", TerminalRenderer(quiet=True).render(UNDECIDED)
    yield folder / "longer.colour.txt", TerminalRenderer(colour=True).render(LONGER)


if __name__ == "__main__":
    from pathlib import Path

    for path, text in golden(Path(__file__).parent / "golden"):
        path.write_text(text, "utf-8")
