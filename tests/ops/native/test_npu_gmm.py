from __future__ import annotations

import pytest
import torch

from mindspeed.ops import npu_gmm
from mindspeed.ops.errors import OperatorError
from tests.ops.native.moe_cases import ROUNDING, SHAPES, SIZES, TYPES, assert_close, laid_out, need, numbers, reference
from tests.ops.operator_checks import assert_holds_everywhere, gradients, randn

OPS = torch.ops.mindspeed


@pytest.fixture(autouse=True)
def _library():
    need("npu_gmm")


@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SIZES)
def test_the_products_are_those_of_the_reference(name, dtype, layout):
    sizes, module = SIZES[name], reference("npu_gmm")
    groups = torch.tensor(sizes)
    for inner, columns in SHAPES:
        x = laid_out(numbers(sum(sizes), inner, dtype=dtype), layout)
        w = laid_out(numbers(len(sizes), inner, columns, dtype=dtype, seed=2), layout)
        bias = numbers(len(sizes), columns, dtype=dtype, seed=3)
        dy = laid_out(numbers(sum(sizes), columns, dtype=dtype, seed=4), layout)
        with torch.no_grad():
            pairs = [
                (OPS.npu_gmm(x, w, bias, groups, False), module._forward(x, w, bias, groups, False)),
                (OPS.npu_gmm(x, w, None, groups.cumsum(0), True), module._forward(x, w, None, groups, False)),
                (OPS.npu_gmm_sum(x, dy, groups, False), module._sum(x, dy, groups, False)),
                (OPS.npu_gmm_bias(dy, groups, False), module._bias_sum(dy, groups, False)),
            ]
        for ours, theirs in pairs:
            assert_close(ours, theirs, 2 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", TYPES)
def test_sums_longer_than_a_block_are_kept_wide(dtype):
    sizes = torch.tensor([40, 3])
    x, w = numbers(43, 2500, dtype=dtype), numbers(2, 2500, 50, dtype=dtype, seed=2)
    exact = torch.cat([a.double() @ b.double() for a, b in zip(x.split([40, 3]), w, strict=True)])
    assert_close(OPS.npu_gmm(x, w, None, sizes, False).double(), exact, ROUNDING[dtype])
    rows = numbers(3001, 20, dtype=dtype), numbers(3001, 50, dtype=dtype, seed=2)
    exact = rows[0].double().t() @ rows[1].double()
    assert_close(OPS.npu_gmm_sum(*rows, torch.tensor([3001]), False)[0].double(), exact, ROUNDING[dtype])


def test_packed_columns_begin_at_a_cache_line_however_long_the_sum():
    """Of a sum of 375 as many packed rows fit as would end in the middle of a line, where wide loads fail."""
    sizes = torch.tensor([127, 375, 333, 189])
    rows, columns = numbers(1024, 192), numbers(1024, 128, seed=2)
    for ours, x, y in zip(
        OPS.npu_gmm_sum(rows, columns, sizes, False), *(a.split(sizes.tolist()) for a in (rows, columns)), strict=True
    ):
        assert_close(ours.double(), x.double().t() @ y.double(), ROUNDING[torch.float32])
    for length in range(257, 512, 2):
        x, w = numbers(30, length), numbers(1, length, 50, seed=2)
        exact = x.double() @ w[0].double()
        assert_close(OPS.npu_gmm(x, w, None, torch.tensor([30]), False).double(), exact, ROUNDING[torch.float32])


def test_what_is_not_a_number_stays_so():
    x = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0]]).bfloat16()
    y = OPS.npu_gmm(x, torch.ones(1, 2, 3).bfloat16(), None, torch.tensor([2]), False)
    assert y[0].isnan().all()
    assert y[1].isinf().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_nothing(threads):
    x, w, groups = numbers(500, 96).bfloat16(), numbers(4, 96, 400, seed=2).bfloat16(), torch.tensor([400, 0, 1, 99])
    before = torch.get_num_threads()
    expected = OPS.npu_gmm(x, w, None, groups, False)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(OPS.npu_gmm(x, w, None, groups, False), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_its_gradients_are_those_of_the_reference(dtype):
    sizes, module = [7, 0, 25], reference("npu_gmm")
    groups = torch.tensor(sizes)
    inputs = [randn(32, 66, dtype=dtype), randn(3, 66, 50, dtype=dtype, seed=2), randn(3, 50, dtype=dtype, seed=3)]
    (y,), (dx, dw, db) = gradients(lambda x, w, b: npu_gmm(x, w, bias=b, group_list=groups.cumsum(0)), inputs)
    x, w, b = (t.detach() for t in inputs)
    dy = randn(32, 50, seed=7, grad=False).to(dtype)
    assert_close(y, module._forward(x, w, b, groups, False), 2 * ROUNDING[dtype])
    assert_close(dx, module._forward(dy, w.transpose(1, 2), None, groups, False), 2 * ROUNDING[dtype])
    assert_close(dw, module._sum(x, dy, groups, False), 2 * ROUNDING[dtype])
    assert_close(db, module._bias_sum(dy, groups, False).to(dtype), 2 * ROUNDING[dtype])


def test_it_is_differentiable_twice():
    groups = torch.tensor([2, 3])
    assert torch.autograd.gradgradcheck(lambda x, w: npu_gmm(x, w, group_list=groups.cumsum(0)), (randn(5, 2), randn(2, 2, 3)))


def test_it_is_the_same_compiled_recomputed_and_in_inference_mode():
    groups = torch.tensor([20, 20, 61])
    inputs = [randn(61, 34, dtype=torch.bfloat16), randn(3, 34, 50, dtype=torch.bfloat16), randn(3, 50, dtype=torch.bfloat16)]
    assert_holds_everywhere(lambda x, w, b: npu_gmm(x, w, bias=b, group_list=groups), *inputs)


def test_pytorch_finds_nothing_wrong_with_the_operators():
    groups, x, w = torch.tensor([2, 3]), randn(5, 3, dtype=torch.bfloat16), randn(2, 3, 4, dtype=torch.bfloat16)
    torch.library.opcheck(OPS.npu_gmm.default, (x, w, None, groups, False), rtol=1e-2, atol=1e-2)
    torch.library.opcheck(OPS.npu_gmm_sum.default, (x, randn(5, 4, dtype=torch.bfloat16), groups, False), rtol=1e-2, atol=1e-2)
    torch.library.opcheck(OPS.npu_gmm_bias.default, (x.detach(), groups, False))


def test_groups_that_do_not_fit_are_refused_in_the_words_of_the_reference():
    with pytest.raises(OperatorError) as error:
        npu_gmm(torch.ones(5, 3), torch.ones(2, 3, 4), group_list=[2, 4])
    assert str(error.value) == "MS505 npu_gmm: the groups end at [2, 4], not ascending up to the 5 rows"
