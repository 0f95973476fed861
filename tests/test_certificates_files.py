"""Proof files: every method writes one, an independent checker accepts it, and no change of it."""

import ast
import base64
import copy
import json
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import rnnaudit
from rnnaudit.cells import run_stack
from rnnaudit.certificates import (
    CertificateError,
    Domain,
    certify,
    certify_stack,
    check,
    check_file,
    document,
    stack_document,
)
from rnnaudit.certificates.checker import METHODS, pack, unpack, words
from rnnaudit.errors import LoadError
from rnnaudit.model import Activation, ElmanCell, Model, Readout
from rnnaudit.reports.json import schema
from tests.program import run

from .attacks import REPEAT, inputs, truncation_error
from .strategies import generator, random_cell, random_stack, recurrence, seeds
from .test_certificates_stack import restarted, stacks

DOMAIN = Domain(-0.4, 0.4, "|x| ≤ 0.4")

WRITERS = {
    "spectral norm": ("elman", 0.2, {}),
    "numerical radius": ("elman", 0.4, {}),
    "circle criterion": ("lstm", 0.3, {}),
    "linear": ("elman", 0.5, {"activation": Activation("affine")}),
    "comparison matrix": ("lstm", 0.02, {}),
    "average form": ("gru", 0.2, {}),
    "Miller–Hardt": ("lstm", 0.02, {}),
    "δISS (Terzi et al.)": ("lstm", 0.02, {}),
    "δISS (Bonassi et al.)": ("gru", 0.02, {"reset_after": False}),
    "δISS (Bonassi et al.), reset after": ("gru", 0.02, {}),
}
"""A cell that each method proves."""


@cache
def written(method, hidden=3):
    """Return a recurrence, and the document of what this method alone proves of it."""
    kind, gain, options = WRITERS[method]
    r = recurrence(random_cell(3, kind, hidden, 2, gain, **options))
    proofs = certify(r, DOMAIN)
    alone = tuple(c for c in proofs.certificates if c.method == method)
    text = document(r, DOMAIN, replace(proofs, certificates=alone), epsilons=(0.1,))
    return r, json.loads(json.dumps(text)), alone


def test_every_method_has_a_writer():
    assert {m for methods in METHODS.values() for m in methods} == set(WRITERS)


@pytest.mark.parametrize("method", WRITERS)
def test_what_a_method_proves_is_written_and_accepted(method):
    r, text, (certificate,) = written(method)
    checked = check(text, r)
    assert checked.method == method
    assert checked.rate <= certificate.bound.value * (1 + 1e-7) + 1e-11
    for claim in checked.claims:
        assert claim.k <= certificate.depth(claim.eps, None, claim.norm) + 1


def leaves(value, path=()):
    """Yield the path of every number and word of a document, entries of arrays among them."""
    if isinstance(value, dict) and "float64" in value:
        yield from ((*path, i) for i in range(int(np.prod(value["shape"]))))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path


def at(document, path):
    for key in path:
        document = document[key]
    return document


def changed(document, path, change):
    """Return a copy in which one number is changed."""
    new = copy.deepcopy(document)
    parent = at(new, path[:-1])
    if isinstance(parent, dict) and "float64" in parent:
        array = unpack(parent, tuple(parent["shape"])).copy()
        array.flat[path[-1]] = change(array.flat[path[-1]])
        at(new, path[:-2])[path[-2]] = pack(array)
    else:
        parent[path[-1]] = change(parent[path[-1]])
    return new


STATEMENT = ("claims", "domain", "rate", "fingerprint", "method", "form", "schema")
"""The parts of a document that say what is proved; all others say why."""

CHANGES = (lambda v: v * 0.9, lambda v: -v, lambda v: v * 1.1, lambda v: v + 1)


