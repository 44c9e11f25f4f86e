import pytest
import torch

from mindspeed.ops import swiglu
from tests.ops.operator_checks import TOLERANCE, assert_close_to_fp64, randn, refused, strided


def formula(x, dim=-1):
    """Written independently of the operator, in the type of its argument."""
    a, b = x.chunk(2, dim)
    return a / (1 + torch.exp(-a)) * b


@pytest.mark.parametrize(("shape", "dim"), [((3, 4, 8), -1), ((3, 4, 8), 1), ((6, 5), 0), ((2,), 0), ((0, 8), -1), ((3, 0), 1)])
def test_it_computes_the_formula_and_its_gradients(shape, dim):
    x = randn(*shape)
    torch.testing.assert_close(swiglu(x, dim), formula(x, dim))
    assert torch.autograd.gradcheck(lambda x: swiglu(x, dim), (x,))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_are_close_to_the_fp64_formula(dtype):
    assert_close_to_fp64(swiglu, formula, [randn(64, 96, dtype=dtype)])


def test_large_gates_neither_overflow_nor_turn_into_nan():
    x = torch.tensor([[-1e4, 1e4, 1.0, 2.0]], requires_grad=True)
    y = swiglu(x)
    y.sum().backward()
    assert y.tolist() == [[pytest.approx(0.0, abs=1e-30), 2e4]]  # a vector's exp ends at the smallest number, not at zero
    assert torch.isfinite(x.grad).all()


def test_backward_keeps_the_input_alone():
    x = randn(16, 32, dtype=torch.bfloat16)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        swiglu(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_strided_input_gives_the_same(dim):
    x = strided(2, 4, 6)
    torch.testing.assert_close(swiglu(x, dim), formula(x, dim))
    assert torch.autograd.gradcheck(lambda x: swiglu(x, dim), (x,))


@pytest.mark.parametrize(
    ("x", "dim", "message"),
    [
        (torch.ones(2, 5), -1, "dimension -1 of x has size 5, which cannot be split into halves"),
        (torch.ones(2, 4), 2, "x of shape (2, 4) has no dimension 2"),
        (torch.ones(2, 4).long(), -1, "x is torch.int64, but must have a floating-point type"),
    ],
)
def test_wrong_tensors_are_refused(x, dim, message):
    with refused(f"swiglu: {message}"):
        swiglu(x, dim)
