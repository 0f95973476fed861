"""The gate: a policy over many models, the same verdict and exit code in every format."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch

from rnnaudit import policy
from rnnaudit.policy import Allowance, Policy, judge
from rnnaudit.reports.json import JsonRenderer, gate_schema
from rnnaudit.results import (
    Depth,
    Finding,
    LowerBound,
    NoProof,
    Skipped,
    UpperBound,
)
from tests import reports_by_hand as by_hand
from tests.program import run

TODAY = date(2026, 12, 2)


def failures(report, policy=None, **more):
    gate = judge(report, policy or Policy(), today=TODAY, **more)
    assert gate.passed == (not gate.failures)
    return {rule.rule: rule for rule in gate.failures}


# ------------------------------------------------------------------------------- verdict


@pytest.mark.parametrize(
    ("verdict", "require", "fails"),
    [
        ("stable", "stable", False),
        ("undecided", "stable", True),
        ("unstable", "stable", True),
        ("stable", "not-unstable", False),
        ("undecided", "not-unstable", False),
        ("unstable", "not-unstable", True),
        ("unstable", "any", False),
    ],
)
def test_the_verdict_must_be_as_good_as_required(verdict, require, fails):
    report = replace(by_hand.STABLE, verdict=verdict)
    assert ("verdict" in failures(report, Policy(require=require))) == fails


def test_a_failed_verdict_names_the_recurrences_that_are_open():
    rule = failures(by_hand.MANY)["verdict"]
    assert rule.where.split(", ") == [r.label for r in by_hand.MANY.recurrences]
    assert rule.id == "RA230"


def test_skipped_parts_fail_unless_they_are_accepted():
    report = replace(by_hand.SKIPPED, verdict="undecided")
    assert set(failures(report)) == {"verdict", "skipped"}
    assert failures(report)["skipped"].where == "decoder/LSTM_3, head"
    assert failures(report, Policy(allow_skipped=True)) == {}
    inside = replace(by_hand.BACH, skipped=(Skipped("rnn[0]", "cut off"),))
    assert "skipped" in failures(replace(by_hand.STABLE, recurrences=(inside,)))


# ----------------------------------------------------------------------------- λ, depths


def test_a_rate_is_compared_exactly_and_needs_its_own_evidence():
    bound = by_hand.BACH.upper
    assert failures(by_hand.STABLE, Policy(max_lambda=bound.value)) == {}
    below = torch.nextafter(torch.tensor(bound.value, dtype=torch.float64), torch.tensor(0.0))
    assert "max-lambda" in failures(by_hand.STABLE, Policy(max_lambda=float(below)))
    unproved = replace(by_hand.BACH, upper=None, no_proof=NoProof("‖W‖₂ = 2"))
    rule = failures(replace(by_hand.STABLE, recurrences=(unproved,)), Policy(max_lambda=9))
    assert rule["max-lambda"].got == "no proof: ‖W‖₂ = 2"
    found = replace(by_hand.BACH, lower=LowerBound(1.3, "2", "sampled"))
    report = replace(by_hand.STABLE, recurrences=(by_hand.BACH, found))
    (rule,) = failures(report, Policy(max_lambda_found=1)).values()
    assert (rule.got, rule.where) == ("‖J‖ ≥ 1.30 found", "rnn[0]")


@pytest.mark.parametrize(
    ("proved", "measured", "synthetic", "evidence", "passes"),
    [
        (53, None, False, "proved", True),
        (65, 31, False, "proved", False),
        (65, 31, False, "measured", True),
        (65, 31, True, "measured", False),
        (None, 31, True, "any", True),
        (None, 65, True, "any", False),
        (None, None, False, "any", False),
    ],
)
def test_a_depth_counts_only_on_the_evidence_asked_for(
    proved, measured, synthetic, evidence, passes
):
    seen = None if measured is None else by_hand.measured(measured, synthetic=synthetic)
    report = replace(by_hand.STABLE, depth=Depth(1e-3, proved, seen))
    found = failures(report, Policy(max_depth=64, evidence=evidence))
    assert ("max-depth" not in found) == passes


def test_a_failed_depth_names_the_recurrence_that_needs_most():
    rule = failures(by_hand.MANY, Policy(max_depth=64, evidence="any"))["max-depth"]
    assert rule.got == "no depth: neither proved nor measured"
    assert rule.where == by_hand.MANY.recurrences[5].label  # longer than the data show


def test_the_share_that_exceeds_is_of_the_users_data():
    share = by_hand.STABLE.depth.measured.exceed_probability
    assert failures(by_hand.STABLE, Policy(max_exceed=share)) == {}
    assert "max-exceed" in failures(by_hand.STABLE, Policy(max_exceed=share / 2))
    synthetic = failures(by_hand.UNDECIDED, Policy(max_exceed=0.9, require="any"))
    assert synthetic["max-exceed"].got.startswith("measured on synthetic inputs")
    assert failures(by_hand.UNDECIDED, Policy(max_exceed=0.9, require="any", evidence="any")) == {}


# ------------------------------------------------------------------- findings, allowances


WARNED = replace(
    by_hand.STABLE, findings=(Finding("RA121", "warning", "rnn", "tanh is assumed", "say so"),)
)


@pytest.mark.parametrize(
    ("fail_on", "fails"), [("error", False), ("warning", True), ("note", True), ("never", False)]
)
def test_findings_fail_by_severity(fail_on, fails):
    assert ("finding RA121" in failures(WARNED, Policy(fail_on=fail_on))) == fails


def test_an_allowance_holds_up_to_its_day_and_then_says_so():
    policy = Policy(fail_on="warning", allow=(Allowance("RA121", TODAY, "ours"),))
    assert failures(WARNED, policy) == {}
    gone = Policy(allow=(Allowance("RA121", date(2026, 12, 1), "ours"),))
    rule = failures(WARNED, gone)["finding RA121"]
    assert rule.got == "tanh is assumed (the allowance has expired: it held until 2026-12-01: ours)"
    assert rule.id == "RA236"
    assert failures(by_hand.STABLE, gone) == {}


# ------------------------------------------------------------------------------ baseline


def test_a_model_is_no_worse_than_itself():
    for report in by_hand.REPORTS.values():
        policy = Policy(require="any", allow_skipped=True, tolerance=0, fail_on="never")
        assert failures(report, policy, baseline=(report,)) == {}


def test_only_what_is_worse_by_more_than_the_tolerance_fails():
    policy = Policy(require="any", tolerance=0.05)
    bound = by_hand.BACH.upper
    for factor, fails in ((1.04, False), (1.06, True), (0.5, False)):
        upper = UpperBound(bound.value * factor, bound.norm, bound.method, bound.domain)
        new = replace(by_hand.STABLE, recurrences=(replace(by_hand.BACH, upper=upper),))
        assert bool(failures(new, policy, baseline=(by_hand.STABLE,))) == fails
    for k, fails in ((55, False), (56, True), (None, True)):
        new = replace(by_hand.STABLE, depth=replace(by_hand.STABLE.depth, proved=k))
        found = set(failures(new, policy, baseline=(by_hand.STABLE,)))
        assert found == ({"baseline k proved"} if fails else set())


def test_other_recurrences_findings_and_verdicts_are_regressions():
    policy = Policy(require="any")
    new = replace(WARNED, verdict="undecided", recurrences=(replace(by_hand.BACH, name="gru"),))
    found = failures(new, policy, baseline=(by_hand.STABLE,))
    assert set(found) == {"baseline verdict", "baseline recurrences", "baseline RA121"}
    assert found["baseline recurrences"].got == "rnn[0] vanished; gru[0] appeared"
    allowed = replace(policy, allow=(Allowance("RA121", TODAY, "ours"),))
    assert "baseline RA121" not in failures(new, allowed, baseline=(by_hand.STABLE,))


def test_a_baseline_of_another_question_or_without_the_model_fails():
    asked = replace(by_hand.STABLE, eps=1e-2)
    found = failures(asked, Policy(require="any"), baseline=(by_hand.STABLE,))
    assert found["baseline settings"].wanted == "ε = 1e-3"
    assert found["baseline settings"].got == "ε = 1e-2"
    others = (by_hand.UNDECIDED, by_hand.LONGER)
    assert set(failures(by_hand.STABLE, baseline=others)) == {"baseline"}


# ------------------------------------------------------------------------------- program


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Write five files: three that are audited, two of which are stable, and two that are not."""
    folder = tmp_path_factory.mktemp("models")
    for name, gain in (("calm", 0.2), ("quiet", 0.3), ("loud", 3.0)):
        torch.manual_seed(0)
        rnn = torch.nn.RNN(1, 2)
        with torch.no_grad():
            rnn.weight_hh_l0.copy_(gain * torch.eye(2))
        torch.save(rnn.state_dict(), folder / f"{name}.pt")
    (folder / "corrupt.pt").write_bytes((folder / "calm.pt").read_bytes()[:600])
    (folder / "empty.onnx").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def inside(models, cache_folder, monkeypatch):
    """Run in the folder of the models, with a cache that its tests share."""
    monkeypatch.chdir(models)
    monkeypatch.setenv("RNNAUDIT_CACHE_DIR", str(cache_folder))
    return sorted(path.name for path in models.iterdir() if path.suffix in (".pt", ".onnx"))


