from __future__ import annotations

import pytest
import torch

from mindspeed.ops import npu_groupmatmul_add_fp32
from mindspeed.ops.errors import OperatorError
from tests.ops.native.moe_cases import SHAPES, SIZES, TYPES, assert_close, laid_out, need, numbers, reference

NAME = "npu_groupmatmul_add_fp32"


@pytest.fixture(autouse=True)
def _library():
    need(NAME)


@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SIZES)
def test_the_sums_are_those_of_the_reference(name, dtype, layout):
    sizes, wide = SIZES[name], torch.float64 if dtype == torch.float64 else torch.float32
    ends = torch.tensor(sizes).cumsum(0)
    for inner, columns in SHAPES:
        x = laid_out(numbers(sum(sizes), inner, dtype=dtype), layout)
        dy = laid_out(numbers(sum(sizes), columns, dtype=dtype, seed=2), layout)
        ours = numbers(len(sizes), inner, columns, dtype=wide, seed=3)
        theirs = ours.clone()
        npu_groupmatmul_add_fp32(x, dy, ends, ours)
        reference(NAME)._add(x, dy, ends, theirs)
        assert_close(ours, theirs, 4e-6)


def test_an_empty_group_keeps_its_bits():
    grad = numbers(2, 3, 4)
    before = grad.clone()
    npu_groupmatmul_add_fp32(numbers(5, 3).bfloat16(), numbers(5, 4).bfloat16(), [0, 5], grad)
    assert torch.equal(grad[0], before[0])
    assert not torch.equal(grad[1], before[1])


def test_ten_micro_batches_are_nearer_to_fp64_than_products_that_are_rounded_first():
    fused, rounded, exact = torch.zeros(2, 70, 50), torch.zeros(2, 70, 50), torch.zeros(2, 70, 50, dtype=torch.float64)
    for batch in range(10):
        x, dy = numbers(256, 70, seed=2 * batch).bfloat16(), numbers(256, 50, seed=2 * batch + 1).bfloat16()
        npu_groupmatmul_add_fp32(x, dy, [100, 256], fused)
        for e, rows in enumerate((slice(0, 100), slice(100, 256))):
            rounded[e] += (x[rows].t().float() @ dy[rows].float()).bfloat16().float()
            exact[e] += x[rows].t().double() @ dy[rows].double()
    assert (fused - exact).abs().max() < (rounded - exact).abs().max() / 100


def test_groups_that_do_not_fit_are_refused_in_the_words_of_the_reference():
    with pytest.raises(OperatorError) as error:
        npu_groupmatmul_add_fp32(torch.ones(3, 2), torch.ones(3, 4), [2], torch.ones(8))
    assert str(error.value) == "MS505 npu_groupmatmul_add_fp32: the groups end at [2], not ascending up to the 3 rows"


def test_pytorch_finds_nothing_wrong_with_the_operator():
    arguments = numbers(3, 2).bfloat16(), numbers(3, 4).bfloat16(), torch.tensor([1, 3]), torch.zeros(2, 2, 4)
    torch.library.opcheck(torch.ops.mindspeed.npu_groupmatmul_add_fp32.default, arguments)
