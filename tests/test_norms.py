import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgate.norms import bounded_lp, l1, l2

EXPONENTS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
WIDTHS = (0.1, 0.7, 1.0, 5.0)


def reference(x, p, sigma):
    return math.fsum(-math.expm1(-((abs(v) / sigma) ** p)) for v in x.tolist())


def vector(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def gradient(x, p, sigma):
    (grad,) = torch.autograd.grad(bounded_lp(x, p, sigma), x)
    return grad


@pytest.mark.parametrize("sigma", WIDTHS)
@pytest.mark.parametrize("p", EXPONENTS)
def test_bounded_lp_is_its_formula_and_so_is_its_gradient(p, sigma):
    x = vector(-2.0, -0.3, 1e-3, 0.0, 0.1, 1.7)
    assert bounded_lp(x, p, sigma).item() == pytest.approx(reference(x, p, sigma), rel=1e-14)
    ratio = (x.detach().abs() / sigma).clamp(min=1e-300)
    closed_form = p / sigma * ratio ** (p - 1) * torch.exp(-(ratio**p)) * x.detach().sign()
    # exp of a large negative number comes from adding 1 to expm1, so it is accurate to float64's eps, not relatively.
    torch.testing.assert_close(gradient(x, p, sigma), closed_form, rtol=1e-13, atol=1e-15 * 300 * p / sigma)


@pytest.mark.parametrize("sigma", WIDTHS)
@pytest.mark.parametrize("p", EXPONENTS)
def test_autograd_agrees_with_finite_differences(p, sigma):
    x = vector(-1.1, -0.3, 0.2, 0.9)
    assert torch.autograd.gradcheck(lambda x: bounded_lp(x, p, sigma), x)
    assert torch.autograd.gradgradcheck(lambda x: bounded_lp(x, p, sigma), x)


@pytest.mark.parametrize("p", EXPONENTS)
def test_lemma_1_a_vanishing_sigma_counts_what_is_not_zero(p):
    x = vector(0.0, 1e-3, -2.0, 0.0, 0.5)
    values = [bounded_lp(x, p, sigma).item() for sigma in (1.0, 1e-1, 1e-2, 1e-12)]
    assert values == sorted(values)
    assert values[0] < 2.9 and values[-1] == 3.0


@pytest.mark.parametrize("sigma", WIDTHS)
@pytest.mark.parametrize("p", EXPONENTS)
def test_lemma_1_b_small_x_gives_the_p_norm_of_x_over_sigma(p, sigma):
    x = sigma * 1e-9 ** (1 / p) * vector(1.0, -0.5, 0.8)
    p_norm = (x.abs() / sigma).pow(p).sum().item()
    assert bounded_lp(x, p, sigma).item() == pytest.approx(p_norm, rel=2e-9)
    assert bounded_lp(torch.ones(1), p, 1.0).item() < 0.9  # no longer so for x that is not small


@given(
    x=st.lists(st.floats(-4, 4), min_size=1, max_size=6),
    p=st.floats(0.1, 2),
    sigma=st.floats(0.8, 3),
)
def test_bounded_lp_is_even_and_between_zero_and_the_number_of_elements(x, p, sigma):
    tensor = torch.tensor(x, dtype=torch.float64)
    value = bounded_lp(tensor, p, sigma).item()
    assert 0 <= value < len(x)
    assert (value == 0) == (not any((abs(v) / sigma) ** p > 0 for v in x))
    assert bounded_lp(-tensor, p, sigma).item() == value
    assert bounded_lp(tensor * 1.5, p, sigma).item() >= value


@pytest.mark.parametrize("x", [1e-8, 1e-12, 3e-5])
def test_float32_is_accurate_near_zero(x):
    tensor = torch.tensor([x], dtype=torch.float32)
    for p, sigma in ((1.0, 1.0), (1.0, 0.3), (0.5, 2.0), (2.0, 0.01)):
        expected = reference(tensor, p, sigma)
        assert bounded_lp(tensor, p, sigma).item() == pytest.approx(expected, rel=5e-7)
    assert (1 - torch.exp(-torch.tensor([1e-8]))).item() == 0  # what the formula as written would give


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", EXPONENTS)
def test_the_subgradient_at_zero_is_zero(p, dtype):
    grad = gradient(vector(0.0, 0.5, -0.0, dtype=dtype), p, 1.0)
    assert grad[0] == 0 and grad[2] == 0 and grad[1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sigma", [1e-12, 1e-40, 1e-300])
@pytest.mark.parametrize("p", [0.5, 1.0, 2.0])
def test_a_tiny_sigma_gives_a_count_and_no_nan(p, sigma, dtype):
    x = vector(1.0, 0.0, -1e-3, dtype=dtype)
    assert bounded_lp(x, p, sigma).item() == 2
    assert gradient(x, p, sigma).tolist() == [0, 0, 0]


def test_a_tiny_p_and_a_large_one_give_no_nan():
    x = vector(1e-3, 0.0, 5.0)
    assert gradient(x, 1e-3, 1.0).isfinite().all()
    assert gradient(x, 400.0, 1.0).tolist() == [0, 0, 0]
    assert bounded_lp(x, 400.0, 1.0).item() == 1


def test_a_nan_is_not_hidden():
    assert bounded_lp(torch.tensor([math.nan, 1.0])).isnan()


def test_sigma_may_be_a_tensor():
    x = vector(0.3, -0.4)
    assert bounded_lp(x, 1.0, torch.tensor(0.5, dtype=torch.float64)) == bounded_lp(x, 1.0, 0.5)


def test_l1_and_l2_with_their_gradients():
    x = vector(-2.0, 0.0, 0.5)
    assert l1(x).item() == 2.5 and l2(x).item() == 4.25
    assert torch.autograd.grad(l1(x), x)[0].tolist() == [-1, 0, 1]
    assert torch.autograd.grad(l2(x), x)[0].tolist() == [-4, 0, 1]


@pytest.mark.parametrize("norm", [l1, l2, lambda x: bounded_lp(x, sigma=1e-6)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(norm, dtype):
    total = norm(torch.ones(4097, dtype=dtype))
    assert total.dtype == torch.float32 and total.item() == 4097


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "1", None])
def test_bad_p_and_sigma_are_named(bad):
    with pytest.raises(ValueError, match="p must be a finite number above 0, got"):
        bounded_lp(torch.ones(2), p=bad)
    with pytest.raises(ValueError, match="sigma must be a finite number above 0, got"):
        bounded_lp(torch.ones(2), sigma=bad)


def test_numbers_of_numpy_are_numbers():
    assert bounded_lp(torch.ones(2), np.float32(1), np.int64(1)).item() == pytest.approx(2 - 2 / math.e)
