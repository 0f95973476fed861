"""Activations have ONNX Runtime's values, exact slopes in saturation, and intervals that hold."""

from __future__ import annotations

import math

import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from rnnaudit.cells.activations import (
    NAMES,
    TAKES_ALPHA,
    TAKES_BETA,
    clipped_complement,
    clipped_slope,
    clipped_value,
    parameters,
    slope,
    slope_interval,
    value,
)
from rnnaudit.errors import UnsupportedModelError
from rnnaudit.model import Activation
from tests import strategies
from tests.references import close
from tests.strategies import ACTIVATIONS

finite = st.floats(-5, 5).map(lambda a: float(torch.tensor(a).float()))


@st.composite
def any_activation(draw: st.DrawFn) -> Activation:
    """Draw an activation with any parameters, negative ones too; None where it takes none."""
    name = draw(st.sampled_from(sorted(NAMES)))
    alpha = draw(finite | st.none()) if name in TAKES_ALPHA else None
    beta = draw(finite | st.none()) if name in TAKES_BETA else None
    return Activation(name, alpha, beta)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


GRID = torch.cat([torch.linspace(-30, 30, 601).double(), column(-700, -100, 100, 700)])


# Values

OPERATORS = {
    "tanh": ("Tanh", ()),
    "relu": ("Relu", ()),
    "sigmoid": ("Sigmoid", ()),
    "leakyrelu": ("LeakyRelu", ("alpha",)),
    "thresholdedrelu": ("ThresholdedRelu", ("alpha",)),
    "hardsigmoid": ("HardSigmoid", ("alpha", "beta")),
    "elu": ("Elu", ("alpha",)),
    "softsign": ("Softsign", ()),
    "softplus": ("Softplus", ()),
}


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_values_and_defaults_are_onnx_runtime_s_operators(name):
    operator, parameters = OPERATORS[name]
    ours = next(a for a in ACTIVATIONS if a.name == name)
    attributes = {p: getattr(ours, p) for p in parameters}
    close(value(ours, GRID), _operator(operator, attributes), 1e-5)
    close(value(Activation(name), GRID), _operator(operator, {}), 1e-5)


