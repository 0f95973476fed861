"""The public API refuses arguments that make no sense before any work is done."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import rnnaudit
from rnnaudit.errors import LoadError, UnsupportedModelError, UsageError
from rnnaudit.reports import JsonRenderer


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "model.pt"
    torch.save(torch.nn.RNN(2, 3).state_dict(), path)
    return path


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eps": 0.0}, "ε must be a positive finite number, got 0.0"),
        ({"eps": float("nan")}, "ε must be a positive finite number, got nan"),
        ({"norm": "1"}, "the norm must be max or 2, got '1'"),
        ({"confidence": 1.0}, "the confidence must be between 0 and 1, got 1.0"),
        ({"time_budget": -1.0}, "the time budget must be a positive number of seconds, got -1.0"),
        ({"layer": "nothing"}, r"--layer must be part of one of elman\[0\], got 'nothing'"),
    ],
)
def test_an_audit_refuses_what_makes_no_sense(model, settings, words):
    with pytest.raises(UsageError, match=words):
        rnnaudit.audit(model, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"depth": 0}, "--depth must be at least 1, got 0"),
        ({"max_depth": 0}, "--max-depth must be at least 1, got 0"),
    ],
)
def test_a_truncation_refuses_a_depth_below_one(model, tmp_path, settings, words):
    output = tmp_path / "out.onnx"
    with pytest.raises(UsageError, match=words):
        rnnaudit.truncate(model, output, **settings)
    assert not output.exists()


def test_data_may_be_a_path_of_either_kind(model, tmp_path):
    np.save(tmp_path / "wide.npy", np.zeros((4, 9, 5)))
    for data in (tmp_path / "wide.npy", str(tmp_path / "wide.npy")):
        with pytest.raises(LoadError, match="must have 2 features per step, got 5"):
            rnnaudit.audit(model, data=data)


def test_data_of_another_width_are_told_what_to_do(model, tmp_path):
    turned = np.zeros((4, 2, 9))
    np.save(tmp_path / "turned.npy", turned)
    with pytest.raises(LoadError, match=r"got 9 from arrays; each has 2 steps: transpose them"):
        rnnaudit.audit(model, data=turned)
    with pytest.raises(LoadError, match=r"got 9 .*; each has 2 steps: name .* with --time-axis"):
        rnnaudit.audit(model, data=tmp_path / "turned.npy")
    layers = {"embed": torch.nn.Linear(5, 2), "rnn": torch.nn.RNN(2, 3)}
    torch.save(torch.nn.ModuleDict(layers).state_dict(), model)
    with pytest.raises(LoadError, match=r"what rnn itself reads, or audit an ONNX export"):
        rnnaudit.audit(model, data=np.zeros((4, 9, 5)))


def test_of_several_keys_one_is_named_x(model, tmp_path):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 20, 2))
    np.savez(tmp_path / "two.npz", a=a, b=b)
    np.savez(tmp_path / "named.npz", a=a, x=b)
    np.savez(tmp_path / "one.npz", b=b)
    with pytest.raises(LoadError, match=r"one key, or name one x, got a, b from .*two\.npz") as no:
        rnnaudit.audit(model, data=tmp_path / "two.npz")
    assert no.value.id == "RA107"
    named, one = (rnnaudit.audit(model, data=tmp_path / f"{n}.npz") for n in ("named", "one"))
    assert named.recurrences[0].curve == one.recurrences[0].curve


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64])
def test_a_seed_that_no_generator_takes_is_refused(model, seed):
    with pytest.raises(UsageError, match=f"the seed must be from 0 to 2⁶³ − 1, got {seed}"):
        rnnaudit.audit(model, seed=seed)


def test_no_depth_is_planned_below_what_float64_tells_apart(model, tmp_path):
    with pytest.raises(
        UnsupportedModelError, match="ε / 2 is below what float64 tells of it on synthetic"
    ):
        rnnaudit.truncate(model, tmp_path / "out.onnx", eps=1e-301)


def test_what_is_proved_to_forget_slowly_is_not_called_unstable(tmp_path):
    one = torch.ones(1, 1)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    torch.save(
        dict(zip(names, (one, 0.97 * one, 0 * one[0], 0 * one[0]), strict=True)), tmp_path / "m.pt"
    )
    report = rnnaudit.audit(tmp_path / "m.pt", eps=1e-6, input_range=(-0.01, 0.01))
    assert report.depth.proved is not None
    assert report.depth.proved > 256
    assert report.verdict == "stable"


def test_one_number_is_spelled_one_way(model, tmp_path):
    np.save(tmp_path / "few.npy", np.zeros((4, 40, 2)))
    report = rnnaudit.audit(model, data=tmp_path / "few.npy", confidence=0.999, eps=1e-3)
    (few,) = (f for f in report.findings if f.id == "RA203")
    # 1 − 0.001^¼ = 82.2 %
    assert (
        few.message
        == "4 sequences: at 99.9\u00a0% confidence up to 83\u00a0% of others may exceed ε"
    )
    latch = Path(__file__).parent.parent / "sample_models" / "latch.onnx"
    report = rnnaudit.audit(latch, eps=1e-3, input_range=(-1 / 3, 0.1))
    assert report.domain == "-0.3333333333333333 ≤ x ≤ 0.1"
    (longer,) = (f for f in report.findings if f.id == "RA202")
    assert longer.message.startswith("k(1e-3) is longer")


def test_a_model_may_import_the_operators_by_their_long_name(tmp_path):
    latch = onnx.load(Path(__file__).parent.parent / "sample_models" / "latch.onnx")
    latch.opset_import[0].domain = "ai.onnx"
    onnx.save(latch, tmp_path / "latch.onnx")
    report = rnnaudit.truncate(tmp_path / "latch.onnx", tmp_path / "out.onnx", depth=3)
    assert report.export.opset == 17


@pytest.mark.parametrize("form", ["array", "tensor", "list", "mapping", "file"])
def test_sequences_come_from_memory_as_from_a_file(model, tmp_path, form):
    x = np.random.default_rng(0).uniform(-1, 1, (4, 30, 2))
    np.save(tmp_path / "x.npy", x)
    data = {
        "array": x,
        "tensor": torch.from_numpy(x),
        "list": list(x),
        "mapping": {"x": x},
        "file": tmp_path / "x.npy",
    }[form]
    measured = rnnaudit.audit(model, data=data).depth.measured
    assert measured == rnnaudit.audit(model, data=str(tmp_path / "x.npy")).depth.measured
    assert measured.sequences == 4


def test_what_is_no_model_or_no_data_is_refused_by_what_it_is(model):
    with pytest.raises(
        rnnaudit.UsageError,
        match=r"must be a path, an nn\.Module or what .* returns, got OrderedDict",
    ):
        rnnaudit.audit(torch.nn.RNN(2, 3).state_dict())
    with pytest.raises(rnnaudit.LoadError, match="wanted an array of numbers"):
        rnnaudit.audit(model, data=["a", "b"])


def test_the_package_names_what_is_public():
    assert {"LoadError", "Report", "audit", "truncate", "verify"} <= set(dir(rnnaudit))
    assert all(hasattr(rnnaudit, name) for name in dir(rnnaudit))


WRONG = {
    "a number": ("eps", "confidence", "exceed", "time_budget"),
    "a whole number": ("seed", "depth", "max_depth", "steps", "opset"),
    "a path": ("witness", "candidate", "weights"),
    "a text": ("layer",),
    "a pair of finite numbers": ("input_range",),
    "(proved|max|auto)": ("evidence", "norm", "form"),
}


def functions(path, tmp_path):
    """Return each function of the API, the arguments that it needs, and names of others."""
    settings = {"eps", "seed", "time_budget"}
    measured = {*settings, "confidence", "exceed", "layer", "input_range"}
    cut = {*measured, "depth", "max_depth", "steps", "evidence", "form"}
    proof, written = tmp_path / "proof.json", tmp_path / "cut.onnx"
    module = torch.nn.RNN(2, 3)
    return [
        (rnnaudit.audit, (path,), {*measured, "norm", "witness"}),
        (rnnaudit.truncate, (path, written), {*cut, "opset"}),
        (rnnaudit.truncate, (module,), cut),
        (rnnaudit.truncate_module, (module,), cut),
        (rnnaudit.verify, (path, written), settings),
        (rnnaudit.certify, (path, proof), {*settings, "norm", "layer", "input_range"}),
        (rnnaudit.load, (path,), {"weights"}),
    ]


@pytest.mark.parametrize("value", ["a", [1], (1, 2, 3), True, 1j, {}, b"x", torch.tensor(0.1)])
def test_an_argument_of_the_wrong_kind_is_refused_in_one_line(model, tmp_path, value):
    for function, given, names in functions(model, tmp_path):
        for kind, of_it in WRONG.items():
            for name in names.intersection(of_it):
                if isinstance(value, str) and kind in {"a path", "a text"}:
                    continue
                with pytest.raises(UsageError, match=rf"{name} must be {kind}") as refused:
                    function(*given, **{name: value})
                assert ", got " in str(refused.value)
                assert refused.value.help


@pytest.mark.parametrize("ends", [(1, 0), (0, 0), (0, float("inf")), (float("nan"), 1), (1,), 3])
def test_a_range_of_inputs_is_a_pair_of_finite_numbers_in_order(model, ends):
    with pytest.raises(UsageError, match="input_range must be a pair of finite numbers"):
        rnnaudit.audit(model, input_range=ends)


def test_nothing_is_no_value_of_a_setting_that_needs_one(model, tmp_path):
    for function, given, names in functions(model, tmp_path):
        for name in names & {"eps", "seed", "confidence"}:
            with pytest.raises(UsageError, match=f"{name} must be a"):
                function(*given, **{name: None})
    with pytest.raises(UsageError, match=r"what rnnaudit\.load returns, got int"):
        rnnaudit.load(3)


def test_numbers_of_numpy_are_numbers(model, tmp_path):
    settings = {"eps": np.float32(0.5), "seed": np.int64(1), "time_budget": np.float64(1.0)}
    report = rnnaudit.truncate(model, tmp_path / "cut.onnx", depth=np.int64(3), **settings)
    again = rnnaudit.audit(model, exceed=np.float32(0.5), **settings)
    assert [type(report.settings[n]) for n in ("eps", "seed")] == [float, int]
    for each in (report, again):
        assert JsonRenderer().render(each)
