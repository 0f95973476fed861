"""Reports say what the records hold, on the true side of every number, within 80 columns.

``python -m tests.reports_by_hand`` rewrites the expected files; read the difference.
"""

import json
import math
import subprocess
import sys
import unicodedata
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal
from itertools import cycle
from pathlib import Path

import jsonschema
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from rich.cells import cell_len

from rnnaudit.errors import LoadError
from rnnaudit.reports import (
    RENDERERS,
    HtmlRenderer,
    JsonRenderer,
    MarkdownRenderer,
    TerminalRenderer,
    layout,
    numbers,
    terminal,
    wording,
)
from rnnaudit.reports.commands import shell, snippet
from rnnaudit.reports.json import refusal, schema
from rnnaudit.reports.layout import flow
from rnnaudit.results import Depth, Equivalence, Finding, MeasuredDepth, ProofFile, Report
from tests import reports_by_hand as by_hand
from tests.strategies import random_model

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = list(by_hand.golden(GOLDEN))
VALIDATOR = jsonschema.Draft202012Validator(schema())

reports = st.sampled_from(list(by_hand.REPORTS.values()))
values = st.floats(0, 1e9, allow_subnormal=False)
names = st.text(max_size=120) | st.sampled_from(
    ["\x1b[31m", "a  b", "漢" * 50, "x" * 200, "\ud800"]
)


@pytest.mark.parametrize(("path", "text"), EXPECTED, ids=[p.name for p, _ in EXPECTED])
def test_a_report_is_rendered_as_expected(path, text):
    assert text == path.read_text("utf-8")


def test_every_golden_file_is_still_rendered():
    assert {p.name for p in GOLDEN.iterdir()} == {p.name for p, _ in EXPECTED}


# ----------------------------------------------------------------------------- numbers


@given(value=values, digits=st.integers(1, 17))
@settings(max_examples=200)
def test_bounds_are_printed_on_their_true_side(value, digits):
    above, below = Decimal(numbers.up(value, digits)), Decimal(numbers.down(value, digits))
    assert below <= Decimal(value) <= above
    assert above - below <= abs(Decimal(value)) * Decimal(10) ** (1 - digits) * 2


@given(value=st.floats(0.9, 1.1))
@settings(max_examples=200)
def test_a_rate_is_never_printed_on_the_other_side_of_one(value):
    above, below = numbers.rate_up(value), numbers.rate_down(value)
    assert Decimal(below) <= Decimal(value) <= Decimal(above)
    assert (float(above) < 1) == (value < 1)
    assert (float(below) > 1) == (value > 1)


@given(eps=st.floats(1e-300, 1e300))
def test_a_chosen_epsilon_is_printed_exactly(eps):
    assert float(numbers.epsilon(eps)) == eps


@given(value=st.floats(0, allow_infinity=False))
def test_an_exact_number_reads_back_the_same(value):
    assert float(numbers.exact(value)) == value


@given(probability=st.floats(0, 1))
def test_a_probability_is_rounded_up(probability):
    assert Decimal(numbers.percent_up(probability).split("\u00a0")[0]) >= Decimal(probability) * 100


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (-0.2243, 0.0041, "−0.224 ± 0.005"),
        (-0.2243, 0.0096, "−0.224 ± 0.010"),
        (-3.21, 0.2, "−3.2 ± 0.2"),
        (-220.4, 33.0, "−220 ± 40"),
        (0.5, 0.0, "0.500"),
        (-1e-9, 1e-10, "−1e-9 ± 1e-10"),
    ],
)
def test_an_estimate_ends_where_its_error_begins(value, stderr, text):
    assert numbers.estimate(value, stderr) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-5, "10 µs"), (0.0313, "31.3 ms"), (2.1, "2.1 s"), (75, "1.25 min"), (1e5, "27.8 h")],
)
def test_spans_have_their_natural_unit(value, text):
    assert numbers.seconds(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (61234, "61.2 kB"), (5 * 10**12, "5000 GB")]
)
def test_sizes_have_a_decimal_prefix(count, text):
    assert numbers.size(count) == text