@pytest.mark.parametrize("method", WRITERS)
def test_no_number_can_be_changed_into_a_false_statement(method):
    r, text, _ = written(method, hidden=2)
    rng, claimed = generator(0), check(text, r).claims
    for path in leaves(text):
        for change in CHANGES[: 1 + REPEAT]:
            value = at(text, path[:-1])
            words_ = isinstance(value, dict) and isinstance(value.get(path[-1]), str)
            alter = (lambda v: v + "x") if words_ else change
            new = changed(text, path, alter)
            try:
                checked = check(new, r)
            except CertificateError:
                continue
            # Accepted: then what is stated is proved, whatever the reasons were before.
            if path[0] not in STATEMENT or path[-1] == "name":
                assert checked.claims == claimed
                continue
            assert path[0] in ("claims", "domain", "rate"), path
            if path[0] == "rate":
                assert new["rate"] > text["rate"]
            x = new["domain"]
            lo, hi = (torch.tensor(unpack(x[end], (2,))) for end in ("lo", "hi"))
            domain = Domain(lo, hi)
            for claim in checked.claims:
                if claim.k <= 60:
                    error = truncation_error(
                        r, domain, claim.k, rng, climbs=3, count=4, norm=claim.norm
                    )
                    assert error <= claim.eps


@pytest.mark.parametrize("method", WRITERS)
@pytest.mark.parametrize(
    "junk", [None, True, "1", [], {}, 10**400, -1, 1e308], ids=lambda v: str(v)[:8]
)
def test_entries_of_other_kinds_are_refused_in_words(method, junk):
    r, text, _ = written(method)
    for key in text:
        if key in ("recurrence", "cell", "norm", "balls") or (key, junk) == ("claims", []):
            continue
        with pytest.raises(CertificateError):
            check({**text, key: junk}, r)
    if "balls" in text and junk is not None:
        with pytest.raises(CertificateError):
            check({**text, "balls": junk}, r)


# ------------------------------------------------------------------------ stacks, readouts


def of_stack(stack, domain=DOMAIN, **options):
    part = stack_document(stack, certify_stack(stack, domain), **options)
    file = {"schema": "rnnaudit.proof/1", "stacks": [part] if part["recurrences"] else []}
    return json.loads(json.dumps(file))


def model(stack):
    return Model(Path("m.pt"), "PyTorch state_dict", "0" * 64, (stack,), whole=True)


@given(stack=stacks, seed=seeds)
@settings(max_examples=8 * REPEAT, deadline=None)
def test_no_input_beats_what_a_file_claims_of_a_stack(stack, seed):
    text = of_stack(stack)
    if not text["stacks"]:
        with pytest.raises(CertificateError, match="holds no proof"):
            check_file(text, model(stack))
        return
    (checked,) = check_file(text, model(stack))
    assert checked.valid
    rng = generator(seed)
    for claim in checked.claims[:6]:
        k = claim.k
        if not 0 < k <= 60:
            continue
        x = inputs(rng, DOMAIN, stack.input_size, 12, k + 12)
        if stack.causal:
            error = restarted(stack, x, k) - run_stack(stack, x)[:, k - 1 :]
        else:
            depths = {r.label: k for r in stack.recurrences()}
            error = run_stack(stack, x, depths) - run_stack(stack, x)
        size = error.abs().amax() if claim.norm == "max" else error.norm(dim=-1).max()
        assert float(size) <= claim.eps


@pytest.mark.parametrize("kind", ["elman", "gru", "lstm"])
def test_a_stack_proves_the_same_depths_as_the_search(kind):
    stack = random_stack(1, kind, 4, 2, layers=2, readout=3, gain=0.2)
    (checked,) = check_file(of_stack(stack), model(stack))
    proof = certify_stack(stack, DOMAIN)
    for claim in checked.claims:
        assert claim.k <= proof.depth(claim.eps, claim.norm) + 1


def test_what_a_stack_claims_is_held_to_its_proofs():
    stack = random_stack(1, "elman", 4, 2, layers=2, readout=2, gain=0.2)
    text = of_stack(stack)
    part = text["stacks"][0]

    def refused(**changes):
        (checked,) = check_file({**text, "stacks": [{**part, **changes}]}, model(stack))
        assert not checked.valid
        return checked.reason

    claims = [{**c, "k": c["k"] - 1} for c in part["claims"]]
    assert "claims k = " in refused(claims=claims)
    assert "no proof of rnn[1]" in refused(recurrences=part["recurrences"][:1])
    assert "fingerprint differs" in refused(readout="")
    first, second = part["recurrences"]
    narrow = copy.deepcopy(second)
    narrow["domain"]["lo"] = pack(0.01 * unpack(second["domain"]["lo"], (4,)))
    narrow["domain"]["hi"] = pack(0.01 * unpack(second["domain"]["hi"], (4,)))
    assert "does not hold what the layer below gives" in refused(recurrences=[first, narrow])
    other = replace(stack, readout=Readout("head", 2 * stack.readout.A, stack.readout.b))
    (checked,) = check_file(text, model(other))
    assert "fingerprint differs" in checked.reason


