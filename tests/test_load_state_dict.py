"""A state_dict holds its recurrences by name and shape; read back, they compute what torch does."""

from __future__ import annotations

import argparse
import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from rnnaudit.cells import run_stack
from rnnaudit.errors import LoadError, UnsupportedModelError
from rnnaudit.loaders import load
from rnnaudit.model import ElmanCell, GRUCell, LSTMCell, Model, Stack

Saved = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """Save an object with torch, under a name."""

    def save(checkpoint: object, name: str = "model.pt", **options: bool) -> Path:
        torch.save(checkpoint, tmp_path / name, **options)
        return tmp_path / name

    return save


def outputs(module: nn.Module, x: Tensor) -> Tensor:
    """Run torch's own module in float64."""
    with torch.no_grad():
        return copy.deepcopy(module).double().eval()(x)[0]


def only(model: Model) -> Stack:
    [stack] = model.stacks
    return stack


def inputs(width: int, seed: int = 1) -> Tensor:
    return torch.randn(2, 6, width, generator=torch.Generator().manual_seed(seed)).double()


def ids(model: Model) -> list[str]:
    return [finding.id for finding in model.findings]


def lstm_and_head() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"rnn": nn.LSTM(3, 4, num_layers=2, batch_first=True), "head": nn.Linear(4, 2)}
    )


# What torch computes, over random modules.


SHAPES = st.fixed_dictionaries(
    {
        "input_size": st.integers(1, 5),
        "hidden_size": st.integers(1, 6),
        "num_layers": st.integers(1, 3),
        "bias": st.booleans(),
        "bidirectional": st.booleans(),
        "dtype": st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    }
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from([nn.RNN, nn.GRU, nn.LSTM]),
    shape=SHAPES,
    projection=st.integers(0, 5),
    zipped=st.booleans(),
)
def test_a_saved_module_is_read_back_to_the_last_digit(
    saved: Saved, kind: type[nn.RNNBase], shape: dict[str, Any], projection: int, zipped: bool
) -> None:
    if kind is nn.LSTM and projection < shape["hidden_size"]:
        shape = shape | {"proj_size": projection}
    module = kind(**shape, batch_first=True)
    model = load(saved(module.state_dict(), _use_new_zipfile_serialization=zipped))
    assert (model.dtype, model.whole, model.skipped) == (str(shape["dtype"])[6:], True, ())
    x = inputs(shape["input_size"])
    assert (run_stack(only(model), x) - outputs(module, x)).abs().max() <= 1e-12


@pytest.mark.parametrize(
    ("kind", "cell"), [(nn.RNNCell, ElmanCell), (nn.GRUCell, GRUCell), (nn.LSTMCell, LSTMCell)]
)
@pytest.mark.parametrize("hidden", [1, 3, 4, 12])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_the_kind_is_told_from_rows_per_unit_even_where_sizes_coincide(
    saved: Saved, kind: type[nn.RNNCellBase], cell: type, hidden: int, width: int
) -> None:
    module = kind(width, hidden)
    stack = only(load(saved(module.state_dict())))
    [layer] = stack.layers
    found = layer.recurrences[0].cell
    assert (type(found), found.input_size, found.hidden_size) == (cell, width, hidden)
    x, state = inputs(width), None
    with torch.no_grad():
        for t in range(x.shape[1]):
            state = module.double()(x[:, t], state)
    h = state[0] if isinstance(state, tuple) else state
    assert (run_stack(stack, x)[:, -1] - h).abs().max() <= 1e-12


def test_a_projection_is_sized_by_the_rows_of_weight_hh(saved: Saved) -> None:
    cell = only(load(saved(nn.LSTM(3, 8, proj_size=3).state_dict()))).layers[0].recurrences[0].cell
    assert isinstance(cell, LSTMCell)
    assert (cell.hidden_size, cell.cell_size, cell.state_size) == (3, 8, 11)


def test_dropout_between_layers_is_not_applied(saved: Saved) -> None:
    module = nn.GRU(3, 4, num_layers=2, dropout=0.5, batch_first=True)
    x = inputs(3)
    assert (
        run_stack(only(load(saved(module.state_dict()))), x) - outputs(module, x)
    ).abs().max() < 1e-12