def test_a_number_that_is_not_finite_is_not_printed_as_one():
    assert numbers.up(math.inf) == numbers.down(math.nan) == "not finite"


# ---------------------------------------------------------------------------- terminal


def renamed(record, texts):
    """Replace every free text in a record by one of ``texts``, in turn."""
    kept = ("verdict", "severity", "direction", "evidence", "cell", "norm", "id", "dtype")
    changes = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, str) and field.name not in kept:
            changes[field.name] = next(texts)
        elif is_dataclass(value):
            changes[field.name] = renamed(value, texts)
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            changes[field.name] = tuple(renamed(item, texts) for item in value)
    return replace(record, **changes)


@given(texts=st.lists(names, min_size=1, max_size=5), report=reports, verbose=st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_line_is_too_wide_and_no_name_steers_the_terminal(texts, report, verbose):
    text = TerminalRenderer(verbose=verbose).render(renamed(report, cycle(texts)))
    assert max(map(cell_len, text.splitlines())) <= 80
    assert {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs")} <= {"\n"}
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_the_largest_depths_fit():
    measured = by_hand.measured(None, longer_than=10**7)
    table = tuple(Depth(e, 10**9, measured, 10**8) for e in (*by_hand.EPSILONS, 2.5e-4))
    row = replace(by_hand.BACH, depths=table, name="n" * 90)
    for count in (1, 5):
        report = replace(by_hand.STABLE, table=table, depth=table[2], recurrences=(row,) * count)
        text = TerminalRenderer().render(report)
        assert max(map(cell_len, text.splitlines())) <= 80
        assert text.count("> 10000000") >= len(table)


@given(report=reports)
def test_colour_changes_no_word(report):
    plain, coloured = (TerminalRenderer(colour=c).render(report) for c in (False, True))
    bare = "".join(
        part.partition("m")[2] if i else part for i, part in enumerate(coloured.split("\x1b["))
    )
    assert "\x1b[" in coloured
    assert bare == plain


@given(path=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=90))
@settings(max_examples=30, deadline=None)
def test_the_next_command_is_one_that_a_shell_reads_back(path):
    command = ["rnnaudit", "truncate", path, "--eps", "1e-3"]
    lines = shell(command, 71)
    if not any(unicodedata.category(c) == "Cc" for c in path):
        assert max(map(cell_len, lines)) <= 71
    script = "printf '%s\\0' " + "\n".join(lines)
    run = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    assert run.stdout.decode() == "".join(f"{word}\0" for word in command)


@pytest.mark.parametrize("path", ["out.onnx", 'a folder\'s "best" model\\' + "n" * 90 + ".onnx"])
def test_the_snippet_runs_the_written_file(tmp_path, path):
    inputs = [
        ("x" * 70, TensorProto.FLOAT, ["batch", "time", 3]),
        ("mask", TensorProto.INT64, ["n", 2]),
        ("s", TensorProto.DOUBLE, [1]),
    ]
    nodes = [helper.make_node("Identity", [n], [f"{n}_out"]) for n, _, _ in inputs]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, kind, shape) for n, kind, shape in inputs],
        [helper.make_tensor_value_info(f"{n}_out", kind, shape) for n, kind, shape in inputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / path)
    export = replace(
        by_hand.TRUNCATE_PASS.export,
        path=path,
        inputs=tuple(
            (n, tuple(shape), TensorProto.DataType.Name(kind).lower()) for n, kind, shape in inputs
        ),
        outputs=tuple(f"{n}_out" for n, _, _ in inputs),
    )
    code = "\n".join([*snippet(export, 76), "print(y.shape, y1.shape, y2.shape)"])
    assert max(map(len, code.splitlines())) <= 76
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert run.stdout.split("\n")[0] == "(1, 100, 3) (1, 2) (1,)"


