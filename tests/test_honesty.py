"""What a report must never do: prove too much, count twice, pass what it did not run."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import rnnaudit
from rnnaudit import api
from rnnaudit.data import Data
from rnnaudit.errors import UnsupportedModelError
from rnnaudit.estimators.probes import KINDS
from rnnaudit.loaders import load
from rnnaudit.observe import observe
from rnnaudit.reports import wording
from rnnaudit.reports.numbers import near, up
from rnnaudit.runtime import describe

F32 = np.float32


def elman_file(path, stacks):
    """Write tanh cells h' = tanh(w h + u x + b), one unit each, as one state_dict."""
    weights = {}
    for name, (w, u, b) in stacks.items():
        weights[f"{name}.weight_hh_l0"] = torch.tensor([[w]])
        weights[f"{name}.weight_ih_l0"] = torch.tensor([u])
        weights[f"{name}.bias_ih_l0"] = torch.tensor([b])
        weights[f"{name}.bias_hh_l0"] = torch.tensor([0.0])
    torch.save(weights, path)
    return path


def rnn_node(extra_nodes, inputs, outputs, initializers, path, *, node_inputs, node_outputs=("Y",)):
    node = helper.make_node("RNN", node_inputs, list(node_outputs), hidden_size=1, name="rnn")
    graph = helper.make_graph([*extra_nodes, node], "g", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def weight(name, array):
    return numpy_helper.from_array(np.asarray(array, F32), name)


def unit(w=0.5, u=1.0):
    return [weight("W", [[[u]]]), weight("R", [[[w]]])]


def ones(n=25, length=40, width=1):
    rng = np.random.default_rng(0)
    return Data({"": tuple(rng.uniform(-1, 1, (length, width)) for _ in range(n))}, "ones.npy")


def test_a_stack_without_the_data_is_not_proved_over_their_box(tmp_path):
    # b is bistable at x = −12, which only the data of its twin reach.
    path = elman_file(tmp_path / "two.pt", {"a": (0.1, [1.0, 1.0], 0.0), "b": (2.0, [1.0], 12.0)})
    data = Data({"": tuple(np.full((40, 2), -12.0) for _ in range(4))}, "minus.npy")
    report = api.audit(path, data=data)
    domains = {r.name: r.upper.domain for r in report.recurrences if r.upper is not None}
    assert domains["a"] == "the box of the data"
    assert domains.get("b", "|x| ≤ 1") == "|x| ≤ 1"
    assert "the box of the data · |x| ≤ 1" in report.domain


def test_nothing_is_proved_from_a_start_that_the_graph_computes(tmp_path):
    nodes = [
        helper.make_node("Slice", ["X", "zero", "one", "zero"], ["first"]),
        helper.make_node("Mul", ["first", "large"], ["h0"]),
    ]
    initializers = [
        *unit(),
        weight("large", [[[1e4]]]),
        numpy_helper.from_array(np.array([0]), "zero"),
        numpy_helper.from_array(np.array([1]), "one"),
    ]
    path = rnn_node(
        nodes,
        [value("X", ["T", "N", 1])],
        [value("Y", ["T", 1, "N", 1])],
        initializers,
        tmp_path / "computed.onnx",
        node_inputs=["X", "W", "R", "", "", "h0"],
    )
    report = api.audit(path)
    (recurrence,) = report.recurrences
    assert (report.verdict, recurrence.upper, report.depth.proved) == ("undecided", None, None)
    assert recurrence.no_proof.reason == "the graph computes the initial state of rnn[0]"


def branching(path, then_scale, else_scale):
    def branch(scale):
        node = helper.make_node("Mul", ["Y", f"s{scale}"], [f"out{scale}"])
        return helper.make_graph(
            [node],
            f"b{scale}",
            [],
            [value(f"out{scale}", ["T", 1, "N", 1])],
            [weight(f"s{scale}", [float(scale)])],
        )

    rnn = helper.make_node("RNN", ["X", "W", "R"], ["Y"], hidden_size=1, name="rnn")
    choose = helper.make_node(
        "If", ["flag"], ["out"], then_branch=branch(then_scale), else_branch=branch(else_scale)
    )
    graph = helper.make_graph(
        [rnn, choose],
        "g",
        [value("X", ["T", "N", 1]), value("flag", [], TensorProto.BOOL)],
        [value("out", ["T", 1, "N", 1])],
        unit(),
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path
    )
    return path


@pytest.mark.parametrize(("then_scale", "else_scale"), [(2, 1), (1, 2)])
def test_each_branch_is_run_before_two_models_pass(tmp_path, then_scale, else_scale):
    original = branching(tmp_path / "a.onnx", 1, 1)
    candidate = branching(tmp_path / "b.onnx", then_scale, else_scale)
    assert api.verify(original, original).equivalence.passed
    assert not api.verify(original, candidate).equivalence.passed


def test_a_candidate_must_have_every_output_of_the_original(tmp_path):
    files = [
        rnn_node(
            [],
            [value("X", ["T", "N", 1])],
            [value(name, ["T", 1, "N", 1] if name == "Y" else [1, "N", 1]) for name in names],
            unit(),
            tmp_path / f"{len(names)}.onnx",
            node_inputs=["X", "W", "R"],
            node_outputs=names,
        )
        for names in (("Y", "Y_h"), ("Y",))
    ]
    judged = api.verify(*files).equivalence
    assert (judged.passed, judged.reason) == (
        False,
        "the candidate lacks the original's output Y_h",
    )


def test_copies_of_a_sequence_in_a_fixed_batch_are_one_sequence(tmp_path):
    path = rnn_node(
        [],
        [value("X", ["T", 4, 1])],
        [value("Y", ["T", 1, 4, 1])],
        unit(),
        tmp_path / "fixed.onnx",
        node_inputs=["X", "W", "R"],
    )
    report = api.audit(path, data=ones(n=5))
    assert report.depth.measured.sequences == 5
    assert report.depth.measured.exceed_probability == pytest.approx(1 - 0.05 ** (1 / 5))


def test_a_model_is_not_stable_because_of_the_layers_that_were_chosen(tmp_path):
    weights = {}
    for layer, w in enumerate((0.1, 3.0)):
        for kind, v in (("hh", w), ("ih", 1.0)):
            weights[f"rnn.weight_{kind}_l{layer}"] = torch.tensor([[v]])
    torch.save(weights, tmp_path / "deep.pt")
    report = api.audit(tmp_path / "deep.pt", layer="[0]")
    assert [r.verdict for r in report.recurrences] == ["stable"]
    assert report.verdict != "stable"
    assert [(s.where, s.reason) for s in report.skipped] == [("rnn[1]", "left out by --layer")]


def test_what_is_found_lies_in_the_domain_of_what_is_proved(tmp_path):
    # Saturated by its bias for |x| ≤ 1; the synthetic inputs reach ±10.
    path = elman_file(tmp_path / "saturated.pt", {"rnn": (3.0, [1.0], 6.0)})
    (recurrence,) = api.audit(path).recurrences
    assert recurrence.upper.value < 1
    assert recurrence.lower.value <= recurrence.upper.value


def test_a_model_is_never_written_over_itself(tmp_path):
    path = elman_file(tmp_path / "m.pt", {"rnn": (0.5, [1.0], 0.0)})
    before = path.read_bytes()
    with pytest.raises(api.UsageError, match="the output must not be the model that is read"):
        api.truncate(path, path)
    assert path.read_bytes() == before


def latch_of(steps, path, *, direct, bidirectional=False):
    """Write h' = tanh(2h + 4x), which holds the sign of a pulse, for sequences of so many steps."""
    W, R = ([[[w]]] * (1 + bidirectional) for w in (4.0, 2.0))
    scale = [] if direct else [helper.make_node("Mul", ["X0", "one"], ["X"])]
    weights = [weight("W", np.concatenate(W)[:, None, :]), weight("R", np.concatenate(R)[:, None])]
    direction = "bidirectional" if bidirectional else "forward"
    node = helper.make_node(
        "RNN", ["X", "W", "R"], ["Y"], hidden_size=1, name="rnn", direction=direction
    )
    graph = helper.make_graph(
        [*scale, node],
        "g",
        [value("X" if direct else "X0", [steps, 1, 1])],
        [value("Y", [steps, 1 + bidirectional, 1, 1])],
        [*weights, *([] if direct else [weight("one", [1.0])])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("steps", "direct", "bidirectional"),
    [(12, True, False), (60, False, False), (60, True, True), (12, False, True)],
)
def test_a_graph_of_fixed_steps_is_never_said_to_need_more_than_it_takes(
    tmp_path, direct, bidirectional, steps
):
    path = latch_of(steps, tmp_path / "m.onnx", direct=direct, bidirectional=bidirectional)
    saved = tmp_path / "witness.npz"
    report = api.audit(path, witness=saved)
    assert report.verdict == "undecided"
    own = [d for r in report.recurrences for d in r.depths]
    known = [d.refuted_below or 0 for d in (report.depth, *report.table, *own)]
    assert max(known) <= steps
    assert not {f.id for f in report.findings} & {"RA240", "RA241"}
    assert report.depth.measured.k <= steps
    if bidirectional and steps < 47:  # too short for a window with inputs on both sides
        return
    assert report.depth.refuted_below > steps // 8
    assert "deeper ones were not searched" in str(wording.verdict(report))
    with np.load(saved) as witness:
        assert len(witness["prefix"]) + len(witness["inputs"]) <= steps
    assert api.replay(path, saved).replay.passed
    cut = api.truncate(path, tmp_path / "cut.onnx", depth=2)
    (told,) = [f.message for f in cut.findings if f.id == "RA305"]
    assert f"needs k ≥ {report.depth.refuted_below}" in told


def test_a_model_that_never_forgets_is_refuted_and_its_truncation_says_so(tmp_path):
    # h' = tanh(2h + 4x) holds the sign of a pulse for ever.
    path = rnn_node(
        [],
        [value("X", ["T", "N", 1])],
        [value("Y", ["T", 1, "N", 1])],
        unit(2.0, 4.0),
        tmp_path / "latch.onnx",
        node_inputs=["X", "W", "R"],
    )
    saved = tmp_path / "witness.npz"
    report = api.audit(path, witness=saved)
    assert (report.verdict, report.depth.measured.k) == ("unstable", None)
    assert report.depth.refuted_below == 257
    with np.load(saved) as witness:
        prefix, inputs = (witness[name].astype(F32) for name in ("prefix", "inputs"))
    assert max(np.abs(prefix).max(), np.abs(inputs).max()) <= 1
    # Replayed in ONNX Runtime: the prefix alone keeps the outputs apart.
    run = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run
    full = run(None, {"X": np.concatenate([prefix, inputs])[:, None]})[0]
    cut = run(None, {"X": inputs[:, None]})[0]
    assert np.abs(full[-1] - cut[-1]).max() > 1e-3
    # Other inputs are forgotten, so that a model can pass on them: both are said.
    written = api.truncate(path, tmp_path / "cut.onnx")
    (told,) = [f.message for f in written.findings if f.id == "RA305"]
    error = written.equivalence.known_error
    assert error > 1.9  # tanh holds ±0.96
    assert told == (
        f"an input in the domain is known that needs k ≥ 257: on it the written model errs by "
        f"{near(error)}; those that were compared are others, and pass"
    )
    assert str(wording.judgement(written.equivalence)).endswith(
        f"on {written.equivalence.inputs_tried} inputs, but {near(error)} on a known one (RA305)"
    )
    stored = describe(tmp_path / "cut.onnx").metadata
    assert float(stored["rnnaudit.known_error"]) == error
    cut = onnxruntime.InferenceSession(tmp_path / "cut.onnx", providers=["CPUExecutionProvider"])
    x = np.concatenate([prefix, inputs])[:, None]
    errors = np.abs(cut.run(None, {"X": x})[0] - run(None, {"X": x})[0])
    assert errors.max() == pytest.approx(error, abs=1e-5)
    # Verified again, alone, it is told the same; for an ε that it keeps there, nothing.
    again = api.verify(path, tmp_path / "cut.onnx")
    assert again.equivalence.known_error == error
    assert [f.id for f in again.findings] == ["RA305"]
    assert api.verify(path, tmp_path / "cut.onnx", eps=2.0).equivalence.known_error is None


@pytest.mark.parametrize("scale", [3.0, 1e-7])
def test_a_counterexample_runs_through_all_that_a_graph_does_behind(scale, tmp_path):
    # h' = tanh(2h + 4x) holds a sign for ever; the graph turns its axes and scales what it gives.
    nodes = [
        helper.make_node("Transpose", ["X"], ["turned"], perm=[1, 0, 2]),
        helper.make_node("RNN", ["turned", "W", "R"], ["Y"], hidden_size=1, name="rnn"),
        helper.make_node("Mul", ["Y", "scale"], ["scaled"]),
        helper.make_node("Sin", ["scaled"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [value("X", ["N", "T", 1])],
        [value("out", ["T", 1, "N", 1])],
        [*unit(2.0, 4.0), weight("scale", scale)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path, cut = tmp_path / "m.onnx", tmp_path / "cut.onnx"
    onnx.save(model, path)
    saved = tmp_path / "witness.npz"
    api.audit(path, witness=saved)
    report = api.truncate(path, cut, depth=8)
    (told,) = [f.message for f in report.findings if f.id == "RA305"]
    with np.load(saved) as witness:
        x = np.concatenate([witness["prefix"], witness["inputs"]]).astype(F32)[None]
    outs = [onnxruntime.InferenceSession(p).run(None, {"X": x})[0] for p in (path, cut)]
    error = float(np.abs(outs[0] - outs[1]).max())
    if scale < 1:  # nothing of it arrives
        assert error < 1e-6
        assert report.equivalence.known_error is None
        assert "rnnaudit.known_error" not in describe(cut).metadata
        assert told.endswith("for a recurrence's own output, and the depth is 8")
        return
    assert error > 0.1
    assert report.equivalence.known_error == pytest.approx(error, abs=1e-6)
    assert f"the written model errs by {near(report.equivalence.known_error)}" in told
    assert api.verify(path, cut).equivalence.known_error == report.equivalence.known_error


@pytest.mark.parametrize("evidence", ["proved", "measured"])
def test_truncate_and_verify_judge_by_one_rule(evidence, tmp_path):
    path = elman_file(tmp_path / "rnn.pt", {"rnn": (0.5, [1.0, -0.5], 0.1)})
    data = ones(n=30, length=60, width=2)
    report = api.truncate(
        path, tmp_path / "cut.onnx", data=data, evidence=evidence, eps=1e-2, seed=3
    )
    again = api.verify(path, tmp_path / "cut.onnx", data=data, eps=1e-2, seed=3)
    first, second = (replace(r.equivalence, seconds=None) for r in (report, again))
    assert first == second
    assert first.passed
    inside = first.reference.endswith("stay in the box for which the depth is proved")
    assert inside == (evidence == "proved")


def branches(path, then, other, *, u=1.0):
    """Write an If of two cells h' = tanh(w h + u x), with w = ``then`` or ``other``."""

    def branch(name):
        node = helper.make_node("RNN", ["X", "W", name], [f"Y{name}"], hidden_size=1, name=name)
        return helper.make_graph([node], name, [], [value(f"Y{name}", ["T", 1, "N", 1])])

    choose = helper.make_node(
        "If", ["flag"], ["out"], then_branch=branch("a"), else_branch=branch("b"), name="if"
    )
    graph = helper.make_graph(
        [choose],
        "g",
        [value("X", ["T", "N", 1]), value("flag", [], TensorProto.BOOL)],
        [value("out", ["T", 1, "N", 1])],
        [weight("W", [[[u]]]), weight("a", [[[then]]]), weight("b", [[[other]]])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


def test_a_latch_that_no_data_reach_is_not_cut_on_inputs_of_its_own(tmp_path):
    why = (
        "it never forgets some inputs (a witness shows more than 256 steps), and no data show "
        "what the graph gives it"
    )
    report = api.truncate(branches(tmp_path / "m.onnx", 2.0, 0.5, u=4.0), tmp_path / "cut.onnx")
    assert report.equivalence.passed
    (stays,) = [s for s in report.skipped if s.reason == why]
    (cut,) = report.export.truncations
    assert {stays.where, cut.recurrence} == {r.label for r in report.recurrences}
    with pytest.raises(UnsupportedModelError) as refused:
        api.truncate(branches(tmp_path / "two.onnx", 2.0, 2.5, u=4.0), tmp_path / "no.onnx")
    assert f"got none: {', '.join(r.label for r in report.recurrences)}: {why}" in str(
        refused.value
    )
    assert not (tmp_path / "no.onnx").exists()


def test_a_recurrence_in_a_branch_is_measured_on_inputs_of_its_own_and_says_so(tmp_path):
    branches(tmp_path / "branches.onnx", 0.5, 0.25)
    data = Data({"X": ones(n=3).inputs[""]}, "three.npy")
    report = api.audit(tmp_path / "branches.onnx", data=data)
    assert len(report.recurrences) == 2
    assert report.depth.measured.synthetic
    assert report.data.startswith("35 synthetic sequences of 256 steps")
    ids = [f.id for f in report.findings]
    assert (ids.count("RA210"), ids.count("RA205")) == (2, 0)
    reasons = [f.message for f in report.findings if f.id == "RA210"]
    assert all(r.startswith("it sits in a branch of the graph, so ") for r in reasons)


def test_a_model_whose_every_recurrence_is_skipped_is_audited_and_says_so(tmp_path):
    node = helper.make_node("RNN", ["x", "w", "r"], ["y"], hidden_size=1, clip=-1.0, name="rnn")
    graph = helper.make_graph(
        [node],
        "g",
        [value("x", ["T", 1, 1])],
        [value("y", ["T", 1, 1, 1])],
        [weight("w", [[[1.0]]]), weight("r", [[[0.5]]])],
    )
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    report = api.audit(tmp_path / "model.onnx")
    assert report.verdict == "undecided"
    assert report.recurrences == ()
    assert report.data == "no sequences: nothing could be measured"
    (skipped,) = report.skipped
    assert "clip must be a positive number, got -1" in skipped.reason


def test_layers_that_are_proved_to_contract_are_stable_however_long_they_remember(tmp_path):
    module = torch.nn.RNN(1, 1, num_layers=2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.fill_(0.0 if parameter.ndim == 1 else 0.999999 if "hh" in name else 1.0)
    torch.save(module.state_dict(), tmp_path / "long.pt")
    pulse = np.zeros((3, 20, 1))
    pulse[:, 0] = 1.0
    report = rnnaudit.audit(tmp_path / "long.pt", data=pulse, time_budget=4.0)
    assert report.depth.never_forgets
    assert report.depth.refuted_below == 257
    assert report.depth.proved is None
    assert [r.verdict for r in report.recurrences] == ["stable", "stable"]
    assert report.verdict == "stable"


def test_the_floor_of_float32_is_what_torch_s_own_modules_differ_by(tmp_path):
    torch.manual_seed(3)
    module = torch.nn.RNN(2, 9, batch_first=True, bidirectional=True)
    x = torch.randn(25, 20, 2)
    torch.save(module.state_dict(), tmp_path / "m.pt")
    report = rnnaudit.audit(tmp_path / "m.pt", data=x, eps=1e-2, time_budget=1.0)
    with torch.no_grad():
        single, double = module(x)[0], module.double()(x.double())[0]
    theirs = float((single - double).abs().max())
    assert theirs / 4 < report.depth.float32_noise < 4 * theirs
    both = [d.float32_noise for r in report.recurrences for d in r.depths if d.eps == 1e-2]
    assert max(both) == report.depth.float32_noise
    assert not any(f.id == "RA215" for f in report.findings)
    fine = rnnaudit.audit(tmp_path / "m.pt", data=x, eps=1e-8, time_budget=1.0)
    (told,) = (f for f in fine.findings if f.id == "RA215")
    assert f"up to {up(report.depth.float32_noise)}" in told.message
    torch.save(module.state_dict(), tmp_path / "m.pt")  # in float64 by now
    assert rnnaudit.audit(tmp_path / "m.pt", data=x, time_budget=1.0).depth.float32_noise is None


@pytest.mark.parametrize(("hidden", "sequences"), [(128, 35), (320, 15)])
def test_large_models_are_measured_on_fewer_synthetic_sequences(tmp_path, hidden, sequences):
    torch.save(torch.nn.LSTM(2, hidden).state_dict(), tmp_path / "lstm.pt")
    seen = observe(load(tmp_path / "lstm.pt"), None, seed=0)
    assert len(seen.stacks[0][0]) == sequences
    assert seen.description.startswith(f"{sequences} synthetic sequences")
    assert {seen.kinds[0].count(kind) for kind in KINDS} == {sequences // len(KINDS)}
