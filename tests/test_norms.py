"""Bounds from above are above, close, and survive the extremes of float64."""

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rnnaudit.errors import UnsupportedModelError
from rnnaudit.norms import (
    eigenvalue_below,
    gamma,
    gram_above,
    inverse_forms_above,
    proves_positive_definite,
    quotient_above,
    spectral_norm_above,
)

from .strategies import generator, normal, seeds

sizes = st.integers(1, 24)


@given(seed=seeds, m=sizes, n=sizes, exponent=st.integers(-280, 280), rank=st.integers(1, 24))
def test_the_spectral_norm_is_bounded_closely_at_every_scale(seed, m, n, exponent, rank):
    rng = generator(seed)
    A = normal(rng, m, rank) @ normal(rng, rank, n)
    norm = float(torch.linalg.matrix_norm(A, ord=2))
    bound = spectral_norm_above(A * 10.0**exponent) / 10.0**exponent
    assert norm * (1 - 1e-12) <= bound <= norm * (1 + 1e-8)


@given(seed=seeds, n=st.integers(1, 6))
def test_the_spectral_norm_is_above_what_fifty_digits_say(seed, n):
    A = normal(generator(seed), n, n)
    with mpmath.workdps(50):
        exact = mpmath.svd_r(mpmath.matrix(A.tolist()), compute_uv=False)
        assert mpmath.mpf(spectral_norm_above(A)) >= max(exact)


def test_empty_and_zero_matrices_have_norm_zero():
    assert spectral_norm_above(torch.zeros(3, 0, dtype=torch.float64)) == 0
    assert spectral_norm_above(torch.zeros(2, 3, dtype=torch.float64)) == 0


def test_the_largest_and_smallest_numbers_do_not_overflow_or_vanish():
    assert spectral_norm_above(torch.full((9, 9), 1.7e308, dtype=torch.float64)) == math.inf
    assert spectral_norm_above(torch.full((2, 2), 5e-324, dtype=torch.float64)) >= 1e-323
    assert spectral_norm_above(torch.full((4, 1), 1e-320, dtype=torch.float64)) >= 2e-320


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_of_nan_or_infinity_is_an_error(bad):
    A = torch.eye(3, dtype=torch.float64)
    A[1, 2] = bad
    with pytest.raises(UnsupportedModelError, match="finite weights, got NaN or infinity"):
        spectral_norm_above(A)


@given(seed=seeds, n=sizes, gap=st.floats(-16, -1))
def test_nothing_indefinite_is_proved_positive(seed, n, gap):
    rng = generator(seed)
    Q = torch.linalg.qr(normal(rng, n, n))[0]
    values = torch.rand(n, generator=rng, dtype=torch.float64)
    values[0] = -(10.0**gap)
    M = (Q * values) @ Q.mT
    M = (M + M.mT) / 2
    # Q D Qᵀ itself rounds, so that the smallest eigenvalue is known to about 1e-15.
    if 10.0**gap > 1e-14 * n:
        assert not proves_positive_definite(M)
    assert not proves_positive_definite(M + 10.0**gap * torch.eye(n), error=10.0**gap * 1.01)


@given(seed=seeds, n=sizes)
def test_what_is_clearly_positive_is_proved(seed, n):
    B = normal(generator(seed), n, n)
    M = B @ B.mT / n + 1e-6 * torch.eye(n, dtype=torch.float64)
    assert proves_positive_definite((M + M.mT) / 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_is_never_positive_definite(bad):
    M = torch.eye(3, dtype=torch.float64)
    assert not proves_positive_definite(M, error=bad)
    M[0, 0] = bad
    assert not proves_positive_definite(M)


def test_an_asymmetric_matrix_is_not_proved():
    assert not proves_positive_definite(torch.tensor([[2.0, 1e-16], [0.0, 2.0]]).double())


@given(seed=seeds, n=sizes, spread=st.floats(0, 4))
def test_forms_of_a_metric_are_bounded_closely(seed, n, spread):
    rng = generator(seed)
    B = normal(rng, n, n)
    scale = 10 ** (spread * (torch.rand(n, generator=rng, dtype=torch.float64) - 0.5))
    P = scale[:, None] * (B @ B.mT / n + 0.1 * torch.eye(n)) * scale
    P = (P + P.mT) / 2
    A = normal(rng, 3, n)
    inverse = torch.linalg.inv(P)
    exact = torch.einsum("oi,ij,oj->o", A, inverse, A)
    bound = inverse_forms_above(P, A)
    assert (bound >= exact * (1 - 1e-10)).all()
    assert (bound <= exact * (1 + 1e-6)).all()
    gram = float(torch.linalg.matrix_norm(A @ inverse @ A.mT, ord=2))
    assert gram * (1 - 1e-9) <= gram_above(A, P) <= gram * 1.01
    least = float(torch.linalg.eigvalsh(P)[0])
    assert 0.5 * least <= eigenvalue_below(P) <= least * (1 + 1e-9)


def test_a_form_that_is_no_metric_bounds_nothing():
    P = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    eye = torch.eye(2, dtype=torch.float64)
    assert quotient_above(eye, P) == math.inf
    assert inverse_forms_above(P, eye).isinf().all()
    assert eigenvalue_below(P) == 0


def test_gamma_is_above_the_fraction_it_names():
    for n in (1, 10, 1000, 10**6, 10**8):
        exact = mpmath.mpf(n) * 2**-53 / (1 - mpmath.mpf(n) * 2**-53)
        assert mpmath.mpf(gamma(n)) >= exact