@pytest.mark.parametrize(
    ("outputs", "left"),
    [
        (("logits", "past_next"), "logits, past_next = session.run"),
        (("logits",), "logits, = session.run"),
        (("logits", "h.1"), "y, y1 = session.run"),
        (("session",), "y, = session.run"),
        (("lambda", "y"), "y, y1 = session.run"),
        (("h" * 70,), "y, = session.run"),
    ],
)
def test_the_snippet_calls_outputs_by_their_names(outputs, left):
    export = replace(by_hand.TRUNCATE_PASS.export, outputs=outputs)
    lines = snippet(export, 76)
    assert max(map(len, lines)) <= 76
    assert any(line.startswith(left) for line in lines)


def test_a_share_keeps_its_unit_and_a_long_title_hangs():
    words = "at 95 % confidence, 59 bound the exceedance by 5 %"
    for room in range(12, 60):
        lines = [line.plain for line in flow([words], room)]
        assert not any(line.startswith("%") for line in lines)
        assert " ".join(lines).replace("\u00a0", " ") == words
    name = "a_layer_of_a_long_name/with/a/path/LSTM_1"
    first = by_hand.TRUNCATE_PASS.recurrences[0]
    cut = by_hand.TRUNCATE_PASS.export.truncations[0]
    named = replace(first, name=name)
    cut = replace(cut, recurrence=named.label)
    export = replace(by_hand.TRUNCATE_PASS.export, truncations=(cut,))
    text = TerminalRenderer().render(
        replace(by_hand.TRUNCATE_PASS, recurrences=(named,), export=export)
    )
    (depth,) = (line for line in text.splitlines() if line.strip().startswith("k = "))
    assert depth.startswith("    k = ")


def test_the_snippet_has_three_lines_and_names_few_outputs():
    export = by_hand.TRUNCATE_PASS.export
    assert len(snippet(export, 76)) == 3
    many = replace(export, outputs=tuple(map(str, range(9))))
    assert snippet(many, 76)[-1].startswith("outputs = session.run(None, {")


def test_cell_options_are_shown_where_they_differ_from_the_default():
    gru = replace(by_hand.BACH, cell="gru", initial_state="zero")
    usual = {"linear_before_reset": 1, "activations": ["sigmoid", "tanh"]}
    unusual = {"linear_before_reset": 0, "activations": ("hardsigmoid", "tanh"), "clip": 2.0}
    assert wording.options(replace(gru, cell_options=usual)) == ""
    assert wording.options(replace(gru, cell_options=unusual)) == (
        "linear_before_reset = 0 · activations = hardsigmoid, tanh · clip = 2.0"
    )


# ----------------------------------------------------------------------------- wording


def verdict(report: Report) -> str:
    return str(wording.verdict(report))


def test_what_was_proved_seen_and_assumed_have_their_own_words():
    assert verdict(by_hand.STABLE) == (
        "STABLE (proved for every input with |x| ≤ 1): "
        "a feed-forward model of depth 53 is equivalent to 1e-3"
    )
    seen = Depth(1e-3, None, by_hand.measured(31), 513)
    unstable = replace(by_hand.STABLE, verdict="unstable", depth=seen, domain="|x| ≤ 3")
    assert verdict(unstable).replace("\u00a0", " ") == (
        "UNSTABLE for some inputs with |x| ≤ 3 (witness: needs k ≥ 513); "
        "on your data k(1e-3) = 31 (77 sequences, ≤ 3.9 % exceed)"
    )
    in_part = replace(by_hand.STABLE, verdict="undecided", depth=replace(seen, refuted_below=22))
    assert "UNDECIDED in the worst case (no proof, a witness refutes k < 22" in verdict(in_part)
    unproved = replace(by_hand.STABLE, depth=Depth(1e-3), domain="every input")
    assert verdict(unproved) == (
        "STABLE (proved for every input); k(1e-3) was measured for each recurrence alone"
    )
    assert verdict(replace(unproved, domain="the data's box")).startswith(
        "STABLE (proved for every input in the data's box);"
    )
    blind = replace(unproved, recurrences=(replace(by_hand.BACH, depths=()),))
    assert verdict(blind).endswith("; k(1e-3) was not measured")