def test_what_is_read_through_free_slopes_must_exceed_the_readout():
    stack = random_stack(1, "elman", 4, 2, readout=2, gain=0.4)
    text = of_stack(stack, Domain(-10, 10))  # units can saturate, so that slopes can be 0
    part = text["stacks"][0]
    shape = tuple(part["through"]["shape"])
    part["through"] = pack(0.5 * unpack(part["through"], shape))
    (checked,) = check_file(text, model(stack))
    assert "must exceed the readout" in checked.reason


def test_a_file_of_another_kind_or_of_other_stacks_is_refused():
    stack = random_stack(1, "elman", 3, 2, gain=0.2)
    text = of_stack(stack)
    for change, reason in (
        ({"schema": "other"}, "has the schema"),
        ({"stacks": []}, "holds no proof"),
        ({"stacks": [1]}, "a stack is an object"),
        ({"stacks": text["stacks"] * 2}, "or twice"),
        ({"stacks": [{**text["stacks"][0], "name": "other"}]}, "speaks of 'other'"),
    ):
        with pytest.raises(CertificateError, match=reason):
            check_file({**text, **change}, model(stack))
    twice = copy.deepcopy(text)
    twice["stacks"][0]["recurrences"] *= 2
    (checked,) = check_file(twice, model(stack))
    assert "comes twice" in checked.entries[1].reason


def test_a_domain_is_named_by_its_numbers_and_not_by_the_file():
    assert words((np.array([-1.0, -1.0]), np.array([1.0, 1.0]))) == "|x| ≤ 1"
    assert words((np.zeros(2), np.ones(2))) == "0 ≤ x ≤ 1"
    assert words((np.array([0.0, -2.0]), np.ones(2))) == (
        "a range for each of 2 inputs, all in -2 ≤ x ≤ 1"
    )
    assert words((np.array([-np.inf]), np.array([np.inf]))) == "any input"


# ------------------------------------------------------------------------- the checker


CHECKER = sorted((Path(rnnaudit.__file__).parent / "certificates").glob("checker*.py"))


@pytest.mark.parametrize("path", CHECKER, ids=lambda path: path.stem)
def test_the_checker_shares_no_code_with_the_search(path):
    own = {f"rnnaudit.certificates.{p.stem}" for p in CHECKER}
    allowed = own | {"rnnaudit.model", "rnnaudit.errors", "rnnaudit.results", "numpy"}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            standard = name.split(".")[0] not in ("rnnaudit", "torch", "scipy", "onnx")
            assert name in allowed or name.startswith("numpy") or standard, name


# ------------------------------------------------------------------------- the commands


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Save an nn.RNN of which a proof exists, and work beside it."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.save(torch.nn.RNN(4, 6).state_dict(), "m.pt")
    return tmp_path


def test_a_model_is_certified_and_checked(saved, capsys):
    code, out, _ = run(capsys, "certify", "m.pt", "-o", "p.json")
    assert code == 0
    assert "λ         ≤ " in out
    assert "method    numerical radius, in a weighted 2-norm" in out
    assert "domain    |x| ≤ 1" in out
    assert "PROVED: 1 of 1 recurrence; end to end k = " in out
    assert "rnnaudit check p.json m.pt" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    code, again, _ = run(capsys, "check", "p.json", "m.pt")
    assert code == 0
    assert "VALID: 1 of 1 recurrence proved again from the weights" in again
    table = [line for line in out.splitlines() if line.startswith("  end to end")]
    assert table
    assert table[0] in again