# Containers and wrappers.


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.tar", "pytorch_model.bin", "x"])
@pytest.mark.parametrize("zipped", [True, False])
def test_the_container_is_recognised_whatever_its_name(
    saved: Saved, name: str, zipped: bool
) -> None:
    path = saved(lstm_and_head().state_dict(), name, _use_new_zipfile_serialization=zipped)
    model = load(str(path))
    assert model.format == "PyTorch state_dict"
    assert only(model).name == "rnn"
    assert len(model.sha256) == 64


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "cer": 0.25, "charset": "abc"},
        lambda state: {"model_state": state},
        lambda state: {"model_state_dict": state},
        lambda state: {"checkpoint": {"net": {"module": state}}},
        lambda state: {"epoch": 1, "models": [state]},
        lambda state: {f"module.{key}": value for key, value in state.items()},
        lambda state: {f"_orig_mod.module.{key}": value for key, value in state.items()},
        lambda state: {"state_dict": {f"model.net.{k}": v for k, v in state.items()}},
    ],
)
def test_wrappers_and_prefixes_change_nothing(
    saved: Saved, wrap: Callable[[Mapping[str, Tensor]], object]
) -> None:
    module = lstm_and_head()
    x = inputs(3)
    plain = only(load(saved(module.state_dict())))
    wrapped = only(load(saved(wrap(module.state_dict()), "wrapped.pt")))
    assert wrapped.name.endswith("rnn")
    assert wrapped.readout is not None
    assert wrapped.readout.name.endswith("head")
    assert torch.equal(run_stack(wrapped, x), run_stack(plain, x))


def test_optimizer_moments_are_no_weights(saved: Saved) -> None:
    module = lstm_and_head()
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    named = {f"moments.{name}": torch.zeros_like(p) for name, p in module.named_parameters()}
    model = load(
        saved(
            {
                "model": module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "trainer": {"state": named, "param_groups": []},
                "optim_by_name": named,
            }
        )
    )
    assert [stack.name for stack in model.stacks] == ["rnn"]
    assert model.whole


def test_harmless_objects_beside_the_weights_do_not_block_them(saved: Saved) -> None:
    checkpoint = {
        "state_dict": lstm_and_head().state_dict(),
        "hyper_parameters": argparse.Namespace(hidden=4, layers=2),
        "best": np.float64(0.5),
        "history": np.zeros(3),
        "dir": Path("runs"),
        "pytorch-lightning_version": "2.6.2",
    }
    assert only(load(saved(checkpoint, "model.ckpt"))).name == "rnn"


def test_of_weights_and_their_average_the_weights_are_read_and_the_other_is_named(
    saved: Saved,
) -> None:
    module, average = nn.GRU(3, 4), nn.GRU(3, 4)
    state = OrderedDict(
        {f"ema.encoder.{key}": value for key, value in average.state_dict().items()}
        | {f"model.module.encoder.{key}": value for key, value in module.state_dict().items()}
    )
    model = load(saved({"state_dict": state}))
    [stack] = model.stacks
    assert stack.name == "encoder"
    assert torch.equal(stack.layers[0].recurrences[0].cell.U, module.weight_hh_l0.double())
    [finding] = model.findings
    assert finding.id == "RA120"
    assert "state_dict.ema.encoder was not" in finding.message


def test_a_module_under_two_names_is_read_once(saved: Saved) -> None:
    shared = nn.GRU(3, 4)
    model = load(saved(nn.ModuleDict({"encoder": shared, "decoder": shared}).state_dict()))
    assert [stack.name for stack in model.stacks] == ["encoder"]
    assert "decoder is the same tensors" in model.findings[0].message


def test_every_stack_of_a_file_is_found_and_none_is_the_whole(saved: Saved) -> None:
    modules = nn.ModuleDict(
        {
            "encoder": nn.LSTM(3, 4, bidirectional=True),
            "cells": nn.ModuleList([nn.GRUCell(8, 5), nn.RNNCell(5, 2)]),
            "head": nn.Linear(2, 7),
        }
    )
    model = load(saved(modules.state_dict()))
    assert [stack.name for stack in model.stacks] == ["encoder", "cells.0", "cells.1"]
    assert [r.label for r in model.recurrences()] == [
        "encoder[0]",
        "encoder[0] reverse",
        "cells.0[0]",
        "cells.1[0]",
    ]
    assert not model.whole
    assert model.stacks[-1].readout is not None


# safetensors.