def test_a_witness_is_of_the_output_that_it_was_found_for():
    forgets = Depth(1e-3, refuted_below=20, refuted_in="rnn", searched=256)
    latched = Depth(1e-3, refuted_below=257, refuted_in="rnn[1]", searched=256)
    parts = tuple(
        replace(by_hand.BACH, layer=i, verdict=v, depths=(d,))
        for i, (v, d) in enumerate((("undecided", forgets), ("unstable", latched)))
    )
    one = replace(by_hand.STABLE, verdict="unstable", recurrences=parts, depth=forgets)
    assert "(witness of rnn[1]'s own output: needs k > 256, the search's horizon)" in verdict(one)
    both = replace(one, recurrences=(*parts, replace(parts[1], name="other")))
    assert "(witness of rnn[1]'s own output, and of 1 more: needs k > 256" in verdict(both)
    whole = replace(one, depth=replace(latched, refuted_in="rnn"))
    assert "(witness: needs k > 256, the search's horizon)" in verdict(whole)
    behind = replace(whole, scope="each stack's own output")
    assert "(witness of rnn's output: needs k > 256" in verdict(behind)


def test_a_search_that_ended_before_the_others_do_calls_no_model_unstable():
    # README: unstable is what is still remembered after 256 steps.
    for searched, refuted, forgets in ((24, 25, True), (256, 257, False), (256, 200, True)):
        depth = Depth(1e-3, refuted_below=refuted, refuted_in="rnn", searched=searched)
        assert depth.never_forgets is not forgets
        report = replace(by_hand.STABLE, verdict="undecided", depth=depth)
        more = "no more" if refuted <= searched else "deeper ones were not searched"
        assert f"a witness refutes k < {refuted}, {more}" in verdict(report)


def test_what_float32_cannot_show_is_marked_in_every_format_for_people():
    text = TerminalRenderer().render(by_hand.LONGER)
    said = "below its own error: float32 alone moves these outputs by up to 3.1e-6"
    assert "1e-5  1e-6*" in text
    assert f"* {said}" in text
    assert "1e-6&#42;" in MarkdownRenderer().render(by_hand.LONGER)
    assert said in MarkdownRenderer().render(by_hand.LONGER)
    assert f"; * {said}" in HtmlRenderer().render(by_hand.LONGER)
    fine = replace(by_hand.LONGER, eps=1e-6, depth=replace(by_hand.LATCHED, eps=1e-6))
    assert "Rounding</dt><dd>ε is below float32" in HtmlRenderer().render(fine)
    own = replace(fine.recurrences[0], depths=(fine.depth,))
    text = TerminalRenderer().render(replace(fine, recurrences=(own,)))
    assert "k(1e-6) ε is below float32's own error: float32 alone moves" in text
    assert "float32" not in TerminalRenderer().render(by_hand.STABLE)


def test_a_time_budget_is_not_mistaken_for_the_data():
    cut = Finding("RA208", "warning", "latch[0]", "the time budget ended the study")
    report = replace(by_hand.LONGER, findings=(cut,))
    assert "longer than the time budget let the data show: more than 128" in verdict(report)
    assert wording.cut_short(report, "latch[0]")
    assert not wording.cut_short(report, "latch[1]")


def command(report):
    words, advice = wording.next_command(report)
    return advice if words is None else " ".join(words)


def told(**settings):
    """Return a report that a run with these settings made, and that has a depth."""
    return replace(by_hand.STABLE, settings={"eps": 1e-3, **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": "x.npy", "time_axis": 0}, "m.pt --eps 1e-3 --data x.npy --time-axis 0"),
        ({"data": "x.npy", "batch_axis": -1}, "m.pt --eps 1e-3 --data x.npy --batch-axis -1"),
        ({"trust_pickle": True}, "m.pt --trust-pickle --eps 1e-3"),
        ({"weights": "w.npz"}, "m.pt --weights w.npz --eps 1e-3"),
        ({"factory": "a.b:c"}, "--factory a.b:c --eps 1e-3"),
        ({"factory": "a.b:c", "weights": "w.pt"}, "w.pt --factory a.b:c --eps 1e-3"),
    ],
)
def test_the_next_command_reads_model_and_data_as_this_one_did(settings, words):
    model = replace(by_hand.STABLE.model, path="m.pt")
    report = replace(told(**settings), model=model)
    assert command(report) == f"rnnaudit truncate {words}"


