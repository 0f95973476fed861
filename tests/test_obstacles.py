"""What rules a proof out is found where it is known to be, and never where there is a proof."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

import rnnaudit
from rnnaudit.certificates import Domain, certify
from rnnaudit.estimators import obstacles
from rnnaudit.evidence import in_the_way
from rnnaudit.model import RELU, TANH, ElmanCell, InitialState, Recurrence
from rnnaudit.reports.paragraph import paragraph
from rnnaudit.reports.wording import verdict
from tests import strategies

pytestmark = pytest.mark.usefixtures("one_thread")


def unit(w, u, b=0.0, activation=TANH):
    W, U = (torch.full((1, 1), value, dtype=torch.float64) for value in (w, u))
    cell = ElmanCell(W, U, torch.full((1,), b, dtype=torch.float64), activation)
    return Recurrence("r", 0, cell, InitialState(torch.zeros(1, dtype=torch.float64)))


def recorded(seed=0, count=6, length=40):
    rng = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(count, length, 1, generator=rng, dtype=torch.float64) - 1


def test_a_latch_is_bistable_and_its_middle_repels():
    x = torch.zeros(4, 40, 1, dtype=torch.float64)
    x[::2, 10:], x[1::2, 10:] = 1.0, -1.0
    x[:, 30:] = 0.0
    found = obstacles(unit(3.0, 2.0, 0.2), x)
    low, middle, high = (
        brentq(lambda h: math.tanh(3 * h + 0.2) - h, *ends)
        for ends in ((-1, -0.6), (-0.6, 0.1), (0.5, 1))
    )
    assert float(found.bistability.first.states[0, 0]) == pytest.approx(high, abs=1e-9)
    assert float(found.bistability.second.states[0, 0]) == pytest.approx(low, abs=1e-9)
    assert found.bistability.gap == pytest.approx(high - low, abs=1e-9)
    held = [o for o in found.repelling if o.period == 1 and float(o.input) == 0.0]
    assert [float(o.states[0, 0]) for o in held] == pytest.approx([middle], abs=1e-9)
    assert found.expansion.radius >= held[0].radius - 0.5 > 1
    assert [f.id for f in in_the_way(found, "r")] == ["RA239", "RA240"]


def test_the_prefix_leads_to_where_it_is_said_to():
    r = unit(3.0, 2.0)
    pair = obstacles(r, recorded()).bistability
    h = 0.0
    for x in torch.cat([pair.prefix, pair.first.input.expand(200, 1)]).flatten().tolist():
        h = math.tanh(3 * h + 2 * x)
    assert h == pytest.approx(float(pair.second.states[0, 0]), abs=1e-9)


def test_a_unit_that_nothing_reaches_twice_is_not_bistable():
    # h' = tanh(5h) from 0 stays there: the ends ±0.9999 exist, and no input leads to them.
    found = obstacles(unit(5.0, 0.0), recorded())
    assert found.bistability is None
    assert found.expansion.radius == pytest.approx(5.0)


def test_a_rectified_unit_with_gain_above_one_grows_without_bound():
    found = obstacles(unit(1.25, 1.0, activation=RELU), recorded())
    grown = found.divergence
    assert grown.size > 1e12
    # s_n ≥ u (1.25^n − 1)/0.25 from 0 under x = u > 0: 1e12 is passed within this many steps.
    u = float(grown.input)
    assert u > 0
    assert grown.steps <= math.log(0.25e12 / u + 1) / math.log(1.25) + 1
    assert "RA241" in {f.id for f in in_the_way(found, "r")}
    assert obstacles(unit(0.9, 1.0, activation=RELU), recorded()).divergence is None


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["elman", "gru", "lstm"]),
    gain=st.floats(0.05, 3.0),
)
def test_nothing_stands_in_the_way_of_what_is_proved(seed, kind, gain):
    cell = strategies.random_cell(seed, kind, hidden=3, inputs=1, gain=gain)
    r = strategies.recurrence(cell)
    best = certify(r, Domain(-1.0, 1.0, "|x| ≤ 1"), time_budget=0.3).best
    if best is not None and best.bound.value < 1:
        found = obstacles(r, recorded(seed))
        assert (found.expansion, found.repelling) == (None, ())
        assert (found.bistability, found.divergence) == (None, None)


def test_a_bistable_model_is_refuted_at_every_depth_with_its_numbers(tmp_path):
    module = torch.nn.RNN(1, 1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.0 if parameter.ndim == 1 else 3.0)
    torch.save(module.state_dict(), tmp_path / "latch.pt")
    report = rnnaudit.audit(tmp_path / "latch.pt", data=recorded().float())
    assert report.verdict == "unstable"
    assert report.depth.refuted_below == 257
    (kept,) = (f for f in report.findings if f.id == "RA240")
    assert "recorded steps lead" in kept.message


def test_a_search_without_time_finds_nothing_and_says_so():
    found = obstacles(unit(3.0, 2.0), recorded(), budget_s=0.0)
    assert (found.expansion, found.repelling) == (None, ())
    assert (found.bistability, found.divergence) == (None, None)
    assert found.cut
    assert not obstacles(unit(3.0, 2.0), recorded()).cut


def test_an_audit_says_which_searches_its_time_budget_ended(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.GRU(3, 40, num_layers=2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(4.0)
    torch.save(module.state_dict(), tmp_path / "gru.pt")
    report = rnnaudit.audit(tmp_path / "gru.pt", time_budget=0.05)
    ended = {
        (f.where, f.message.rpartition("search for ")[2])
        for f in report.findings
        if f.id == "RA216"
    }
    assert ("gru[0]", "fixed points, cycles and divergence") in ended
    assert ("gru[0]", "counterexamples") in ended
    assert ("gru", "counterexamples") in ended
    assert ("gru[0]", "norms after r = 1 of 256") in ended
    assert ("gru[0]", "proofs") in ended
    # The budget, and not the sequences, is why nothing is measured.
    assert "RA202" not in {f.id for f in report.findings}
    assert "k(1e-3) is unknown: the time budget ended the study" in str(verdict(report))
    assert "unknown: the time budget ended the study" in paragraph(report)


def test_what_a_layer_below_holds_is_not_called_an_input():
    found = obstacles(unit(1.25, 1.0, activation=RELU), recorded())
    (below,) = (f for f in in_the_way(found, "r[1]", below=True) if f.id == "RA241")
    assert below.message.startswith("under one held output of the layer below the largest |s|")