@pytest.mark.parametrize("form", ["text", "json", "markdown", "junit", "sarif"])
def test_one_bad_file_hides_no_other(inside, capsys, form):
    code, out, err = run(capsys, "gate", "*.pt", "empty.onnx", "--eps", "0.1", "--format", form)
    assert (code, err) == (3, "")
    assert all(name in out for name in inside)
    assert run(capsys, "gate", *inside, "--eps", "0.1", "--format", form)[0] == 3
    audited = [name for name in inside if name.startswith(("calm", "quiet", "loud"))]
    assert run(capsys, "gate", *audited, "--eps", "0.1", "--format", form)[0] == 1
    assert run(capsys, "gate", "calm.pt", "--eps", "0.1", "--format", form)[0] == 0
    assert run(capsys, "gate", "calm.pt", "--eps", "0", "--format", form)[0] == 2


def test_the_json_of_a_gate_lists_every_file_in_order(inside, capsys):
    _, out, _ = run(capsys, "gate", *inside, "--eps", "0.1", "--format", "json")
    found = json.loads(out)
    jsonschema.validate(found, gate_schema())
    assert [r["model"]["path"] for r in found["reports"]] == inside
    assert (found["passed"], found["failed"], found["refused"]) == (False, 1, 2)


def test_a_gate_sets_as_many_sequences_aside_as_inspect_does(inside, models, capsys):
    # One sequence in sixty is a hundred times as large, and errs by as much more at each depth.
    x = np.random.default_rng(0).choice([-0.01, 0.01], (60, 64, 1))
    x[7] *= 100
    np.save(models / "x.npy", x)
    cell = torch.nn.RNN(1, 2, bias=False)
    torch.nn.init.eye_(cell.weight_hh_l0).data.mul_(0.3)
    torch.save(cell.state_dict(), models / "pure.weights")
    asked = ("pure.weights", "--eps", "1e-4", "--data", "x.npy", "--input-range=-1:1")
    run(capsys, "gate", *asked, "--require", "any", "--format", "json", "-o", "wide.json")
    (wide,) = json.loads((models / "wide.json").read_text())["reports"]
    asked += ("--exceed", "0.1")
    alone = json.loads(run(capsys, "inspect", *asked, "--format", "json")[1])
    (gated,) = json.loads(run(capsys, "gate", *asked, "--format", "json")[1])["reports"]
    assert gated["depth"] == alone["depth"]
    assert gated["settings"]["exceed"] == alone["settings"]["exceed"] == 0.1
    assert gated["depth"]["measured"]["k"] < wide["depth"]["measured"]["k"]
    code, out, _ = run(capsys, "gate", *asked, "--baseline", "wide.json")
    assert code == 1
    assert "wanted  exceed = not given" in out
    assert "got     exceed = 0.1" in out


