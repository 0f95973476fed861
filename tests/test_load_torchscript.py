"""TorchScript and torch.export archives are read for their weights, and their code never runs."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Optional

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rnnaudit.cells import run_stack
from rnnaudit.errors import LoadError, RnnauditError, UnsupportedModelError
from rnnaudit.loaders import load
from rnnaudit.model import Model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*dropout option adds dropout"),
    pytest.mark.filterwarnings("ignore:.*quantiz"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:.*assigned during export"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch.*"),
]

X = torch.linspace(-1, 1, 2 * 7 * 3).reshape(2, 7, 3)


class Net(nn.Module):
    """A recurrence and its head."""

    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = kind(3, 4, batch_first=True, **options)
        self.head = nn.Linear(self.rnn(X)[0].shape[-1], 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Streaming(nn.Module):
    """Keeps its state between calls, as control policies do."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(3, 4)
        self.register_buffer("hidden_state", torch.zeros(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.memory(x, (self.hidden_state, self.hidden_state))
        self.hidden_state[:] = state[0]
        return y


class Remembering(nn.Module):
    """Keeps its state in an attribute that is no buffer, and empty at first."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTMCell(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.past = torch.zeros(0)
        self.seen = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        past = self.past
        if len(past) == 0:
            past = torch.zeros(2, x.shape[0], 4)
        h, c = self.memory(x, (past[0], past[1]))
        self.past = torch.stack([h, c])
        self.seen = h
        return self.norm(h)


class OwnCell(nn.Module):
    """Calls its weights as PyTorch does and computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_ih = nn.Parameter(torch.ones(4, 3))
        self.weight_hh = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.sin(x @ self.weight_ih.T + h @ self.weight_hh.T)


def trace(module: nn.Module, *inputs: Tensor) -> torch.jit.ScriptModule:
    return torch.jit.trace(module, inputs, check_trace=False)


def script(module: nn.Module, *_: Tensor) -> torch.jit.ScriptModule:
    return torch.jit.script(module)


def as_script(tmp_path: Path, module: torch.jit.ScriptModule, name: str = "m.pt") -> Path:
    torch.jit.save(module, tmp_path / name)
    return tmp_path / name


def as_export(tmp_path: Path, module: nn.Module, x: Tensor = X) -> Path:
    torch.export.save(torch.export.export(module, (x,)), tmp_path / "m.pt2")
    return tmp_path / "m.pt2"


def agrees(model: Model, module: nn.Module) -> None:
    [stack] = model.stacks
    with torch.no_grad():
        expected = module.double().eval()(X.double())
    assert (run_stack(stack, X.double()) - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("make", [trace, script])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.RNN, {}),
        (nn.GRU, {"num_layers": 2, "bidirectional": True}),
        (nn.LSTM, {"proj_size": 2}),
        (nn.LSTM, {"bias": False}),
    ],
)
def test_torchscript_weights_compute_what_the_module_did(
    tmp_path: Path,
    make: Callable[..., torch.jit.ScriptModule],
    kind: type[nn.RNNBase],
    options: dict[str, object],
) -> None:
    net = Net(kind, **options).eval()
    model = load(as_script(tmp_path, make(net, X)))
    assert (model.format, model.findings, model.whole) == ("TorchScript", (), True)
    agrees(model, net)


@pytest.mark.parametrize("make", [trace, script])
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_torchscript_says_which_nonlinearity_an_elman_cell_has(
    tmp_path: Path, make: Callable[..., torch.jit.ScriptModule], nonlinearity: str
) -> None:
    net = Net(nn.RNN, nonlinearity=nonlinearity).eval()
    cell = nn.RNNCell(3, 4, nonlinearity=nonlinearity)
    for module in (make(net, X), make(cell, X[:, 0], torch.zeros(2, 4))):
        model = load(as_script(tmp_path, module))
        assert [r.cell.options["activation"] for r in model.recurrences()] == [nonlinearity]
        assert model.findings == ()