def test_safetensors_are_read_like_a_state_dict(tmp_path: Path) -> None:
    module = lstm_and_head()
    save_file(module.state_dict(), tmp_path / "weights.bin")
    model = load(tmp_path / "weights.bin")
    x = inputs(3)
    assert model.format == "safetensors"
    assert model.whole
    stack = only(model)
    h = outputs(module["rnn"], x)
    assert (run_stack(stack, x) - module["head"].double()(h)).abs().max() <= 1e-12


def test_the_order_of_safetensors_says_nothing_about_what_follows(tmp_path: Path) -> None:
    modules = nn.ModuleDict({"a_first": nn.Linear(2, 4), "rnn": nn.GRU(4, 4), "z": nn.Linear(4, 2)})
    save_file(modules.state_dict(), tmp_path / "m.safetensors")
    model = load(tmp_path / "m.safetensors")
    assert only(model).readout is None
    assert ids(model) == ["RA122"]


# The readout.


def test_one_linear_layer_after_the_recurrence_is_its_readout(saved: Saved) -> None:
    module = lstm_and_head()
    model = load(saved(module.state_dict()))
    stack = only(model)
    assert stack.readout is not None
    assert (stack.readout.name, stack.output_size, model.whole) == ("head", 2, True)
    x = inputs(3)
    expected = module["head"].double()(outputs(module["rnn"], x))
    assert (run_stack(stack, x) - expected).abs().max() <= 1e-12


def test_a_readout_without_bias_has_zero_bias(saved: Saved) -> None:
    modules = nn.ModuleDict({"rnn": nn.GRU(3, 4), "out": nn.Linear(4, 2, bias=False)})
    readout = only(load(saved(modules.state_dict()))).readout
    assert readout is not None
    assert not readout.b.any()


def test_layers_before_the_recurrence_leave_the_readout_but_not_the_whole(saved: Saved) -> None:
    modules = nn.ModuleDict(
        {"embedding": nn.Embedding(9, 4), "rnn": nn.GRU(4, 4), "out": nn.Linear(4, 9)}
    )
    model = load(saved(modules.state_dict()))
    assert only(model).readout is not None
    assert not model.whole


@pytest.mark.parametrize(
    "after",
    [
        {"norm": nn.LayerNorm(4), "out": nn.Linear(4, 2)},
        {"attention": nn.Linear(4, 1), "out": nn.Linear(4, 2)},
        {"out": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))},
        {"out": nn.Linear(8, 2)},
        {"out": nn.Conv1d(4, 2, 1)},
    ],
    ids=["normalised", "two that fit", "two layers", "another width", "convolution"],
)
def test_whatever_could_be_meant_otherwise_is_no_readout(
    saved: Saved, after: dict[str, nn.Module]
) -> None:
    model = load(saved(nn.ModuleDict({"rnn": nn.GRU(3, 4), **after}).state_dict()))
    assert only(model).readout is None
    assert not model.whole
    [finding] = model.findings
    assert finding.id == "RA122"
    assert next(iter(after)) in finding.message


# What the file does not say.


def test_an_assumed_nonlinearity_is_a_finding(saved: Saved) -> None:
    model = load(saved(nn.RNN(3, 4, nonlinearity="relu").state_dict()))
    [finding] = model.findings
    assert (finding.id, finding.where) == ("RA121", "elman")
    assert "tanh is assumed, and ReLU is possible" in finding.message


@pytest.mark.parametrize(("value", "id_"), [(1.0, "RA123"), (0.0, "RA124")])
def test_an_initial_state_beside_the_weights_is_a_finding(
    saved: Saved, value: float, id_: str
) -> None:
    module = nn.ModuleDict({"rnn": nn.GRU(3, 4)})
    module.register_parameter("h0", nn.Parameter(torch.full((1, 1, 4), value)))
    model = load(saved(module.state_dict()))
    assert (id_, "h0") in [(finding.id, finding.where) for finding in model.findings]
    assert not model.whole


# Weights that are computed from others.


