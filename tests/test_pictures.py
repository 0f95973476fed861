"""What charts show is what the cells do: gates by their formulas, eigenvalues by autodiff."""

import json
from dataclasses import replace

import jsonschema
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rnnaudit import api, cells, examine
from rnnaudit.cli import app
from rnnaudit.estimators.pictures import pictures
from rnnaudit.model import Activation, Layer, Stack
from rnnaudit.reports import html
from rnnaudit.reports.json import JsonRenderer, schema
from tests import strategies
from tests.references import close
from tests.strategies import random_cell, random_inputs, random_states, recurrence

pytestmark = pytest.mark.usefixtures("one_thread")


def states_before(cell, x):
    """Return h before each step [T, H] as PyTorch's own layer runs x [T, I] from zero."""
    layer = strategies.torch_module(Stack("s", (Layer((recurrence(cell),)),)))
    after = layer(x[None])[0][0].detach()
    return torch.cat([torch.zeros_like(after[:1]), after[:-1]])


@given(
    cell=st.builds(random_cell, strategies.seeds, st.just("gru"), gain=st.floats(0.1, 4)),
    seed=strategies.seeds,
)
@settings(max_examples=25, deadline=None)
def test_a_gru_s_gates_over_time_are_those_of_its_formulas(cell, seed):
    x = random_inputs(seed, cell, 7)
    h = states_before(cell, x)
    a_r, a_z, _ = (x @ cell.W.T + cell.b_input + h @ cell.U.T + cell.b_recurrent).chunk(3, -1)
    found = {gate.name: gate for gate in pictures(recurrence(cell), x[None]).gates}
    assert list(found) == ["update z", "reset r"]
    for name, pre in (("update z", a_z), ("reset r", a_r)):
        middle = pre.sigmoid().quantile(0.5, dim=-1)
        close(torch.tensor(found[name].p50, dtype=torch.float64), middle, 1e-9)


@given(
    cell=st.builds(random_cell, strategies.seeds, st.just("lstm"), gain=st.floats(0.1, 4)),
    seed=strategies.seeds,
)
@settings(max_examples=25, deadline=None)
def test_an_lstm_s_gates_over_time_are_those_of_its_formulas(cell, seed):
    x = random_inputs(seed, cell, 7)
    h = states_before(cell, x)
    a_i, a_f, _, a_o = (x @ cell.W.T + cell.b + h @ cell.U.T).chunk(4, -1)
    found = {gate.name: gate for gate in pictures(recurrence(cell), x[None]).gates}
    assert list(found) == ["forget f", "input i", "output o"]
    for name, pre in (("forget f", a_f), ("input i", a_i), ("output o", a_o)):
        lowest = pre.sigmoid().quantile(0.05, dim=-1)
        close(torch.tensor(found[name].p5, dtype=torch.float64), lowest, 1e-9)


@given(cell=strategies.cells(("lstm",)), seed=strategies.seeds)
@settings(max_examples=40, deadline=None)
def test_gates_are_shares_whatever_the_options(cell, seed):
    """c' = f c + i g, where |g| ≤ 1 for a tanh: what f does not carry over, i bounds."""
    cell = replace(cell, candidate=Activation("tanh"))
    s, x = random_states(seed, cell, 4), random_inputs(seed, cell, 4)
    gates = cells.gate_values(cell, s, cells.drive(cell, x))
    c, after = (v[:, cell.hidden_size :] for v in (s, cells.step(cell, s, x)))
    added = after - gates["forget f"] * c
    assert bool((added.abs() <= gates["input i"].abs() + 1e-12).all())
    if cell.input_forget and cell.gate.name == "sigmoid":
        close(gates["forget f"] + gates["input i"], torch.ones_like(c), 1e-12)


def test_quantiles_are_in_order_and_a_reverse_cell_reads_the_end_first():
    cell = random_cell(3, "gru", hidden=9)
    x = random_inputs(4, cell, 1, 12)
    forward = pictures(recurrence(cell), x.flip(1)).gates
    assert pictures(recurrence(cell, reverse=True), x).gates == forward
    for gate in forward:
        for levels in zip(gate.p5, gate.p25, gate.p50, gate.p75, gate.p95, strict=True):
            assert list(levels) == sorted(levels)
            assert 0 <= levels[0] <= levels[-1] <= 1