def _operator(name: str, attributes: dict[str, float]) -> torch.Tensor:
    graph = helper.make_graph(
        [helper.make_node(name, ["v"], ["y"], **attributes)],
        "one",
        [helper.make_tensor_value_info("v", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return torch.from_numpy(session.run(None, {"v": GRID.float().numpy()})[0]).double()


def test_affine_and_scaledtanh_are_their_formulas():
    close(value(Activation("affine", 2.0, -0.5), GRID), 2 * GRID - 0.5)
    close(value(Activation("affine"), GRID), GRID)
    close(value(Activation("scaledtanh", 1.5, 0.25), GRID), 1.5 * torch.tanh(GRID / 4))
    close(value(Activation("scaledtanh"), GRID), torch.tanh(GRID))


@pytest.mark.parametrize(
    ("activation", "filled_in"),
    [
        (Activation("tanh"), (0, 0)),
        (Activation("hardsigmoid"), (0.2, 0.5)),
        (Activation("hardsigmoid", beta=0.25), (0.2, 0.25)),
        (Activation("leakyrelu", 0.0), (0, 0)),
        (Activation("scaledtanh"), (1, 1)),
    ],
    ids=str,
)
def test_parameters_fill_in_the_defaults(activation, filled_in):
    assert parameters(activation) == filled_in


# Slopes


@settings(max_examples=150)
@given(activation=any_activation(), seed=strategies.seeds)
def test_slopes_are_autodiff_s(activation, seed):
    v = 4 * torch.randn(40, generator=strategies.generator(seed), dtype=torch.float64)
    derivative = torch.func.vmap(torch.func.grad(lambda v: value(activation, v)))
    close(slope(activation, v), derivative(v))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
def test_slopes_at_kinks_are_autodiff_s_too(activation):
    """The kinks of every kind: at 0, at ±2 (HardSigmoid ¼ v + ½) and at ½ (ThresholdedRelu)."""
    v = column(0.0, -0.0, -2.0, 2.0, 0.5)
    derivative = torch.func.vmap(torch.func.grad(lambda v: value(activation, v)))
    close(slope(activation, v), derivative(v))


def test_slopes_keep_their_digits_in_saturation():
    """Closed forms in e = exp(−|v|) that do not cancel, wherever e² does not underflow."""
    for v in (0.0, 1e-9, 0.5, 3.0, 19.0, 45.0, 150.0, 340.0):
        e = math.exp(-v)
        wanted = {
            Activation("tanh"): 4 * e**2 / (1 + e**2) ** 2,
            Activation("scaledtanh", 1.5, 2.0): 12 * e**4 / (1 + e**4) ** 2 if v < 170 else 0.0,
            Activation("sigmoid"): e / (1 + e) ** 2,
            Activation("softsign"): 1 / (1 + v) ** 2,
        }
        for activation, closed_form in wanted.items():
            for sign in (1, -1):
                got = slope(activation, column(sign * v)).item()
                assert got == pytest.approx(closed_form, rel=1e-12, abs=0), (activation, v)
        softplus = slope(Activation("softplus"), column(-v)).item()
        assert softplus == pytest.approx(e / (1 + e), rel=1e-12, abs=0)


@given(v=st.floats(-700, 700), activation=st.sampled_from(ACTIVATIONS))
def test_no_slope_is_negative_or_infinite_up_to_700(v, activation):
    got = slope(activation, column(v)).item()
    assert 0 <= got < math.inf
    assert math.isfinite(value(activation, column(v)).item())


@settings(max_examples=200)
@given(activation=any_activation(), seed=strategies.seeds, gap=st.floats(1e-6, 20))
def test_the_slope_interval_holds_every_slope_and_difference_quotient(activation, seed, gap):
    interval = slope_interval(activation)
    rng = strategies.generator(seed)
    v = 6 * torch.randn(200, generator=rng, dtype=torch.float64)
    w = v + gap * torch.rand(200, generator=rng, dtype=torch.float64) + 1e-9
    quotients = (value(activation, w) - value(activation, v)) / (w - v)
    if interval is None:
        assert activation.name == "thresholdedrelu"
        return
    lo, hi = interval
    slack = 1e-14 * (1 + value(activation, v).abs() + value(activation, w).abs()) / (w - v)
    assert (quotients >= lo - slack).all()
    assert (quotients <= hi + slack).all()
    assert (slope(activation, v) >= lo - 1e-15).all()
    assert (slope(activation, v) <= hi + 1e-15).all()


@pytest.mark.parametrize(
    ("activation", "interval"),
    [
        (Activation("tanh"), (0, 1)),
        (Activation("relu"), (0, 1)),
        (Activation("sigmoid"), (0, 0.25)),
        (Activation("affine", -2.0, 1.0), (-2, -2)),
        (Activation("leakyrelu"), (0.01, 1)),
        (Activation("leakyrelu", 3.0), (1, 3)),
        (Activation("leakyrelu", -0.5), (-0.5, 1)),
        (Activation("hardsigmoid"), (0, 0.2)),
        (Activation("scaledtanh", -2.0, 1.5), (-3, 0)),
        (Activation("elu", 2.0), (0, 2)),
        (Activation("softsign"), (0, 1)),
        (Activation("softplus"), (0, 1)),
        (Activation("thresholdedrelu", 0.0), (0, 1)),
        (Activation("thresholdedrelu"), None),
        (Activation("affine", math.inf), None),
        (Activation("leakyrelu", math.nan), None),
    ],
    ids=str,
)
def test_intervals_of_known_activations(activation, interval):
    assert slope_interval(activation) == interval


def test_thresholded_relu_jumps_by_its_threshold():
    """Its difference quotient over the jump has no bound, whatever alpha > 0 (or < 0) is."""
    for alpha in (0.5, -0.5):
        below, above = value(Activation("thresholdedrelu", alpha), column(alpha, alpha + 1e-12))
        assert abs((above - below) / 1e-12) > 1e11
        assert slope_interval(Activation("thresholdedrelu", alpha)) is None


# Clip


@settings(max_examples=60)
@given(activation=any_activation(), seed=strategies.seeds, clip=st.floats(0.01, 5))
def test_a_clip_bounds_what_the_activation_sees(activation, seed, clip):
    v = 4 * torch.randn(40, generator=strategies.generator(seed), dtype=torch.float64)
    clipped = clipped_value(activation, v, clip)
    close(clipped, value(activation, v.clamp(-clip, clip)))
    derivative = torch.func.vmap(torch.func.grad(lambda v: clipped_value(activation, v, clip)))
    close(clipped_slope(activation, v, clip), derivative(v))
    close(clipped_complement(activation, v, clip), 1 - clipped)


def test_the_slope_ends_where_the_clip_begins():
    v = column(-2.0, -1.0, 0.5, 1.0, 2.0, -math.inf, math.inf)
    close(clipped_slope(Activation("affine"), v, 1.0), column(0, 1, 1, 1, 0, 0, 0))
    assert clipped_value(Activation("tanh"), v, 1.0).abs().max() == math.tanh(1.0)
    close(clipped_slope(Activation("affine"), v[:5], None), column(1, 1, 1, 1, 1))


def test_the_complement_of_a_saturated_sigmoid_does_not_vanish():
    got = clipped_complement(Activation("sigmoid"), column(50.0), None).item()
    assert got == pytest.approx(math.exp(-50) / (1 + math.exp(-50)), rel=1e-12, abs=0)
    other = clipped_complement(Activation("hardsigmoid"), column(1.0), None).item()
    assert other == pytest.approx(0.3)


def test_an_unknown_activation_is_refused_by_name():
    message = (
        r"^activation must be one of affine, elu, hardsigmoid, leakyrelu, relu, scaledtanh, "
        r"sigmoid, softplus, softsign, tanh, thresholdedrelu, got 'swish'; "
        r"rename it to its ONNX name$"
    )
    for function in (value, slope):
        with pytest.raises(UnsupportedModelError, match=message):
            function(Activation("swish"), column(0.0))
    with pytest.raises(UnsupportedModelError, match=message):
        slope_interval(Activation("swish"))


def test_every_activation_of_the_tests_is_every_activation_there_is():
    assert {a.name for a in ACTIVATIONS} == set(NAMES)
