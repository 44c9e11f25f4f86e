"""The three grouped products, alone and added to an fp32 buffer; tiles are 16 x 16 here, so a few rows make many."""

import pytest
import torch

from mindspeed.ops import npu_gmm, npu_gmm_v2, npu_groupmatmul_add_fp32, npu_matmul_add_fp32
from tests.ops.operator_checks import refused, strided
from tests.ops.triton.kernels import TYPES, assert_like_reference, leaf, on_triton

SIZES = {"uneven": [1, 37, 20], "empty ones": [0, 18, 0, 0, 3, 0], "one group": [33], "no row": [0, 0]}
THREE = {"by_rows", "by_groups"}


def ends(sizes):
    return torch.tensor(sizes).cumsum(0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SIZES)
def test_product_and_both_gradients_are_like_the_reference(name, dtype):
    sizes = SIZES[name]
    x, w = leaf(sum(sizes), 35, dtype=dtype), leaf(len(sizes), 35, 18, dtype=dtype, seed=2)
    ran = THREE if sum(sizes) else {"by_groups"}
    assert_like_reference(lambda x, w: npu_gmm_v2(x, w, group_list=sizes), x, w, kernels=ran)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("place", [0, 1], ids=["aligned", "one is not"])
def test_a_matrix_of_each_group_is_taken_where_it_is(place, dtype):
    x, whole = leaf(58, 32, dtype=dtype), leaf(3 * 512 + place, dtype=dtype, seed=2)

    def call(x, whole):
        parts = whole[1024 + place :], whole[:512], whole[512:1024]
        return npu_gmm_v2(x, [part.view(32, 16) for part in parts], group_list=SIZES["uneven"])

    assert_like_reference(call, x, whole, kernels=THREE)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_bias_and_its_gradient_are_like_the_reference(dtype):
    tensors = leaf(58, 16, dtype=dtype), leaf(3, 16, 130, dtype=dtype, seed=2), leaf(3, 130, dtype=dtype, seed=3)
    call = lambda x, w, b: npu_gmm(x, w, bias=b, group_list=ends(SIZES["uneven"]))  # noqa: E731
    assert_like_reference(call, *tensors, kernels={*THREE, "row_sums"})


def test_strides_are_taken_as_they_are():
    x, w = strided(58, 20, dtype=torch.float32), strided(3, 20, 20, dtype=torch.float32, seed=2)
    for weight in (w, w.detach().transpose(1, 2).requires_grad_()):
        assert_like_reference(lambda x, w: npu_gmm_v2(x, w, group_list=[1, 37, 20]), x, weight, kernels=THREE)


@pytest.mark.parametrize("dtype", TYPES)
def test_products_along_the_grouped_rows_are_like_the_reference(dtype):
    x, y = leaf(35, 58, dtype=dtype), leaf(58, 18, dtype=dtype, seed=2)
    call = lambda x, y: npu_gmm(x, y, group_list=ends(SIZES["uneven"]), group_type=2)  # noqa: E731
    assert_like_reference(call, x, y, kernels=THREE)


def test_many_groups_and_long_sums_are_taken():
    sizes = [n % 4 for n in range(70)]
    x, w = leaf(sum(sizes), 10), leaf(70, 10, 6, seed=2)
    assert_like_reference(lambda x, w: npu_gmm_v2(x, w, group_list=sizes), x, w, kernels=THREE)
    x, w = leaf(20, 1030, dtype=torch.bfloat16), leaf(1, 1030, 17, dtype=torch.bfloat16, seed=2)
    assert_like_reference(lambda x, w: npu_gmm_v2(x, w, group_list=[20]), x, w, kernels=THREE)


def test_tiles_sweep_down_eight_before_the_next_column():
    x, w = leaf(16 * 9 + 3, 16), leaf(1, 16, 40, seed=2)
    assert_like_reference(lambda x, w: npu_gmm_v2(x, w, group_list=[len(x)]), x, w, kernels=THREE)


def test_values_that_are_not_finite_stay_in_their_group():
    x, w = leaf(21, 16, grad=False), leaf(2, 16, 16, seed=2, grad=False)
    x[7:], w[1] = torch.inf, torch.nan
    with on_triton():
        y = npu_gmm_v2(x, w, group_list=[7, 14])
        products = npu_gmm(x.t(), leaf(21, 16, seed=3, grad=False), group_list=[7, 21], group_type=2)
    assert y[:7].isfinite().all()
    assert not y[7:].isfinite().any()
    assert products[0].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("make", [leaf, strided])
def test_a_weight_gradient_is_added_where_it_lies(make, dtype):
    x, dy = make(37, 19, dtype=dtype, grad=False), make(37, 21, dtype=dtype, seed=2, grad=False)
    grad, grouped = leaf(21, 19, seed=3, grad=False), leaf(3 * 19 * 21, seed=4, grad=False)
    expected, both = grad.clone(), grouped.clone()
    npu_matmul_add_fp32(x, dy, expected)
    npu_groupmatmul_add_fp32(x, dy, torch.tensor([0, 30, 37]), both)
    with on_triton() as ran:
        npu_matmul_add_fp32(x, dy, grad)
        npu_groupmatmul_add_fp32(x, dy, torch.tensor([0, 30, 37]), grouped)
    assert ran == {"by_groups"}
    torch.testing.assert_close(grad, expected, rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(grouped, both, rtol=2e-6, atol=2e-5)
    assert torch.equal(grouped[: 19 * 21], both[: 19 * 21])


def test_without_tokens_and_in_other_types_and_strides_the_buffer_is_right():
    with on_triton() as ran:
        grad = torch.ones(2, 3)
        npu_matmul_add_fp32(torch.ones(0, 3), torch.ones(0, 2), grad)
        assert grad.tolist() == [[1.0] * 3] * 2
        ran.clear()
        whole = torch.zeros(4, 6)
        npu_matmul_add_fp32(torch.ones(3, 3), torch.ones(3, 4), whole[:, ::2])
        assert whole.tolist() == [[3.0, 0.0] * 3] * 4
        npu_matmul_add_fp32(torch.ones(3, 3).double(), torch.ones(3, 4).double(), wide := torch.zeros(4, 3).double())
        assert wide.tolist() == [[3.0] * 3] * 4
    assert not ran


def test_groups_that_do_not_end_at_the_rows_are_refused():
    with on_triton(), refused("npu_gmm: the groups end at [2, 4], but must be ascending up to the 5 rows"):
        npu_gmm(torch.ones(5, 3), torch.ones(2, 3, 4), group_list=[2, 4])
