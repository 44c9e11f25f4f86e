"""The two products that add a weight gradient to an fp32 buffer."""

from itertools import pairwise

import pytest
import torch

from mindspeed.ops import npu_groupmatmul_add_fp32, npu_matmul_add_fp32
from mindspeed.ops.npu_matmul_add_fp32 import wide_product
from tests.ops.operator_checks import randn, refused, strided

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def wide_type(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [randn, strided])
def test_it_adds_the_product_to_the_buffer_in_place(make, dtype):
    x, dy, grad = make(33, 7, dtype=dtype, grad=False), make(33, 5, dtype=dtype, seed=2, grad=False), randn(5, 7, grad=False)
    buffer = grad.to(wide_type(dtype))
    storage, expected = buffer.data_ptr(), buffer.double() + dy.double().t() @ x.double()
    assert npu_matmul_add_fp32(x, dy, buffer) is None
    assert buffer.data_ptr() == storage
    torch.testing.assert_close(buffer.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [randn, strided])
@pytest.mark.parametrize("ends", [[4, 9, 12], [0, 12, 12], [12, 12, 12]])
def test_each_group_adds_to_its_part_of_the_buffer(make, dtype, ends):
    x, dy = make(12, 4, dtype=dtype, grad=False), make(12, 5, dtype=dtype, seed=2, grad=False)
    buffer = randn(4, 15, grad=False).to(wide_type(dtype))
    expected = buffer.double().clone().view(3, 4, 5)
    for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        expected[e] += x[start:end].double().t() @ dy[start:end].double()
    assert npu_groupmatmul_add_fp32(x, dy, torch.tensor(ends), buffer) is None
    torch.testing.assert_close(buffer.double().view(3, 4, 5), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ends", [None, [50, 128]])
def test_ten_micro_batches_are_more_accurate_than_adding_rounded_products(ends, dtype):
    """Of one product, or of groups, whose buffer holds the transposed product."""
    fused, unfused, exact = (
        torch.zeros(len(ends or [0]), 48, 64, dtype=t) for t in (torch.float32, torch.float32, torch.float64)
    )
    for seed in range(10):
        x, dy = randn(128, 48, seed=seed, grad=False).to(dtype), randn(128, 64, seed=seed + 50, grad=False).to(dtype)
        if ends is None:
            npu_matmul_add_fp32(x, dy, fused[0].T)
        else:
            npu_groupmatmul_add_fp32(x, dy, ends, fused)
        for group, (start, end) in enumerate(pairwise([0, *(ends or [128])])):
            unfused[group] += x[start:end].t() @ dy[start:end]
            exact[group] += x[start:end].double().t() @ dy[start:end].double()
    assert (fused - exact).abs().max() < (unfused - exact).abs().max() / 50


def test_a_strided_buffer_is_updated_where_it_lies():
    whole = torch.zeros(4, 6)
    npu_matmul_add_fp32(torch.ones(3, 3), torch.ones(3, 4), whole[:, ::2])
    assert whole.tolist() == [[3.0, 0.0] * 3] * 4


def test_without_tokens_nothing_changes():
    grad, groups = torch.ones(2, 3), torch.tensor([0, 0])
    npu_matmul_add_fp32(torch.ones(0, 3), torch.ones(0, 2), grad)
    npu_groupmatmul_add_fp32(torch.ones(0, 3), torch.ones(0, 1), groups, grad)
    assert torch.equal(grad, torch.ones(2, 3))


def test_operands_that_need_gradients_get_none():
    x, dy, grad = randn(3, 2, dtype=torch.float32), randn(3, 4, dtype=torch.float32), torch.zeros(4, 2)
    npu_matmul_add_fp32(x, dy, grad)
    assert not grad.requires_grad


def test_compiled_code_updates_the_same_buffer():
    groups = torch.tensor([1, 3])

    def both(x, dy, grad, grouped):
        npu_matmul_add_fp32(x, dy, grad)
        npu_groupmatmul_add_fp32(x, dy, groups, grouped)
        return grad * 2

    torch.compiler.reset()
    x, dy = randn(3, 2, grad=False).bfloat16(), randn(3, 4, grad=False).bfloat16()
    results = []
    for function in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        grad, grouped = torch.ones(4, 2), torch.ones(2, 2, 4)
        results.append((grad, grouped, function(x, dy, grad, grouped)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[1][0], torch.ones(4, 2))


def test_inference_mode_takes_a_buffer_from_outside():
    grad = torch.zeros(4, 2)
    with torch.inference_mode():
        npu_matmul_add_fp32(torch.ones(3, 2), torch.ones(3, 4), grad)
    assert torch.equal(grad, torch.full((4, 2), 3.0))


@pytest.mark.parametrize(
    ("x", "dy", "grad", "message"),
    [
        (
            torch.ones(3, 2).half(),
            torch.ones(3, 4),
            torch.ones(4, 2),
            "total_input is torch.float16, but grad_output is torch.float32",
        ),
        (
            torch.ones(3, 2),
            torch.ones(2, 4),
            torch.ones(4, 2),
            "total_input of shape (3, 2) and grad_output of shape (2, 4) must have one row per token",
        ),
        (
            torch.ones(3, 2),
            torch.ones(3, 4),
            torch.ones(2, 4),
            "grad must be a torch.float32 buffer of shape (4, 2) that needs no gradient",
        ),
        (
            torch.ones(3, 2),
            torch.ones(3, 4),
            torch.ones(4, 2).half(),
            "grad must be a torch.float32 buffer of shape (4, 2) that needs no gradient",
        ),
    ],
)
def test_wrong_arguments_are_refused(x, dy, grad, message):
    with refused(f"npu_matmul_add_fp32: {message}"):
        npu_matmul_add_fp32(x, dy, grad)


@pytest.mark.parametrize(
    ("dy", "groups", "grad", "message"),
    [
        (torch.ones(3, 4).half(), [3], torch.ones(8), "x is torch.float32, but dy is torch.float16"),
        (torch.ones(2, 4), [3], torch.ones(8), "x of shape (3, 2) and dy of shape (2, 4) must have one row per token"),
        (
            torch.ones(3, 4),
            [3],
            torch.ones(9),
            "grad must be a contiguous torch.float32 buffer for (1, 2, 4) that needs no gradient",
        ),
        (torch.ones(3, 4), [2], torch.ones(8), "the groups end at [2], but must be ascending up to the 3 rows"),
    ],
)
def test_wrong_groups_are_refused(dy, groups, grad, message):
    with refused(f"npu_groupmatmul_add_fp32: {message}"):
        npu_groupmatmul_add_fp32(torch.ones(3, 2), dy, groups, grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("left", "right"), [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((0, 4), (4, 5))])
def test_a_wide_product_is_rounded_to_the_type_for_sums_alone(dtype, left, right):
    for make in (randn, strided):
        a, b = make(*left, dtype=dtype, grad=False), make(*right, dtype=dtype, seed=2, grad=False)
        product = wide_product(a, b)
        assert product.dtype == wide_type(dtype)
        torch.testing.assert_close(product.double(), a.double() @ b.double(), rtol=1e-6, atol=1e-5)