def test_dropout_that_a_trace_has_frozen_in_is_a_finding(tmp_path: Path) -> None:
    net = Net(nn.LSTM, num_layers=2, dropout=0.5)
    for module, expected in (
        (trace(net.train(), X), ["RA125"]),
        (trace(net.eval(), X), []),
        (script(net.train()), ["RA125"]),
    ):
        model = load(as_script(tmp_path, module))
        assert [finding.id for finding in model.findings] == expected
    agrees(model, net)


def test_a_state_kept_between_calls_is_a_finding(tmp_path: Path) -> None:
    model = load(as_script(tmp_path, script(Streaming())))
    assert [(finding.id, finding.where) for finding in model.findings] == [
        ("RA124", "hidden_state")
    ]
    model = load(as_script(tmp_path, script(Remembering())))
    assert [(finding.id, finding.where) for finding in model.findings[1:]] == [("RA124", "past")]


class Policy(nn.Module):
    """Takes one step per call, and keeps its state in one of the ways that people have."""

    def __init__(self, *, stacked: int = 1) -> None:
        super().__init__()
        self.memory = nn.GRU(3, 4, num_layers=stacked)
        self.register_buffer("h", torch.zeros(stacked, 1, 4))
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("last", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.memory(x * self.scale, self.h)
        self.h.copy_(h)
        self.last = y[-1]
        return self.last


class BySlice(Policy):
    def forward(self, x: Tensor) -> Tensor:
        y, h = self.memory(x * self.scale, self.h)
        for i in range(2):
            self.h[i] = h[i]
        return y

    @torch.jit.export
    def reset(self) -> None:
        self.h.zero_()


class ByOut(Policy):
    def forward(self, x: Tensor) -> Tensor:
        y, h = self.memory(x * self.scale, self.h)
        torch.add(h, 0.0, out=self.h)
        return y


class ByTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTMCell(3, 4)
        self.h = (torch.zeros(1, 4), torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.memory(x, self.h)
        self.h = (h, c)
        return h


class ByList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRUCell(3, 4)
        self.h = [torch.zeros(1, 4)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.memory(x, self.h[0])
        self.h[0] = h
        return h


class FromNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRUCell(3, 4)
        self.h = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.memory(x, self.h)
        self.h = h
        return h


# The compiler reads types, not the texts that annotations are here.
ByTuple.__annotations__ = {"h": tuple[Tensor, Tensor]}
ByList.__annotations__ = {"h": list[Tensor]}
FromNone.__annotations__ = {"h": Optional[Tensor]}  # noqa: UP045


class Box(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(1, 4))

    def forward(self) -> Tensor:
        return self.h


class InABox(nn.Module):
    """Keeps its state in a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.box = nn.GRUCell(3, 4), Box()

    def forward(self, x: Tensor) -> Tensor:
        h = self.memory(x, self.box.h)
        self.box.h = h
        return h


@pytest.mark.parametrize(
    ("module", "where"),
    [
        (Policy(), "h"),
        (BySlice(stacked=2), "h"),
        (ByOut(), "h"),
        (ByTuple(), "h"),
        (ByList(), "h"),
        (FromNone(), "h"),
        (InABox(), "box.h"),
        (nn.Sequential(nn.Linear(3, 3), InABox()), "1.box.h"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_state_is_found_however_it_is_kept(tmp_path: Path, module: nn.Module, where: str) -> None:
    model = load(as_script(tmp_path, script(module)))
    found = [finding for finding in model.findings if finding.id in {"RA123", "RA124"}]
    assert [(finding.id, finding.where) for finding in found] == [("RA124", where)]
    assert "it was saved with values in it" not in found[0].message


def test_a_state_that_tracing_left_behind_is_no_learned_one(tmp_path: Path) -> None:
    traced = trace(Streaming().eval(), torch.ones(1, 1, 3))
    assert bool(traced.hidden_state.any())
    (found,) = load(as_script(tmp_path, traced)).findings
    assert (found.id, found.where) == ("RA124", "hidden_state")
    assert "it was saved with values in it, and the audit starts from zero" in found.message


def test_a_cell_of_its_own_class_is_not_taken_for_pytorchs(tmp_path: Path) -> None:
    for make in (trace, script):
        path = as_script(tmp_path, make(OwnCell(), X[:, 0], torch.zeros(2, 4)))
        with pytest.raises(UnsupportedModelError, match=r"OwnCell computes in its own way"):
            load(path)


def test_weights_that_are_not_there_are_explained(tmp_path: Path) -> None:
    frozen = torch.jit.freeze(script(Net(nn.LSTM).eval()))
    with pytest.raises(UnsupportedModelError, match=r"are constants of its code \(torch\.jit"):
        load(as_script(tmp_path, frozen))
    with pytest.raises(UnsupportedModelError, match=r"no recurrence in .* none of its 2"):
        load(as_script(tmp_path, script(nn.Linear(2, 3))))


@pytest.mark.parametrize(
    ("layers", "bidirectional"), [(1, False), (2, False), (1, True), (3, True)]
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_quantised_weights_are_read_without_unpacking_them(
    tmp_path: Path, kind: type[nn.RNNBase], layers: int, bidirectional: bool
) -> None:
    if "x86" not in torch.backends.quantized.supported_engines:
        pytest.skip("no quantised engine on this machine")
    torch.backends.quantized.engine = "x86"
    plain = Net(kind, num_layers=layers, bidirectional=bidirectional).eval()
    net = torch.ao.quantization.quantize_dynamic(plain, {kind}, torch.qint8)
    torch.save(net.state_dict(), tmp_path / "state.pt")
    for model in (load(as_script(tmp_path, trace(net, X))), load(tmp_path / "state.pt")):
        assert [r.cell.kind for r in model.recurrences()] == [plain.rnn.mode.lower()] * (
            layers * (1 + bidirectional)
        )
        for recurrence in model.recurrences():
            end = f"_l{recurrence.layer}{'_reverse' if recurrence.reverse else ''}"
            stored = net.rnn.get_weight()[f"weight_hh{end}"].dequantize()
            assert torch.equal(recurrence.cell.U, stored.double())
        assert all(r.rounded for r in model.recurrences())
        assert not model.whole
        assert [f.id for f in model.findings if f.id == "RA127"] == ["RA127"]
        y = run_stack(model.stacks[0], X.double())
        assert (y - net(X)).abs().max() < 0.05


def test_packed_directions_that_cannot_be_told_are_not_guessed(tmp_path: Path) -> None:
    if "x86" not in torch.backends.quantized.supported_engines:
        pytest.skip("no quantised engine on this machine")
    torch.backends.quantized.engine = "x86"
    net = nn.ModuleDict({"rnn": nn.GRU(4, 4, num_layers=2)})
    packed = torch.ao.quantization.quantize_dynamic(net, {nn.GRU}, torch.qint8)
    torch.save(packed.state_dict(), tmp_path / "state.pt")
    with pytest.raises(UnsupportedModelError, match=r"rnn: .* fit one layer in two directions"):
        load(tmp_path / "state.pt")


def test_a_script_saved_in_training_mode_drops_units_until_eval(tmp_path: Path) -> None:
    net = Net(nn.LSTM, num_layers=2, dropout=0.5)
    [said] = load(as_script(tmp_path, script(net.train()))).findings
    assert said.id == "RA125"
    assert "drops 0.5 of what passes between its layers until eval()" in said.message
    assert load(as_script(tmp_path, script(net.eval()))).findings == ()


def test_the_code_of_an_archive_is_never_run(tmp_path: Path) -> None:
    path = as_script(tmp_path, script(Net(nn.GRU)))
    poisoned = tmp_path / "poisoned.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(poisoned, "w") as new:
        for entry in old.infolist():
            record = old.read(entry)
            new.writestr(entry.filename, b"raise(" if "/code/" in entry.filename else record)
    assert len(load(poisoned).stacks) == 1


# torch.export.


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_an_exported_program_is_read_and_its_fixed_length_said(
    tmp_path: Path, kind: type[nn.RNNBase]
) -> None:
    net = Net(kind, num_layers=2).eval()
    model = load(as_export(tmp_path, net))
    assert model.format == "torch.export"
    [finding] = model.findings
    assert (finding.id, finding.where) == ("RA126", "rnn")
    assert "sequences of 7 steps" in finding.message
    agrees(model, net)


def test_an_exported_program_says_nonlinearity_and_dropout(tmp_path: Path) -> None:
    net = Net(nn.RNN, nonlinearity="relu", num_layers=2, dropout=0.25).train()
    model = load(as_export(tmp_path, net))
    assert [finding.id for finding in model.findings] == ["RA125", "RA126"]
    assert {r.cell.options["activation"] for r in model.recurrences()} == {"relu"}
    agrees(model, net)


def test_an_older_export_keeps_its_state_dict_in_one_record(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    net = Net(nn.GRU)
    torch.save(net.state_dict(), buffer)
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        archive.writestr("version", "8.5")
        archive.writestr("serialized_state_dict.pt", buffer.getvalue())
    agrees(load(tmp_path / "m.pt2"), net)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sizes": [{"as_int": 10**9}, {"as_int": 4}]}, "claims 4000000000 elements, and 48 are"),
        ({"sizes": [{"as_int": -1}, {"as_int": 4}]}, "damaged torch.export archive"),
        ({"strides": [{"as_int": 10**6}, {"as_int": 1}]}, "damaged torch.export archive"),
        ({"sizes": 3}, "damaged torch.export archive"),
        ({"dtype": 5}, "rnn.weight_hh_l0 in .* is not stored as plain floating-point numbers"),
    ],
)
def test_sizes_that_lie_are_refused(tmp_path: Path, change: dict[str, object], match: str) -> None:
    path, lying = as_export(tmp_path, Net(nn.GRU).eval()), tmp_path / "lying.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(lying, "w") as new:
        for entry in old.infolist():
            record = old.read(entry)
            if entry.filename.endswith("model_weights_config.json"):
                config = json.loads(record)
                config["config"]["rnn.weight_hh_l0"]["tensor_meta"] |= change
                record = json.dumps(config).encode()
            new.writestr(entry.filename, record)
    with pytest.raises((LoadError, UnsupportedModelError), match=match):
        load(lying)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("originals")
    net = Net(nn.RNN, num_layers=2).eval()
    return [
        as_script(folder, trace(net, X)).read_bytes(),
        as_script(folder, script(net)).read_bytes(),
        as_export(folder, net).read_bytes(),
    ]


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    which=st.integers(0, 2),
    edits=st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4)), min_size=1, max_size=4),
    repack=st.booleans(),
)
def test_damage_of_any_kind_ends_in_a_model_or_in_one_line(
    tmp_path: Path,
    originals: list[bytes],
    which: int,
    edits: list[tuple[float, bytes]],
    repack: bool,
) -> None:
    path = tmp_path / "m.pt"
    if repack:  # damage within the records, so that checksums do not catch it
        with (
            zipfile.ZipFile(io.BytesIO(originals[which])) as old,
            zipfile.ZipFile(path, "w") as new,
        ):
            for entry in old.infolist():
                new.writestr(entry.filename, damaged(old.read(entry), edits))
    else:
        path.write_bytes(damaged(originals[which], edits))
    try:
        load(path)
        line = ""
    except RnnauditError as error:
        line = str(error)
    assert "\n" not in line


def damaged(data: bytes, edits: list[tuple[float, bytes]]) -> bytes:
    changed = bytearray(data)
    for where, patch in edits:
        at = int(where * len(changed))
        changed[at : at + len(patch)] = patch
    return bytes(changed)
