from __future__ import annotations

import pytest
import torch

from mindspeed.ops import swiglu
from mindspeed.ops.errors import OperatorError
from tests.ops.operator_checks import assert_holds_everywhere, randn, strided

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def tensor(*shape, dtype=torch.float64):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return values.to(dtype).requires_grad_()


def formula(x, dim=-1):
    """Written independently of the operator, in the type of its argument."""
    a, b = x.chunk(2, dim)
    return a / (1 + torch.exp(-a)) * b


@pytest.mark.parametrize(("shape", "dim"), [((3, 4, 8), -1), ((3, 4, 8), 1), ((6, 5), 0), ((2,), 0), ((0, 8), -1), ((3, 0), 1)])
def test_it_computes_the_formula_and_its_gradients(shape, dim):
    x = tensor(*shape)
    torch.testing.assert_close(swiglu(x, dim), formula(x, dim))
    assert torch.autograd.gradcheck(lambda x: swiglu(x, dim), (x,))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_are_close_to_the_fp64_formula(dtype):
    x = tensor(64, 96, dtype=dtype)
    exact_x = x.detach().double().requires_grad_()
    y, exact = swiglu(x), formula(exact_x)
    dy = torch.randn(64, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    y.backward(dy)
    exact.backward(dy.double())
    assert y.dtype == x.grad.dtype == dtype
    for value, reference in ((y, exact), (x.grad, exact_x.grad)):
        torch.testing.assert_close(value.double(), reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_large_gates_neither_overflow_nor_turn_into_nan():
    x = torch.tensor([[-1e4, 1e4, 1.0, 2.0]], requires_grad=True)
    y = swiglu(x)
    y.sum().backward()
    assert y.tolist() == [[pytest.approx(0.0, abs=1e-30), 2e4]]  # a vector's exp ends at the smallest number, not at zero
    assert torch.isfinite(x.grad).all()


def test_backward_keeps_the_input_alone():
    x = tensor(16, 32, dtype=torch.bfloat16)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        swiglu(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


def test_it_is_the_same_compiled_recomputed_and_in_inference_mode():
    assert_holds_everywhere(swiglu, *(randn(4, 6, dtype=torch.bfloat16),))


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_strided_input_gives_the_same(dim):
    x = strided(2, 4, 6)
    torch.testing.assert_close(swiglu(x, dim), formula(x, dim))
    assert torch.autograd.gradcheck(lambda x: swiglu(x, dim), (x,))


def test_the_operator_is_registered_as_pytorch_wants_it():
    x = tensor(3, 8, dtype=torch.float32)
    torch.library.opcheck(torch.ops.mindspeed.swiglu.default, (x, -1))
    torch.library.opcheck(torch.ops.mindspeed.swiglu_backward.default, (torch.ones(3, 4), x.detach(), 1))


@pytest.mark.parametrize(
    ("x", "dim", "message"),
    [
        (torch.ones(2, 5), -1, "dimension -1 of x has size 5, which has no halves"),
        (torch.ones(2, 4), 2, "x of shape (2, 4) has no dimension 2"),
        (torch.ones(2, 4).long(), -1, "x is torch.int64, not a floating-point type"),
    ],
)
def test_wrong_tensors_are_refused(x, dim, message):
    with pytest.raises(OperatorError) as error:
        swiglu(x, dim)
    assert str(error.value) == f"MS505 swiglu: {message}"