def trained(module: nn.Module) -> nn.Module:
    """Move every parameter, so that no normalisation is the identity."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval()


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_is_rebuilt(saved: Saved, dim: int | None) -> None:
    old, new = nn.GRUCell(3, 4), nn.GRUCell(3, 4)
    for name in ("weight_ih", "weight_hh"):
        nn.utils.weight_norm(old, name, dim=dim)
        if dim is not None:
            parametrizations.weight_norm(new, name, dim=dim)
    for i, module in enumerate((trained(old), trained(new))):
        cell = only(load(saved(module.state_dict(), f"{i}.pt"))).layers[0].recurrences[0].cell
        old_names = i == 0
        if old_names:  # the hook computes the weight on the way into forward
            module(torch.zeros(1, 3))
        assert isinstance(cell, GRUCell)
        assert torch.allclose(cell.U, module.weight_hh.double(), rtol=1e-6)
        assert torch.allclose(cell.W, module.weight_ih.double(), rtol=1e-6)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell])
@pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_spectral_norm_is_rebuilt_as_in_eval_mode(
    saved: Saved, kind: type[nn.RNNCellBase], wrap: Callable[..., nn.Module]
) -> None:
    module = trained(wrap(kind(3, 4), "weight_hh"))
    cell = only(load(saved(module.state_dict()))).layers[0].recurrences[0].cell
    module(torch.zeros(1, 3))
    recurrent = cell.W if isinstance(cell, ElmanCell) else cell.U
    assert torch.equal(recurrent, module.weight_hh.detach().double())


def test_a_head_under_weight_norm_is_still_the_readout(saved: Saved) -> None:
    head = trained(parametrizations.weight_norm(nn.Linear(4, 2)))
    readout = only(load(saved(nn.ModuleDict({"rnn": nn.GRU(3, 4), "out": head}).state_dict())))
    assert readout.readout is not None
    assert torch.equal(readout.readout.A, head.weight.detach().double())


def test_the_raw_weight_of_weight_drop_is_the_one_of_eval_mode(saved: Saved) -> None:
    state = {f"rnns.0.module.{key}": value for key, value in nn.LSTM(3, 4).state_dict().items()}
    raw = torch.randn(16, 4)
    model = load(saved({"rnns.0.weight_hh_l0_raw": raw, **state}))
    assert torch.equal(only(model).layers[0].recurrences[0].cell.U, raw.double())
    plain = nn.GRU(3, 4).state_dict()
    model = load(saved({**plain, "weight_hh_l0_raw": raw[:12]}, "plain.pt"))
    assert torch.equal(only(model).layers[0].recurrences[0].cell.U, raw[:12].double())


# One bad module is skipped with its reason; where nothing is left, that is the error.


def defects() -> dict[str, tuple[dict[str, Tensor], str]]:
    gru = nn.GRU(3, 4, num_layers=2).state_dict()
    without = {key: value for key, value in gru.items() if "l0" not in key}
    return {
        "rows": (
            gru | {"weight_hh_l0": torch.zeros(8, 4)},
            r"weight_hh of shape \(8, 4\) has 2 rows for each unit; an RNN has 1, a GRU 3",
        ),
        "input rows": (gru | {"weight_ih_l0": torch.zeros(9, 3)}, "the shapes do not fit together"),
        "vector": (
            gru | {"weight_hh_l0": torch.zeros(12)},
            r"weight_hh_l0 must be a matrix, got shape \(12,\)",
        ),
        "missing": (
            {key: value for key, value in gru.items() if key != "weight_ih_l1"},
            "weight_ih_l1 is missing",
        ),
        "one bias": (
            {key: value for key, value in gru.items() if key != "bias_hh_l1"},
            "one of bias_ih_l1 and bias_hh_l1 is missing",
        ),
        "bias length": (
            gru | {"bias_hh_l0": torch.zeros(3)},
            r"bias_hh must have the 12 rows of weight_hh, got shape \(3,\)",
        ),
        "bias of one": (
            gru | {"bias_ih_l0": torch.zeros(1)},
            r"bias_ih must have the 12 rows of weight_hh, got shape \(1,\)",
        ),
        "Elman bias": (
            nn.RNN(3, 4).state_dict() | {"bias_hh_l0": torch.zeros(5)},
            r"bias_hh must have the 4 rows of weight_hh, got shape \(5,\)",
        ),
        "jagged": (
            gru
            | {
                "weight_hh_l0": torch.nested.nested_tensor(
                    [torch.zeros(4), torch.zeros(3)], layout=torch.jagged
                )
            },
            "weight_hh_l0: it is a nested tensor",
        ),
        "gap": (without, "layer 0 of 2 is missing"),
        "width": (
            gru | {"weight_ih_l1": torch.zeros(12, 5)},
            "layer 1 reads 5 inputs, and layer 0 gives 4",
        ),
        "direction": (
            gru | {"weight_hh_l0_reverse": torch.zeros(12, 4)},
            "weight_ih_l0_reverse is missing",
        ),
        "projection": (
            gru | {"weight_hr_l0": torch.zeros(2, 2)},
            r"a projection weight_hr of shape \(2, 2\) does not fit weight_hh of shape \(12, 4\)",
        ),
        "integers": (
            gru | {"weight_hh_l0": torch.zeros(12, 4, dtype=torch.int64)},
            "weight_hh_l0 must be dense float16, bfloat16, float32 or float64, got int64",
        ),
        "complex": (
            gru | {"weight_hh_l0": torch.zeros(12, 4, dtype=torch.complex64)},
            "got complex64",
        ),
        "sparse": (gru | {"weight_hh_l0": torch.eye(12, 4).to_sparse()}, "got sparse_coo"),
        "own parameter": (
            gru | {"peephole": torch.zeros(4)},
            "peephole is no parameter of nn.RNN, nn.GRU or nn.LSTM",
        ),
        "parametrisation": (
            {k: v for k, v in gru.items() if k != "weight_hh_l0"}
            | {
                "parametrizations.weight_hh_l0.original": torch.eye(12, 4),
                "parametrizations.weight_hh_l0.0.base": torch.eye(12, 4),
            },
            "the parametrisation stored as 0.base, original is not known",
        ),
        "norm": (
            {k: v for k, v in gru.items() if k != "weight_hh_l0"}
            | {"weight_hh_l0_g": torch.ones(5, 1), "weight_hh_l0_v": torch.ones(12, 4)},
            "weight_hh_l0: its parts do not fit together",
        ),
    }


@pytest.mark.parametrize("defect", list(defects()))
def test_a_module_that_cannot_be_read_is_skipped_with_its_reason(saved: Saved, defect: str) -> None:
    state, reason = defects()[defect]
    with pytest.raises(UnsupportedModelError, match=reason):
        load(saved(state))
    beside = {f"bad.{key}": value for key, value in state.items()}
    good = {f"good.{key}": value for key, value in nn.LSTM(3, 4).state_dict().items()}
    model = load(saved(beside | good, "beside.pt"))
    assert [stack.name for stack in model.stacks] == ["good"]
    [skip] = model.skipped
    assert skip.where == "bad"
    assert skip.reason
    assert not model.whole


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_a_quantised_weight_is_dequantised_and_that_is_said(saved: Saved) -> None:
    state = nn.GRUCell(3, 4).state_dict()
    state["weight_hh"] = torch.quantize_per_tensor(torch.ones(12, 4), 0.5, 0, torch.qint8)
    model = load(saved(state))
    [recurrence] = model.recurrences()
    assert (recurrence.cell.U == 1).all()
    assert recurrence.rounded
    assert not model.whole
    assert "RA127" in ids(model)


def test_a_layer_normalised_cell_is_not_taken_for_a_plain_one(saved: Saved) -> None:
    state = {f"cell.{key}": value for key, value in nn.LSTMCell(3, 4).state_dict().items()}
    with pytest.raises(UnsupportedModelError, match=r"cell.ln_i.weight is no parameter of"):
        load(saved(state | {"cell.ln_i.weight": torch.ones(4)}))


def test_a_file_without_recurrence_says_what_was_looked_at(saved: Saved) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"none of its 4 tensors is a recurrent weight weight_hh "
        r"\(0.weight, 0.bias, 1.weight and 1 more\)",
    ) as caught:
        load(saved(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).state_dict()))
    assert (caught.value.id, caught.value.exit_code) == ("RA105", 3)
    with pytest.raises(UnsupportedModelError, match="it holds no named tensors at all"):
        load(saved({"epoch": 3}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["rnn.weight_hh_l1", "rnn.bias_ih_l0", "head.weight"])
def test_a_weight_that_is_no_number_is_named(saved: Saved, name: str, value: float) -> None:
    state = lstm_and_head().state_dict()
    state[name].view(-1)[-1] = value
    with pytest.raises(
        LoadError, match=rf"finite weights were expected, and {name} holds"
    ) as caught:
        load(saved(state))
    assert caught.value.id == "RA104"
