"""`rnnaudit.truncate` on a live module: which recurrences are replaced, how deep, how exactly."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import rnnaudit
from rnnaudit import api
from rnnaudit.errors import LoadError, UnsupportedModelError, UsageError
from rnnaudit.modules import Truncated
from rnnaudit.runtime import run

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::rnnaudit.RnnauditWarning"),
]


class Tagger(nn.Module):
    """A convolution, two recurrences and a head; the first reads no input of the caller's."""

    def __init__(self, gain=1.0, batch_first=True):
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Conv1d(2, 3, 3, padding=1)
        self.parts = nn.ModuleDict(
            {
                "up": nn.GRU(3, 6, bidirectional=True, batch_first=batch_first),
                "down": nn.LSTM(12, 5, batch_first=batch_first),
            }
        )
        self.head = nn.Linear(5, 2)
        self.gain = gain

    def forward(self, x):
        x = self.front(x.mT).mT
        y, _ = self.parts["up"](x)
        y, _ = self.parts["down"](y)
        return self.gain * self.head(y)


def sequences(*, n=6, steps=80, features=2, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (n, steps, features)).astype(np.float32)


def test_every_recurrence_is_replaced_and_the_rest_is_kept():
    module, x = Tagger(), sequences()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    truncated, report = rnnaudit.truncate_module(module, eps=1e-3, data=x, time_budget=10.0)
    assert not any(isinstance(part, Truncated) for part in module.modules())
    assert [type(part) for part in truncated.parts.values()] == [Truncated, Truncated]
    assert list(truncated.state_dict()) == list(before)
    assert all(torch.equal(t, before[name]) for name, t in truncated.state_dict().items())
    assert report.equivalence.passed
    assert report.equivalence.max_abs_error <= 1e-3
    assert report.data == "1 call of the module"
    fresh = torch.from_numpy(sequences(seed=1, steps=200))
    with torch.no_grad():
        assert (truncated(fresh) - module(fresh)).abs().max() <= 1e-3
    truncated(fresh).sum().backward()
    assert all(p.grad is not None for p in truncated.parameters())


@pytest.mark.slow
def test_what_follows_is_counted_in_the_error():
    """A head that amplifies needs deeper recurrences for the same ε."""
    plain = rnnaudit.truncate(Tagger(), eps=1e-3, data=sequences(), time_budget=5.0)
    module = Tagger(gain=30.0)
    truncated, report = rnnaudit.truncate_module(
        module, eps=1e-3, data=sequences(), time_budget=5.0
    )
    assert report.equivalence.passed
    x = torch.from_numpy(sequences())
    assert (truncated(x) - module(x)).abs().max() <= 1e-3
    deep, shallow = (
        [c.depth for layer in m.parts["down"].cuts for c in layer] for m in (truncated, plain)
    )
    assert deep > shallow


def test_it_computes_what_the_written_model_computes(tmp_path):
    torch.manual_seed(1)
    module = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    few = sequences(n=2, steps=24, features=3)
    settings = {"depth": 7, "form": "chunk", "steps": 300, "time_budget": 1.0, "data": few}
    truncated = rnnaudit.truncate(module, **settings)
    rnnaudit.truncate(module, tmp_path / "m.onnx", keep_ops=True, **settings)
    x = sequences(n=2, steps=300, features=3)
    outcome = run(tmp_path / "m.onnx", [{"x": x.transpose(1, 0, 2)}])
    (y,) = outcome.outputs[0].values()
    with torch.no_grad():
        got = truncated(torch.from_numpy(x))[0].transpose(0, 1).numpy()
    np.testing.assert_allclose(got, y, atol=2e-6)


def test_a_proof_is_taken_where_there_is_one_and_holds_in_its_domain():
    torch.manual_seed(0)
    module = nn.RNN(3, 16)
    truncated, report = rnnaudit.truncate_module(module, eps=1e-3, time_budget=5.0)
    (cut,) = truncated.cuts[0]
    assert cut.depth == report.depth.proved
    assert report.equivalence.passed
    assert "RA301" not in {finding.id for finding in report.findings}
    assert str(report).endswith(f"cut      elman[0] to k = {cut.depth}")
    measured = rnnaudit.truncate(module, eps=1e-3, evidence="measured", time_budget=5.0)
    assert measured.cuts[0][0].depth < cut.depth


