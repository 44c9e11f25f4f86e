import pytest
import torch

from mindspeed.ops import npu_gmm, npu_gmm_v2
from tests.ops.operator_checks import TOLERANCE, assert_close_to_fp64, randn, refused, strided

SIZES = {
    "balanced": [3, 3, 3],
    "uneven": [1, 7, 2],
    "first and last empty": [0, 5, 0, 2, 0],
    "one group": [4],
    "no row": [0, 0],
}


def ends(sizes):
    return torch.tensor(sizes).cumsum(0).tolist()


def formula(sizes):
    def product(x, weight, bias=None):
        matrices = list(weight.repeat_interleave(torch.tensor(sizes), 0))
        rows = [row @ matrix for row, matrix in zip(x, matrices, strict=True)]
        out = torch.stack(rows) if rows else x.new_zeros(0, weight.shape[2])
        return out if bias is None else out + bias.repeat_interleave(torch.tensor(sizes), 0)

    return product


def by_ends(sizes, kind=list):
    groups = kind(ends(sizes))
    return lambda x, w, b=None: npu_gmm(x, w, bias=b, group_list=groups)


@pytest.mark.parametrize("name", SIZES)
def test_it_computes_the_formula_and_its_gradients(name):
    sizes = SIZES[name]
    inputs = randn(sum(sizes), 3), randn(len(sizes), 3, 5, seed=2), randn(len(sizes), 5, seed=3)
    torch.testing.assert_close(by_ends(sizes)(*inputs), formula(sizes)(*inputs))
    torch.testing.assert_close(by_ends(sizes)(*inputs[:2]), formula(sizes)(*inputs[:2]))
    assert torch.autograd.gradcheck(by_ends(sizes), inputs)


@pytest.mark.parametrize("group_list", [torch.tensor, torch.IntTensor, list, tuple])
def test_group_lists_of_every_kind_mean_the_same(group_list):
    x, w = randn(5, 3), randn(2, 3, 4, seed=2)
    expected = formula([2, 3])(x, w)
    torch.testing.assert_close(npu_gmm(x, w, group_list=group_list([2, 5])), expected)
    torch.testing.assert_close(npu_gmm_v2(x, w, group_list=group_list([2, 3])), expected)


def test_it_is_differentiable_twice():
    x, w = randn(5, 2), randn(2, 2, 3, seed=2)
    assert torch.autograd.gradgradcheck(by_ends([2, 3]), (x, w))


@pytest.mark.parametrize("name", SIZES)
def test_a_matrix_of_each_group_is_one_of_a_stack(name):
    sizes = SIZES[name]
    x, weights = randn(sum(sizes), 3), [randn(3, 5, seed=n) for n in range(len(sizes))]

    def separate(x, *weights):
        return npu_gmm(x, weights, group_list=ends(sizes))

    torch.testing.assert_close(separate(x, *weights), by_ends(sizes)(x, torch.stack(weights)))
    assert torch.autograd.gradcheck(separate, (x, *weights))
    assert torch.autograd.gradgradcheck(separate, (x, *weights))


def test_matrices_that_differ_or_are_too_few_are_refused():
    x, w = randn(5, 3), randn(3, 4, seed=2)
    with refused("npu_gmm: weight has 1 matrices, but group_list has 2 groups"):
        npu_gmm(x, [w], group_list=[2, 5])
    kinds = "['(torch.float64, (3, 4))', '(torch.float64, (4, 3))']"
    with refused(f"npu_gmm: the matrices of weight have different types or shapes: {kinds}"):
        npu_gmm(x, [w, w.t()], group_list=[2, 5])
    with refused("npu_gmm: a list of matrices supports neither group_type 2, nor bias, nor gemm_fusion"):
        npu_gmm(x, [w, w], group_list=[2, 5], group_type=2)


@pytest.mark.parametrize("name", SIZES)
def test_group_type_2_multiplies_along_the_grouped_rows(name):
    sizes = SIZES[name]
    x, y = randn(3, sum(sizes)), randn(sum(sizes), 2, seed=2)

    def products(x, y):
        return npu_gmm(x, y, group_list=ends(sizes), group_type=2)

    expected = [a @ b for a, b in zip(x.split(sizes, 1), y.split(sizes), strict=True)]
    torch.testing.assert_close(products(x, y), torch.stack(expected))
    assert torch.autograd.gradcheck(products, (x, y))