@pytest.mark.parametrize(
    ("format_", "settings", "code"),
    [
        ("nn.Module", {}, "module, eps=1e-3"),
        ("nn.Module", {"data": "x.npy"}, "module, eps=1e-3, data='x.npy'"),
        ("nn.Module", {"data": "arrays", "layer": "a"}, "module, eps=1e-3, data=data, layer='a'"),
        (
            "ONNX",
            {"data": "arrays", "input_range": [0.0, 1.0]},
            "'m.pt', 'm.truncated.onnx', eps=1e-3, data=data, input_range=(0.0, 1.0)",
        ),
    ],
)
def test_what_no_command_can_name_goes_on_in_python(format_, settings, code):
    model = replace(by_hand.STABLE.model, path="m.pt", format=format_)
    report = replace(told(**settings), model=model)
    assert wording.next_command(report) == (None, f"rnnaudit.truncate({code})")


def test_a_graph_of_fixed_steps_can_be_truncated_and_an_unrolled_one_cannot():
    name = by_hand.STABLE.recurrences[0].name
    for message, cut in [
        ("the graph fixes its sequences at 20 steps; it is audited for any", True),
        ("unrolled to 20 steps that share their weights, over 'x'", False),
    ]:
        note = Finding("RA126", "note", name, message)
        words, _ = wording.next_command(replace(by_hand.STABLE, findings=(note,)))
        assert (words is not None) == cut


def test_the_next_command_follows_from_what_is_known():
    deep = replace(by_hand.UNDECIDED, depth=Depth(1e-3, 900, None))
    assert command(deep).endswith("bach_lstm.onnx --eps 1e-3 --max-depth 900")
    seen = replace(by_hand.STABLE, depth=Depth(1e-3, 900, by_hand.measured(31)))
    assert command(seen).endswith("--eps 1e-3 --data sample_models/chorales.npz")
    settings = {"eps": 1e-3, "input_range": [-1.0, 0.1], "layer": "rnn one"}
    assert wording.next_command(replace(by_hand.STABLE, settings=settings))[0][-4:] == (
        "--input-range",
        "-1.0:0.1",
        "--layer",
        "rnn one",
    )
    short = replace(by_hand.STABLE, depth=Depth(1e-3, None, by_hand.measured(None, longer_than=9)))
    cut = replace(short, findings=(Finding("RA208", "warning", "rnn[0]", "cut"),))
    assert command(cut) == "give it more time with --time-budget"
    assert command(short) == "measure on longer sequences, or keep the recurrence"
    assert command(replace(by_hand.STABLE, depth=Depth(1e-3))) == ""


def test_a_comparison_that_failed_says_why():
    judged = Equivalence(False, 1e-3, None, None, None, {}, 0, None, None)
    assert str(wording.judgement(judged)) == "FAIL against ε = 1e-3: nothing was compared"
    cut = replace(by_hand.PASS, reason="the time budget ended after 12 of 48 inputs")
    assert str(wording.judgement(cut)).endswith("on 48 inputs; " + cut.reason)
    worse = replace(by_hand.PASS, known_error=2.0)
    assert str(wording.judgement(worse)).endswith("inputs, but 2.00 on a known one (RA305)")
    worse = replace(worse, passed=False)
    assert str(wording.judgement(worse)).endswith("inputs, and 2.00 on a known one (RA305)")


# -------------------------------------------------------------------------------- JSON


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(schema())


@given(texts=st.lists(names, min_size=1, max_size=5), report=reports)
@settings(max_examples=30, deadline=None)
def test_every_output_validates_whatever_the_names(texts, report):
    changed = renamed(report, cycle(texts))
    changed = replace(changed, model=replace(changed.model, sha256="0" * 64))
    VALIDATOR.validate(json.loads(JsonRenderer().render(changed)))