def test_the_form_is_as_asked():
    module = nn.GRU(3, 4)
    few = {"data": sequences(n=2, steps=24, features=3), "time_budget": 1.0}
    window = rnnaudit.truncate(module, depth=5, form="window", **few)
    chunk = rnnaudit.truncate(module, depth=5, steps=1000, **few)
    assert window.cuts[0][0].block == 1
    assert chunk.cuts[0][0].block > 1


@pytest.mark.parametrize("arguments", ["tuple", "list"])
def test_calls_are_made_as_given(arguments):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.rnn = nn.GRU(2, 4, batch_first=True)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, True, enforce_sorted=False)
            return self.rnn(packed)[1]

    x = torch.from_numpy(sequences(n=3, steps=60))
    call = (x, torch.tensor([60, 40, 50]))
    data = call if arguments == "tuple" else [call, call]
    truncated, report = rnnaudit.truncate_module(Masked(), eps=1e-2, data=data, time_budget=5.0)
    assert isinstance(truncated.rnn, Truncated)
    assert report.equivalence.passed
    assert report.equivalence.inputs_tried == len(data if arguments == "list" else [data])


def test_a_layer_may_be_cut_alone_and_a_cell_stays():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.rnn = nn.LSTMCell(2, 3), nn.LSTM(2, 3, num_layers=2)

        def forward(self, x):
            return self.rnn(x)[0]

    few = {"data": sequences(n=2, steps=24), "time_budget": 1.0}
    truncated, report = rnnaudit.truncate_module(Both(), depth=4, **few)
    assert type(truncated.cell) is nn.LSTMCell
    assert [cut.depth for (cut,) in truncated.rnn.cuts] == [4, 4]
    assert any("have a truncated module" in each.reason for each in report.skipped)
    half = rnnaudit.truncate(Both(), depth=4, layer="rnn[0]", **few)
    assert [cut and cut.depth for (cut,) in half.rnn.cuts] == [4, None]


def warned(module, **settings):
    """Truncate, and return the report of that very run with what was warned of."""
    reports, whole = [], api.truncate_module

    def kept(*arguments, **given):
        truncated, report = whole(*arguments, **given)
        reports.append(report)
        return truncated, report

    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(api, "truncate_module", kept)
        rnnaudit.truncate(module, **settings)
    assert {each.category for each in caught} <= {rnnaudit.RnnauditWarning}
    assert {each.filename for each in caught} <= {__file__}
    (report,) = reports
    return report, [str(each.message) for each in caught]


def test_every_finding_of_the_report_is_warned_of_once():
    settings = {"depth": 4, "time_budget": 1.0, "data": sequences(n=2, steps=24)}
    report, said = warned(Tagger(), **settings)
    worse = [each for each in report.findings if each.severity != "note"]
    assert worse
    assert len(said) == len(set(said)) == len({(f.id, f.message) for f in worse})
    assert any(
        line.startswith("RA301 depths: the depth rests on your choice, not on a proof; ")
        for line in said
    )
    for each in worse:
        assert sum(each.id in line and each.message in line for line in said) == 1
    assert not any("--" in line for line in said)
    (rests,) = (line for line in said if line.startswith("RA301"))
    assert rests.endswith("; without depth= it rests on the strongest evidence there is")


def test_what_stays_is_warned_of_and_what_was_chosen_is_not():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.rnn = nn.LSTMCell(2, 3), nn.GRU(2, 3)

        def forward(self, x):
            return self.rnn(x)[0]

    few = {"data": sequences(n=2, steps=24), "time_budget": 1.0}
    _, said = warned(Both(), depth=4, **few)
    assert "skipped cell[0]: only nn.RNN, nn.GRU and nn.LSTM have a truncated module" in said
    report, said = warned(Both(), depth=4, layer="rnn[0]", **few)
    assert [each.where for each in report.skipped] == ["cell"]
    assert not any("cell" in line for line in said)


def test_a_proved_depth_leaves_nothing_to_warn_of():
    torch.manual_seed(0)
    assert warned(nn.RNN(3, 8), eps=1e-2, time_budget=5.0)[1] == []


@pytest.mark.parametrize("bare", [True, False])
def test_data_of_another_width_are_told_the_width(bare):
    module = nn.GRU(4, 3, batch_first=True) if bare else nn.Sequential(nn.GRU(4, 3))
    wanted = (
        "the data must have 4 features per step, got 5; give sequences"
        if bare
        else "0 must be given 4 features per step, got 5; give data from which the module makes 4"
    )
    with pytest.raises(LoadError, match=wanted):
        rnnaudit.truncate(module, data=sequences(features=5))


