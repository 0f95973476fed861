"""A live module is read with the weights that it computes with, and what it does is checked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from rnnaudit import api, loaders
from rnnaudit.cells import run_stack
from rnnaudit.cli.app import main
from rnnaudit.errors import LoadError, UnsupportedModelError, UsageError
from rnnaudit.model import Model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*quantiz"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
]

X = torch.linspace(-1, 1, 2 * 7 * 3).reshape(2, 7, 3)


class Net(nn.Module):
    """A recurrence, its head, and whatever comes last."""

    def __init__(self, rnn: nn.Module, last: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.last = rnn, last
        self.head = nn.Linear(rnn(X)[0].shape[-1], 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.rnn(x)[0]))


class OwnForward(nn.GRU):
    """Has a GRU's weights, and does something else with them."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x)[0].cumsum(1), None


def ids(model: Model) -> list[str]:
    return [finding.id for finding in model.findings]


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_module_is_read_as_it_runs(kind: type[nn.RNNBase], batch_first: bool) -> None:
    net = Net(kind(3, 4, num_layers=2, bidirectional=True, batch_first=batch_first))
    model = api.load(net)
    assert model.whole
    assert ids(model) == []
    x = X if batch_first else X.transpose(0, 1)
    with torch.no_grad():
        y = net.double()(x.double())
    torch.testing.assert_close(
        run_stack(model.stacks[0], X.double()), y if batch_first else y.transpose(0, 1)
    )


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_the_nonlinearity_is_the_modules_own(nonlinearity: str) -> None:
    for part in (nn.RNN(3, 4, nonlinearity=nonlinearity), nn.RNNCell(3, 4, True, nonlinearity)):
        [recurrence] = api.load(part).recurrences()
        assert recurrence.cell.options["activation"] == nonlinearity


@pytest.mark.parametrize(
    "change",
    [
        lambda rnn: parametrizations.weight_norm(rnn, "weight_hh_l0"),
        lambda rnn: parametrizations.spectral_norm(rnn, "weight_hh_l0"),
        lambda rnn: parametrizations.orthogonal(rnn, "weight_hh_l0"),
        lambda rnn: nn.utils.weight_norm(rnn, "weight_hh_l0"),
    ],
)
def test_parametrised_weights_are_those_that_the_module_computes(
    change: Callable[[nn.RNN], nn.RNN],
) -> None:
    rnn = nn.RNN(3, 4, batch_first=True)
    change(rnn)
    net = Net(rnn).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    model = api.load(net)
    [recurrence] = model.recurrences()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.training
    assert rnn.training
    net.eval()(X)  # the old weight norm computes its weight as it runs
    torch.testing.assert_close(recurrence.cell.W, rnn.weight_hh_l0.detach().double())
    assert model.whole


@pytest.mark.parametrize(
    "last",
    [lambda y: y.softmax(-1), lambda y: y.sum(1), lambda y: y[:, :3], lambda y: y.missing],
)
def test_what_shows_in_no_weight_is_found_by_running_the_module(
    last: Callable[[Tensor], Tensor],
) -> None:
    model = api.load(Net(nn.GRU(3, 4, batch_first=True), last))
    assert not model.whole
    assert ids(model) == ["RA128"]
    assert api.load(Net(nn.GRU(3, 4, batch_first=True), lambda y: y[:, -1])).whole


def test_a_subclass_with_its_own_forward_is_left_out_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"rnn: its class .*OwnForward computes in its"):
        api.load(Net(OwnForward(3, 4, batch_first=True)))


def test_a_quantised_module_is_audited_and_not_replaced(tmp_path: Path) -> None:
    if "x86" not in torch.backends.quantized.supported_engines:
        pytest.skip("no quantised engine on this machine")
    torch.backends.quantized.engine = "x86"
    plain = Net(nn.LSTM(3, 4, batch_first=True)).eval()
    net = torch.ao.quantization.quantize_dynamic(plain, {nn.LSTM}, torch.qint8)
    model = api.load(net)
    assert ids(model) == ["RA127"]
    with pytest.raises(
        UnsupportedModelError, match=r"can equal was wanted, got rnn: rnn\[0\]: its weights have"
    ):
        api.truncate(model, tmp_path / "out.onnx", depth=4, time_budget=1)
    with pytest.raises(UnsupportedModelError, match=r"got none: .*rnn\[0\]: its weights have 8"):
        api.truncate(model, tmp_path / "out.onnx", time_budget=1)
    api.truncate(plain, tmp_path / "out.onnx", depth=4, eps=10, time_budget=1)
    with pytest.raises(UnsupportedModelError, match=r"nothing is equivalent to rnn\[0\]"):
        api.verify(model, tmp_path / "out.onnx")


def test_a_live_module_is_truncated_and_held_against_itself(tmp_path: Path) -> None:
    rnn = nn.RNN(3, 4, batch_first=True)
    with torch.no_grad():
        rnn.weight_hh_l0.mul_(0.3)
    report = api.truncate(Net(rnn), tmp_path / "out.onnx", eps=1e-2)
    assert report.model.format == "nn.Module"
    assert report.equivalence.passed
    with torch.no_grad():
        rnn.weight_hh_l0.add_(1)
    changed = api.verify(Net(rnn), tmp_path / "out.onnx", eps=1e-2)
    assert not changed.equivalence.passed


# Files and factories whose code runs because the user asked for it.