def test_strided_and_square_operands_are_taken_as_they_are_shaped():
    x, w = strided(6, 4), strided(2, 4, 4, seed=2)
    square = w.transpose(1, 2)
    torch.testing.assert_close(by_ends([4, 2])(x, w), formula([4, 2])(x, w))
    torch.testing.assert_close(by_ends([4, 2])(x, square), formula([4, 2])(x, square))
    assert torch.autograd.gradcheck(by_ends([4, 2]), (x, w))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients_are_close_to_the_fp64_formula(dtype):
    sizes = [7, 0, 25]
    inputs = randn(32, 64, dtype=dtype), randn(3, 64, 16, dtype=dtype, seed=2), randn(3, 16, dtype=dtype, seed=3)
    assert_close_to_fp64(by_ends(sizes), formula(sizes), inputs)


def test_a_long_sum_with_bias_is_rounded_once():
    x, w, b = torch.ones(1, 4096).bfloat16(), torch.full((1, 4096, 1), 1.0).bfloat16(), torch.full((1, 1), 9.0).bfloat16()
    assert npu_gmm(x, w, bias=b, group_list=[1]).item() == torch.tensor(4105.0).bfloat16().item()
    cancelling = torch.cat((torch.full((1, 4096), 1.0078125), torch.full((1, 4096), -1.0)), 1).bfloat16()
    assert npu_gmm(cancelling, torch.ones(1, 8192, 1).bfloat16(), group_list=[1]).item() == 32.0


class Parameter:
    """What Megatron's distributed data parallel puts on a parameter."""

    def __init__(self, main_grad, zero=False):
        self.main_grad, self.zero_out_wgrad, self.grad_added_to_main_grad = main_grad, zero, False


@pytest.mark.parametrize("function", [npu_gmm, npu_gmm_v2])
@pytest.mark.parametrize("zero", [False, True])
def test_gemm_fusion_adds_the_weight_gradient_to_main_grad(function, zero):
    x, w = randn(6, 4, dtype=torch.bfloat16), randn(3, 4, 5, dtype=torch.bfloat16, seed=2)
    groups, dy = [2, 0, 4] if function is npu_gmm_v2 else [2, 2, 6], randn(6, 5, seed=4, grad=False).bfloat16()
    before = randn(4, 15, dtype=torch.float32, grad=False)
    parameter = Parameter(before.clone(), zero)
    for _ in range(2):
        y = function(x, w, group_list=groups, gemm_fusion=True, original_weight=parameter)
        y.backward(dy)
    plain = function(*(wide := [t.detach().double().requires_grad_() for t in (x, w)]), group_list=groups)
    plain.backward(dy.double())
    torch.testing.assert_close(
        parameter.main_grad.double(), before.double() + 2 * wide[1].grad.view(4, 15), rtol=1e-6, atol=1e-6
    )
    assert parameter.grad_added_to_main_grad
    assert torch.equal(y, plain.to(torch.bfloat16))
    assert not zero or not w.grad.any()
    torch.testing.assert_close(x.grad.double(), 2 * wide[0].grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(5, 3).half()}, "x is torch.float16, but weight is torch.float32"),
        ({"x": torch.ones(5, 2)}, "x of shape (5, 2) and weight of shape (2, 3, 4) cannot be multiplied"),
        ({"weight": torch.ones(3, 4)}, "x of shape (5, 3) and weight of shape (3, 4) cannot be multiplied"),
        ({"group_list": [5]}, "weight has 2 matrices, but group_list has 1 groups"),
        ({"group_list": []}, "group_list is torch.int64 of shape (0,), but must be a vector of integers"),
        ({"group_list": torch.ones(2)}, "group_list is torch.float32 of shape (2,), but must be a vector of integers"),
        ({"group_list": [2, 4]}, "the groups end at [2, 4], but must be ascending up to the 5 rows"),
        ({"group_list": [6, 5]}, "the groups end at [6, 5], but must be ascending up to the 5 rows"),
        ({"group_type": 1}, "group_type is 1, but must be 0 or 2"),
        ({"bias": torch.ones(4)}, "bias must have a floating-point type and shape (2, 4)"),
        (
            {"gemm_fusion": True, "original_weight": torch.ones(1)},
            "gemm_fusion needs original_weight.main_grad, which must be contiguous, fp32 and of the size of weight",
        ),
        (
            {"gemm_fusion": True, "original_weight": Parameter(torch.ones(24)), "bias": torch.ones(2, 4)},
            "gemm_fusion does not support bias",
        ),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"x": torch.ones(5, 3), "weight": torch.ones(2, 3, 4), "group_list": [2, 5], **change}
    with refused(f"npu_gmm: {message}"):
        npu_gmm(arguments.pop("x"), arguments.pop("weight"), **arguments)