def test_numbers_that_do_not_exist_are_null():
    endless = replace(
        by_hand.PASS, passed=False, max_abs_error=math.inf, required_eps=math.nan, seconds=None
    )
    report = replace(
        by_hand.STABLE,
        equivalence=endless,
        settings={"eps": 1e-3, "seed": 0, "range": (-1.0, math.inf), "where": Path("a/b")},
    )
    text = JsonRenderer().render(report)
    assert "NaN" not in text
    assert "Infinity" not in text
    found = json.loads(text)
    VALIDATOR.validate(found)
    assert found["equivalence"]["max_abs_error"] is None
    assert found["settings"] == {"eps": 1e-3, "seed": 0, "range": [-1.0, None], "where": "a/b"}


def test_a_refusal_validates_and_names_the_finding():
    error = LoadError("wanted a model, got nothing", help="name one", id="RA101")
    found = json.loads(refusal(error, "caf\udce9.pt"))
    VALIDATOR.validate(found)
    assert found["error"] == {
        "id": "RA101",
        "message": "wanted a model, got nothing",
        "help": "name one",
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["verdict"], "fine"),
        (["extra"], 1),
        (["recurrences", 0, "lambda", "upper", "value"], -1),
        (["recurrences", 0, "depth", "measured", "exceed_probability"], 1.5),
        (["findings"], [{"id": "X1"}]),
        (["model", "sha256"], "short"),
    ],
)
def test_the_schema_refuses_what_is_wrong(path, value):
    found = json.loads(JsonRenderer().render(by_hand.STABLE))
    *parents, last = path
    target = found
    for key in parents:
        target = target[key]
    target[last] = value
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(found)


def test_every_renderer_is_pure_and_named():
    assert [r.name for r in RENDERERS] == [*("text", "json", "markdown", "junit", "sarif", "html")]
    for renderer in RENDERERS:
        page = renderer.render(by_hand.STABLE)
        assert page.endswith("\n")
        assert renderer.render(by_hand.STABLE) == page


def test_a_table_shortens_its_first_column_before_the_next():
    columns = [
        layout.Column("name", right=False, shrinks=True),
        layout.Column("cell", shrinks=True),
    ]
    _, line = list(layout.table(columns, [["x" * 60, "gru ←"]], indent=2, width=40))
    assert line.plain == "  …" + "x" * 30 + "  gru ←"


def test_a_study_that_was_cut_short_shows_no_number():
    measured = MeasuredDepth(None, 0, 5, None, 0.95, True)
    words = "unknown: the study was cut short, or the data are too short"
    assert wording.longer(measured, cut=False) == words
    assert wording.longer(measured, cut=True) == "unknown: the time budget ended the study"
    assert terminal.brief(measured).plain == "?"


# ----------------------------------------------------------------------- print, and the prompt


@pytest.mark.parametrize("name", by_hand.REPORTS)
def test_a_printed_report_is_what_the_terminal_shows(name):
    report = by_hand.REPORTS[name]
    assert f"{report}\n" == TerminalRenderer().render(report)


@pytest.mark.parametrize("name", by_hand.REPORTS)
def test_a_report_at_the_prompt_is_one_short_line(name):
    report = by_hand.REPORTS[name]
    shown = repr(report)
    assert len(shown.splitlines()) == 1
    assert len(shown) < 500
    assert shown.startswith(f"Report(model={report.model.path!r}, verdict={report.verdict!r}, ")
    if report.equivalence is not None:
        assert f"passed={report.equivalence.passed}" in shown


def test_a_printed_proof_says_what_is_proved():
    proof = ProofFile("model.proof.json", 4096, valid=True)
    report = replace(by_hand.STABLE, proof_file=proof)
    assert "\nVALID: 1 of 1 recurrence proved again from the weights; end to end k" in str(report)


def test_a_model_at_the_prompt_is_one_short_line():
    shown = repr(random_model(0, "lstm", hidden=64, layers=9))
    assert shown.splitlines() == [shown]
    assert shown.startswith("Model(path=")
    assert "'rnn[5]', … 3 more]" in shown
    assert len(shown) < 300