def pickled(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"epoch": 3, "model": m}])
def test_a_pickled_module_is_read_when_its_code_is_trusted(
    tmp_path: Path, wrap: Callable[[nn.Module], object]
) -> None:
    net = nn.Sequential(nn.GRU(3, 4, batch_first=True))
    path = pickled(tmp_path / "net.pt", wrap(net))
    with pytest.raises(LoadError, match=r"--trust-pickle"):
        api.load(path)
    [recurrence] = api.load(path, trust_pickle=True).recurrences()
    assert torch.equal(recurrence.cell.U, net[0].weight_hh_l0.detach().double())


def test_a_trusted_file_without_a_module_is_read_by_its_names(tmp_path: Path) -> None:
    path = pickled(tmp_path / "net.pt", {"state_dict": nn.LSTM(3, 4).state_dict(), "x": Path})
    assert [r.cell.kind for r in api.load(path, trust_pickle=True).recurrences()] == ["lstm"]


def test_a_class_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(nn.Module):
        """Will not be found when it is unpickled."""

    Gone.__qualname__ = "Gone"
    monkeypatch.setattr(sys.modules[__name__], "Gone", Gone, raising=False)
    path = pickled(tmp_path / "net.pt", Gone())
    monkeypatch.delattr(sys.modules[__name__], "Gone")
    with pytest.raises(LoadError, match=r"needs a class that is not here: .*Gone.*; run where"):
        api.load(path, trust_pickle=True)


@pytest.mark.parametrize("started", [None, "rnnaudit.__main__"], ids=["script", "python -m"])
def test_a_class_of_a_script_is_asked_for_where_the_script_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str | None
) -> None:
    class Net(nn.Module):
        """Defined in the program that was run."""

    Net.__module__, Net.__qualname__ = "__main__", "Net"
    monkeypatch.setattr(sys.modules["__main__"], "Net", Net, raising=False)
    path = pickled(tmp_path / "net.pt", Net())
    monkeypatch.delattr(sys.modules["__main__"], "Net")
    monkeypatch.setattr(
        sys.modules["__main__"], "__spec__", started and ModuleSpec(started, loader=None)
    )
    with pytest.raises(LoadError, match=r"not here: __main__\.Net; save model\.state_dict\(\)"):
        api.load(path, trust_pickle=True)


def test_two_pickled_modules_are_not_chosen_between(tmp_path: Path) -> None:
    path = pickled(tmp_path / "net.pt", {"a": nn.GRU(3, 4), "b": nn.GRU(3, 4)})
    with pytest.raises(LoadError, match=r"holds 2 \(a, b\)"):
        api.load(path, trust_pickle=True)


FACTORY = """
from torch import nn

def build():
    return nn.Sequential(nn.LSTM(3, 4))

def number():
    return 3

def broken():
    raise RuntimeError("no GPU here")

def moved():
    import os
    os.chdir("/")
    return build()
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in the working folder."""
    (tmp_path / "train_it.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "train_it", raising=False)
    return "train_it"


def test_a_factory_makes_the_module_and_a_file_its_weights(tmp_path: Path, factory: str) -> None:
    net = nn.Sequential(nn.LSTM(3, 4))
    path = pickled(tmp_path / "weights.pt", net.state_dict())
    model = api.build(f"{factory}:build", path)
    [recurrence] = model.recurrences()
    assert torch.equal(recurrence.cell.U, net[0].weight_hh_l0.detach().double())
    assert str(model.path) == f"{factory}:build"


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("train_it", r"must be package.module:callable, got 'train_it'"),
        ("train_it:number", r"must return an nn.Module, got int"),
        ("train_it:broken", r"raised RuntimeError: no GPU here"),
        ("train_it:absent", r"raised AttributeError"),
        ("not_there_at_all:build", r"raised ModuleNotFoundError"),
    ],
)
def test_a_factory_that_fails_is_one_line(factory: str, spec: str, match: str) -> None:
    with pytest.raises(LoadError, match=match):
        api.build(spec)


def test_a_factory_may_change_the_working_folder(factory: str) -> None:
    before = list(sys.path)
    assert len(list(api.build(f"{factory}:moved").recurrences())) == 1
    assert sys.path == before


def test_weights_beside_a_trusted_pickle_are_refused(tmp_path: Path) -> None:
    path = pickled(tmp_path / "net.pt", nn.GRU(3, 4))
    with pytest.raises(LoadError, match="weights are given to graph inputs of an ONNX model"):
        loaders.load(path, weights=tmp_path / "w.npz", trust_pickle=True)


def test_weights_of_another_module_are_refused(tmp_path: Path, factory: str) -> None:
    path = pickled(tmp_path / "weights.pt", nn.GRU(3, 4).state_dict())
    with pytest.raises(LoadError, match=r"do not fit the module that train_it:build makes"):
        api.build(f"{factory}:build", path)


def test_the_program_runs_code_only_when_asked(
    tmp_path: Path, factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(pickled(tmp_path / "net.pt", nn.GRU(3, 4)))
    assert main(["inspect", path, "-q"]) == 3
    assert main(["inspect", path, "--trust-pickle", "--time-budget", "1", "-q"]) == 0
    assert main(["inspect", "--factory", f"{factory}:build", "--time-budget", "1", "-q"]) == 0
    capsys.readouterr()
    assert main(["inspect", path, "--factory", f"{factory}:build", "--trust-pickle"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    (tmp_path / "rnnaudit.toml").write_text("trust-pickle = true\n")
    assert main(["inspect", path, "-q"]) == 2
    assert "trust-pickle" in capsys.readouterr().err


def test_what_is_no_model_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"must be a path, an nn.Module or .*, got int"):
        api.audit(3)