@pytest.mark.parametrize("kind", strategies.KINDS)
def test_eigenvalues_are_those_of_autodiff_s_jacobian(kind):
    cell = random_cell(5, kind, hidden=6, gain=2.0)
    x = random_inputs(6, cell, 1, 1)
    start = random_states(7, cell)
    J = torch.func.jacrev(lambda s: cells.step(cell, s, x[0, 0]))(start)
    found = pictures(recurrence(cell, start), x).eigenvalues
    assert found.states == 1
    values = torch.tensor([complex(*value) for value in found.values])
    wanted = torch.linalg.eigvals(J)
    assert len(values) == cell.state_size
    distances = (values[:, None] - wanted[None]).abs()
    assert float(distances.amin(0).max()) < 1e-7
    assert float(distances.amin(1).max()) < 1e-7
    assert values.abs().tolist() == sorted(values.abs().tolist(), reverse=True)


def test_a_linear_cell_has_the_same_eigenvalues_everywhere():
    cell = random_cell(8, "elman", hidden=4, activation=Activation("affine", 1.0, 0.0), gain=0.5)
    found = pictures(recurrence(cell), random_inputs(9, cell, 3, 20)).eigenvalues
    radii = torch.linalg.eigvals(cell.W).abs().sort(descending=True).values
    assert found.states == 16
    shown = torch.tensor([abs(complex(*value)) for value in found.values], dtype=torch.float64)
    close(shown, radii.repeat_interleave(16), 1e-9)


def test_a_cell_without_gates_has_none_and_a_wide_state_no_eigenvalues(monkeypatch):
    cell = random_cell(10, "elman")
    monkeypatch.setitem(pictures.__globals__, "_WIDEST", cell.state_size - 1)
    found = pictures(recurrence(cell), random_inputs(11, cell, 2, 5))
    assert found.gates == ()
    assert found.eigenvalues is None


# ------------------------------------------------------------------- through to the page


@pytest.fixture
def brief_search(monkeypatch):
    """Look for counterexamples of few steps only: pictures do not depend on them."""
    monkeypatch.setattr(examine, "HORIZON", 4)


def saved(tmp_path, kind):
    layer = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM, "elman": torch.nn.RNN}[kind]
    torch.manual_seed(0)
    torch.save(layer(3, 2).state_dict(), tmp_path / f"{kind}.pt")
    numpy.save(tmp_path / "data.npy", torch.randn(3, 40, 3).numpy())
    return tmp_path / f"{kind}.pt"


def test_pictures_are_computed_only_when_asked_and_validate(tmp_path, brief_search):
    path = saved(tmp_path, "lstm")
    plain, asked = (api.audit(path, data=tmp_path / "data.npy", pictures=p) for p in (False, True))
    assert plain.recurrences[0].pictures is None
    assert "pictures" not in json.loads(JsonRenderer().render(plain))["recurrences"][0]
    found = json.loads(JsonRenderer().render(asked))
    jsonschema.Draft202012Validator(schema()).validate(found)
    shown = found["recurrences"][0]["pictures"]
    assert len(shown["eigenvalues"]["values"]) == 4 * shown["eigenvalues"]["states"]
    assert [len(gate["p50"]) for gate in shown["gates"]] == [40] * 3


def test_report_writes_the_page_and_says_where(tmp_path, monkeypatch, capsys, brief_search):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path, "gru")
    assert app.main(["report", str(path), "--data", "data.npy"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("verdict: ")
    assert out.endswith("wrote    gru.report.html\n")
    assert err == ""
    page = (tmp_path / "gru.report.html").read_text("utf-8")
    for title in ("Error versus depth", "Lyapunov", "Eigenvalues", "Gates over", "Memory of each"):
        assert title in page
    assert app.main(["inspect", str(path), "--data", "data.npy", "--format", "html"]) == 0
    assert capsys.readouterr().out == page


def test_a_missing_package_is_told_before_the_audit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(html, "find_spec", lambda name: None)
    assert app.main(["report", str(saved(tmp_path, "gru")), "-o", str(tmp_path / "r.html")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "error[RA001]: the HTML report needs matplotlib and jinja2, which is not installed; "
        "pip install 'rnnaudit[report]'\n"
    )
    assert not (tmp_path / "r.html").exists()