def test_paths_inside_the_working_folder_are_relative(inside, models, capsys):
    absolute = str(models / "calm.pt")
    for form in ("text", "json", "markdown", "junit", "sarif"):
        _, out, _ = run(capsys, "gate", absolute, "--eps", "0.1", "--format", form)
        assert "calm.pt" in out
        assert str(models) not in out


def test_a_baseline_is_written_by_the_gate_and_read_by_it(inside, models, capsys):
    gate = ("gate", "calm.pt", "loud.pt", "--eps", "0.1")
    wrote = run(capsys, *gate, "--require", "any", "--format", "json", "-o", "base.json")
    assert wrote == (0, "", "")
    assert run(capsys, *gate, "--baseline", "base.json")[0] == 0
    base = json.loads((models / "base.json").read_text())
    base["reports"][0]["recurrences"][0]["lambda"]["upper"]["value"] /= 2
    (models / "base.json").write_text(json.dumps(base))
    code, out, _ = run(capsys, *gate, "--baseline", "base.json")
    assert code == 1
    assert "baseline λ proved fails" in out
    code, out, _ = run(capsys, "gate", "quiet.pt", *gate[1:], "--baseline", "base.json")
    assert (code, "got     it is not there" in out) == (1, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--allow", "RA121"], "--allow must be ID:DATE:REASON, such as RA121:2027-06-30:known"),
        (["--allow", "RA121:soon:x"], "--allow must be ID:DATE:REASON"),
        (["--allow", "RA121:2027-06-30: "], "--allow must be ID:DATE:REASON"),
        (["--allow", "RA999:2027-06-30:x"], "rnnaudit explain lists the ids"),
        (["--baseline", "none.json"], "--baseline must be a file that can be read, got none.json"),
        (
            ["--baseline", "calm.pt"],
            "--baseline must be a JSON report of rnnaudit, got calm.pt: it is no text; write one",
        ),
        (["--max-lambda", "-1"], "--max-lambda must be a finite number, 0 or more, got -1"),
        (["--max-depth", "0"], "--max-depth must be at least 1, got 0"),
        (["--max-exceed", "2"], "--max-exceed must lie between 0 and 1, got 2"),
        (["--tolerance", "nan"], "--tolerance must be a finite number, 0 or more, got nan"),
        (["--evidence", "hope"], "--evidence must be one of proved, measured, any, got 'hope'; "),
        (["-o", "calm.pt"], "the output must not be what is read, got calm.pt for both"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(inside, capsys, options, words):
    code, out, err = run(capsys, "gate", "calm.pt", *options)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], "stable"),
        (["--evidence", "measured"], "not-unstable"),
        (["--baseline", "base.json"], "any"),
        (["--baseline", "base.json", "--require", "stable"], "stable"),
    ],
)
def test_what_is_required_follows_from_what_was_asked(inside, capsys, monkeypatch, options, wanted):
    Path("base.json").write_text(JsonRenderer().render(by_hand.STABLE))
    seen = []
    real = policy.judge
    monkeypatch.setattr(
        policy, "judge", lambda r, p, **more: seen.append(p.require) or real(r, p, **more)
    )
    run(capsys, "gate", "calm.pt", "--eps", "0.1", *options)
    assert seen == [wanted]


@pytest.mark.parametrize("form", ["markdown", "junit", "sarif"])
def test_a_refusal_of_one_model_is_told_in_its_format(inside, capsys, form):
    code, out, err = run(capsys, "inspect", "corrupt.pt", "--format", form)
    assert code == 3
    assert "corrupt.pt" in out
    assert "RA10" in out
    assert err.startswith("error[RA10")