def test_a_proof_finds_its_recurrence_by_a_name_of_any_length():
    """Names in a graph have no longest length, and may differ in their last letter only."""
    stack = replace(random_stack(1, "elman", 3, 2, gain=0.2), name="n" * 300)
    named = tuple(
        replace(layer, recurrences=tuple(replace(r, name=stack.name) for r in layer.recurrences))
        for layer in stack.layers
    )
    stack = replace(stack, layers=named)
    (checked,) = check_file(of_stack(stack), model(stack))
    assert checked.valid, checked.entries
    text = copy.deepcopy(of_stack(stack))
    text["stacks"][0]["recurrences"][0]["recurrence"] = "m" * 300
    (checked,) = check_file(text, model(stack))
    assert checked.entries[0].recurrence == "m" * 200


@pytest.mark.parametrize("command", [("certify", "m.pt"), ("check", "m.proof.json", "m.pt")])
def test_json_of_both_commands_keeps_the_schema(saved, capsys, command):
    import jsonschema

    run(capsys, "certify", "m.pt")
    code, out, _ = run(capsys, *command, "--format", "json")
    report = json.loads(out)
    jsonschema.validate(report, schema())
    assert code == 0
    assert report["proof_file"]["valid"]
    assert report["depth"]["proved"] == report["recurrences"][0]["depth"]["proved"]


def test_a_changed_file_and_another_model_exit_with_1(saved, capsys):
    run(capsys, "certify", "m.pt", "-o", "p.json")
    text = json.loads(Path("p.json").read_text())
    text["stacks"][0]["recurrences"][0]["rate"] *= 0.9
    Path("changed.json").write_text(json.dumps(text))
    code, out, err = run(capsys, "check", "changed.json", "m.pt")
    assert (code, err) == (1, "")
    assert "REFUSED" in out
    assert "the metric does not prove the rate" in out
    torch.save(torch.nn.RNN(4, 6).state_dict(), "other.pt")
    code, out, _ = run(capsys, "check", "p.json", "other.pt")
    assert code == 1
    assert "the fingerprint of its weights differs" in " ".join(out.split())


def test_what_is_no_proof_file_exits_with_3(saved, capsys):
    nested = "[" * 100_000
    for name, raw in {
        "empty": "",
        "torn": '{"schema": "rnnaudit.proof/1", "stacks": [',
        "nan": '{"schema": "rnnaudit.proof/1", "stacks": NaN}',
        "deep": nested,
        "report": '{"schema": "rnnaudit.report/1"}',
        "list": "[]",
    }.items():
        Path(name).write_text(raw)
        code, out, err = run(capsys, "check", name, "m.pt")
        assert (code, out) == (3, ""), name
        assert err.startswith("error[RA132]: a proof file "), err
        assert err.endswith("; give a file that `rnnaudit certify` wrote, before the model\n"), err
    code, out, err = run(capsys, "check", "m.pt", "p.json")
    assert (code, len(err.splitlines())) == (3, 1)
    code, out, err = run(capsys, "check", "m.pt", "m.pt")
    assert "a proof file is JSON, and m.pt is not; give a file" in err
    code, out, err = run(capsys, "check", "absent", "m.pt", "--format", "json")
    assert code == 3
    assert json.loads(out)["error"]["id"] == "RA132"
    assert err.endswith("got absent: No such file or directory; check the path\n")
    with pytest.raises(LoadError, match="a proof file must be readable"):
        rnnaudit.check(saved, "m.pt")


def test_a_file_too_large_is_not_read(saved, capsys, monkeypatch):
    monkeypatch.setattr("rnnaudit.checking.LARGEST", 10)
    Path("large").write_text("x" * 11)
    code, _, err = run(capsys, "check", "large", "m.pt")
    assert code == 3
    assert "at most" in err


def test_wrong_usage_exits_with_2(saved, capsys):
    assert run(capsys, "check", "p.json")[0] == 2
    assert run(capsys, "certify", "m.pt", "--eps", "0")[0] == 2
    assert run(capsys, "certify", "m.pt", "-o", "absent/p.json")[0] == 2
    assert run(capsys, "certify", "m.pt", "-o", "m.pt")[0] == 2
    assert run(capsys, "certify", "m.pt", "--format", "html")[0] == 2


