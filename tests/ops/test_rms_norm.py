import pytest
import torch
import torch.nn.functional as F

from mindspeed.ops import rms_norm, rms_norm_residual
from tests.ops.operator_checks import TOLERANCE, assert_close_to_fp64, randn, refused, strided


def tensors(*shape, norm, dtype=torch.float64):
    return randn(*shape, dtype=dtype), randn(*norm, dtype=dtype, seed=2)


def formula(x, gamma, epsilon):
    """Written independently of the operator, in the type of its arguments."""
    dims = list(range(x.dim() - gamma.dim(), x.dim()))
    return x / (x.pow(2).mean(dims, keepdim=True) + epsilon).sqrt() * gamma


@pytest.mark.parametrize(("shape", "norm"), [((3, 4, 8), (8,)), ((5, 2, 6), (2, 6)), ((7,), (7,)), ((0, 8), (8,))])
def test_it_computes_the_formula_and_its_gradients(shape, norm):
    x, gamma = tensors(*shape, norm=norm)
    torch.testing.assert_close(rms_norm(x, gamma, 1e-5), formula(x, gamma, 1e-5))
    assert torch.autograd.gradcheck(lambda x, gamma: rms_norm(x, gamma, 1e-5), (x, gamma))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_are_close_to_the_fp64_formula(dtype):
    exact = lambda x, gamma: formula(x, gamma, 1e-6)  # noqa: E731
    assert_close_to_fp64(rms_norm, exact, tensors(64, 96, norm=(96,), dtype=dtype))


def test_a_half_precision_result_is_rounded_once():
    x, gamma = tensors(256, 64, norm=(64,), dtype=torch.bfloat16)
    once = formula(x.float(), gamma.float(), 1e-6).to(torch.bfloat16)
    assert (rms_norm(x, gamma) != once).float().mean() < 1e-3
    twice = (formula(x.float(), torch.ones(64), 1e-6).to(torch.bfloat16) * gamma).to(torch.bfloat16)
    assert (twice != once).float().mean() > 0.05


def test_it_agrees_with_torch_in_fp32():
    x, gamma = tensors(32, 48, norm=(48,), dtype=torch.float32)
    torch.testing.assert_close(rms_norm(x, gamma, 1e-5), F.rms_norm(x, (48,), gamma, 1e-5), rtol=1e-6, atol=1e-6)


def test_strided_input_gives_the_same():
    x, gamma = strided(3, 4, 6), strided(6, seed=2)
    torch.testing.assert_close(rms_norm(x, gamma, 1e-5), formula(x, gamma, 1e-5))
    assert torch.autograd.gradcheck(lambda x, gamma: rms_norm(x, gamma, 1e-5), (x, gamma))


def test_a_long_row_keeps_its_precision():
    x, gamma = tensors(1, 1 << 18, norm=(1 << 18,), dtype=torch.float32)
    torch.testing.assert_close(rms_norm(x, gamma).double(), formula(x.double(), gamma.double(), 1e-6), rtol=1e-5, atol=1e-5)


def residual_formula(x, residual, gamma, epsilon=1e-6):
    return formula(x + residual, gamma, epsilon), x + residual


def residual_inputs(*shape, norm, dtype=torch.float64, make=randn):
    return make(*shape, dtype=dtype), make(*shape, dtype=dtype, seed=2), randn(*norm, dtype=dtype, seed=3)


@pytest.mark.parametrize("make", [randn, strided])
@pytest.mark.parametrize(("shape", "norm"), [((3, 4, 8), (8,)), ((5, 2, 6), (2, 6)), ((7,), (7,)), ((0, 8), (8,))])
def test_with_a_residual_it_computes_the_formula_and_its_gradients(shape, norm, make):
    inputs = residual_inputs(*shape, norm=norm, make=make)
    torch.testing.assert_close(rms_norm_residual(*inputs), residual_formula(*inputs))
    assert torch.autograd.gradcheck(rms_norm_residual, inputs)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_with_a_residual_it_is_close_to_the_fp64_formula(dtype):
    tolerance = 2e-2 if dtype != torch.float32 else None
    assert_close_to_fp64(rms_norm_residual, residual_formula, residual_inputs(64, 96, norm=(96,), dtype=dtype), tolerance)


def test_the_sum_is_rounded_once_and_only_after_the_norm():
    x, residual, gamma = (t.detach() for t in residual_inputs(64, 96, norm=(96,), dtype=torch.bfloat16))
    y, total = rms_norm_residual(x, residual, gamma)
    assert torch.equal(total, x + residual)
    exact = formula(x.double() + residual.double(), gamma.double(), 1e-6)
    assert (y - exact).abs().mean() < (rms_norm(total, gamma) - exact).abs().mean()


@pytest.mark.parametrize("function", [rms_norm, rms_norm_residual])
def test_backward_keeps_what_was_normed_and_one_number_per_row(function):
    x, residual, gamma = residual_inputs(16, 32, norm=(32,), dtype=torch.bfloat16)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        normed = rms_norm_residual(x, residual, gamma)[1] if function is rms_norm_residual else (rms_norm(x, gamma), x)[1]
    rows = [((16, 1), torch.float32), ((16, 32), torch.bfloat16), ((32,), torch.bfloat16)]
    assert sorted((tuple(t.shape), t.dtype) for t in saved) == rows
    assert any(t.data_ptr() == normed.data_ptr() for t in saved)


@pytest.mark.parametrize(
    ("residual", "gamma", "message"),
    [
        (
            torch.ones(2, 3),
            torch.ones(4),
            "residual is torch.float32 of shape (2, 3), but x is torch.float32 of (2, 4); they must be equal",
        ),
        (
            torch.ones(2, 4).half(),
            torch.ones(4),
            "residual is torch.float16 of shape (2, 4), but x is torch.float32 of (2, 4); they must be equal",
        ),
        (torch.ones(2, 4), torch.ones(3), "gamma has shape (3,), which does not match the last dimensions of x, (2, 4)"),
    ],
)
def test_a_wrong_residual_is_refused(residual, gamma, message):
    with refused(f"rms_norm_residual: {message}"):
        rms_norm_residual(torch.ones(2, 4), residual, gamma)


@pytest.mark.parametrize(
    ("x", "gamma", "message"),
    [
        (torch.ones(2, 4), torch.ones(3), "gamma has shape (3,), which does not match the last dimensions of x, (2, 4)"),
        (torch.ones(4), torch.ones(2, 4), "gamma has shape (2, 4), which does not match the last dimensions of x, (4,)"),
        (torch.ones(2, 4), torch.tensor(1.0), "gamma has shape (), which does not match the last dimensions of x, (2, 4)"),
        (
            torch.ones(2, 4),
            torch.ones(4).half(),
            "x is torch.float32 and gamma is torch.float16, but they must have one type",
        ),
        (torch.ones(4).int(), torch.ones(4).int(), "x is torch.int32, but must have a floating-point type"),
    ],
)
def test_wrong_tensors_are_refused(x, gamma, message):
    with refused(f"rms_norm: {message}"):
        rms_norm(x, gamma)