def test_what_cannot_be_is_refused():
    latch = nn.RNN(1, 1)
    with torch.no_grad():
        for name, value in (("weight_hh_l0", 5.0), ("weight_ih_l0", 5.0)):
            getattr(latch, name).fill_(value)
    with pytest.raises(UnsupportedModelError, match="a depth of at most 512 was wanted"):
        rnnaudit.truncate(latch, eps=1e-3, evidence="proved")
    with pytest.raises(LoadError, match=r"the module must take the data, got RuntimeError"):
        rnnaudit.truncate(Tagger(), data=sequences(features=5))
    with pytest.raises(UsageError, match="an output must be named where the model is a str"):
        rnnaudit.truncate("model.pt")
    with pytest.raises(TypeError, match="keep_ops"):
        rnnaudit.truncate(nn.GRU(2, 3), keep_ops=True)


class Begun(nn.Module):
    """A recurrence that begins where it is told, or where the last call ended."""

    def __init__(self, *, keeps=False, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRU(2, 2, batch_first=True)
        self.again = self.cell if shared else None
        self.keeps, self.ended = keeps, None

    def forward(self, x):
        start = x.new_full((1, len(x), 2), 7.0) if self.ended is None else self.ended
        y, end = self.cell(x, start)
        self.ended = end.detach() if self.keeps else None
        return y if self.again is None else self.again(torch.cat([y, y], dim=-1)[..., :2])[0]


def test_a_state_that_the_module_gives_is_warned_of():
    with pytest.warns(rnnaudit.RnnauditWarning, match="RA123 cell: the module gives it an initial"):
        rnnaudit.truncate(Begun(), eps=1e-3, data=sequences(), time_budget=1.0)


@pytest.mark.parametrize("given", [True, False])
def test_a_proof_of_a_start_from_zero_is_none_for_a_module_that_starts_elsewhere(given):
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell = nn.GRU(2, 2, batch_first=True)
            self.h0 = nn.Parameter(torch.full((1, 1, 2), 1000.0))
            with torch.no_grad():
                for weight in self.cell.parameters():
                    weight.mul_(0.3)

        def forward(self, x):
            return self.cell(x, self.h0.expand(-1, len(x), -1).contiguous())[0]

    module, data = Learned(), sequences() if given else None
    asked = {"eps": 1e-3, "data": data, "time_budget": 0.5}
    with pytest.raises(UnsupportedModelError, match=r"of a start from zero.*\(RA123\)"):
        rnnaudit.truncate(module, evidence="proved", **asked)
    alone, _ = rnnaudit.truncate_module(module.cell, eps=0.3, evidence="proved", time_budget=1.0)
    assert isinstance(alone, Truncated)


@pytest.mark.parametrize("kind", [{"keeps": True}, {"shared": True}])
def test_the_module_is_left_as_it_was(kind):
    """It is run in float64 and on data; neither its weights nor what it keeps may change."""
    module, x = Begun(**kind), torch.from_numpy(sequences())
    truncated, _ = rnnaudit.truncate_module(module, eps=1e-3, data=x.numpy(), time_budget=1.0)
    for each in (module, truncated):
        assert each.ended is None
        assert {p.dtype for p in each.parameters()} == {torch.float32}
        assert each(x).dtype == torch.float32


def test_the_largest_error_is_placed_by_the_axes_of_the_module():
    torch.manual_seed(0)
    _, report = rnnaudit.truncate_module(nn.RNN(2, 3), eps=1e-3, depth=2, time_budget=1.0)
    where = report.equivalence.where
    assert where.batch < 5
    assert where.t > 1


def test_numbers_of_every_type_are_compared():
    """NumPy has no bfloat16, and an imaginary part counts as much as a real one."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell = nn.RNN(2, 3, batch_first=True)

        def forward(self, x):
            y, _ = self.cell(x)
            return torch.complex(torch.zeros_like(y), y)

    few = sequences(n=2, steps=30)
    _, report = rnnaudit.truncate_module(Turned(), eps=1e-3, depth=1, data=few, time_budget=1.0)
    assert report.equivalence.max_abs_error > 0.01
    half = nn.RNN(2, 3, batch_first=True).bfloat16()
    _, report = rnnaudit.truncate_module(half, eps=0.1, depth=20, data=few, time_budget=1.0)
    assert report.equivalence.passed