def test_nothing_proved_writes_nothing_and_exits_with_1(saved, capsys):
    lstm = torch.nn.LSTM(4, 6)
    with torch.no_grad():
        lstm.bias_hh_l0[6:12] = 9.0
    torch.save(lstm.state_dict(), "lstm.pt")
    code, out, _ = run(capsys, "certify", "lstm.pt", "-o", "p.json")
    assert code == 1
    assert "no proof: forget gate can reach 0.9999" in out
    assert "nothing was written" in out
    assert "next      rnnaudit inspect lstm.pt --eps 1e-3\n" in out
    assert "a narrower --input-range may leave a domain that is proved" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert not Path("p.json").exists()
    Path("lstm.pt").rename("my lstm.pt")
    np.save("x.npy", np.ones((9, 1, 4)))
    options = ["--eps", "0.1", "--data", "x.npy", "--time-axis", "0"]
    _, out, _ = run(capsys, "certify", "my lstm.pt", *options)
    next_ = shlex.split(out[out.index("next") :].replace("\\\n", " "))
    assert next_[1:6] == ["rnnaudit", "inspect", "my lstm.pt", "--eps", "1e-1"]
    assert next_[6:10] == options[2:]


@pytest.mark.parametrize("bounds", [None, (-0.5, 0.25)])
def test_no_inputs_are_made_up_where_none_decides_the_domain(saved, monkeypatch, bounds):
    def refuse(*_, **__):
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(rnnaudit.api, "observe", refuse)
        report = rnnaudit.certify("m.pt", "p.json", input_range=bounds)
    domain = "|x| ≤ 1" if bounds is None else "-0.5 ≤ x ≤ 0.25"
    assert report.recurrences[0].upper.domain == domain
    assert rnnaudit.check("p.json", "m.pt").proof_file.valid


def test_the_inputs_that_gave_the_domain_are_named(saved, capsys):
    np.save("x.npy", np.ones((5, 9, 4)))
    _, out, _ = run(capsys, "certify", "m.pt", "-o", "p.json", "--data", "x.npy")
    assert "inputs    5 sequences of 9 steps from x.npy\n" in out
    _, out, _ = run(capsys, "certify", "m.pt", "-o", "p.json")
    assert "inputs" not in out


def test_what_is_not_covered_is_named(saved, capsys):
    rnn, lstm = torch.nn.RNN(4, 6), torch.nn.LSTM(4, 6)
    with torch.no_grad():
        lstm.bias_hh_l0[6:12] = 9.0
    both = torch.nn.ModuleDict({"a": rnn, "b": lstm})
    torch.save(both.state_dict(), "two.pt")
    code, out, _ = run(capsys, "certify", "two.pt", "-o", "p.json")
    assert code == 0
    assert "no proof: forget gate can reach 0.9999" in out
    assert "PROVED: 1 of 2 recurrences" in out
    code, out, _ = run(capsys, "check", "p.json", "two.pt")
    assert code == 0
    assert "the file holds no proof of it" in out


def test_float32_and_float16_weights_are_certified_as_they_are(saved):
    state = torch.nn.RNN(4, 6).state_dict()
    torch.save({name: w.half() for name, w in state.items()}, "half.pt")
    rnnaudit.certify("half.pt", "p.json")
    assert rnnaudit.check("p.json", "half.pt").proof_file.valid
    torch.save({name: w.half().float() for name, w in state.items()}, "single.pt")
    assert rnnaudit.check("p.json", "single.pt").proof_file.valid  # the same numbers
    torch.save(state, "single.pt")
    assert not rnnaudit.check("p.json", "single.pt").proof_file.valid


def test_a_base64_that_hides_another_length_is_refused():
    one = pack(np.ones(3))
    for array in (
        {**one, "shape": [4]},
        {**one, "shape": [10**18]},
        {**one, "float64": base64.b64encode(b"1234567").decode()},
        {**one, "float64": "é"},
        {"shape": [3]},
        None,
        [1.0, 2.0, 3.0],
    ):
        with pytest.raises(CertificateError):
            unpack(array, (3,))


def test_a_computed_initial_state_is_not_covered():
    r, text, _ = written("numerical radius")
    computed = replace(r, initial=replace(r.initial, source="computed"))
    with pytest.raises(CertificateError, match="computes its initial state"):
        check(text, computed)


def test_a_tail_is_for_linear_cells_only():
    r, text, _ = written("numerical radius")
    assert isinstance(r.cell, ElmanCell)
    with pytest.raises(CertificateError, match="for linear cells only"):
        check({**text, "form": "linear", "method": "linear"}, r)
