from __future__ import annotations

import pytest
import torch

from mindspeed.ops import npu_matmul_add_fp32
from tests.ops.native.moe_cases import SHAPES, TYPES, assert_close, laid_out, need, numbers, reference

NAME = "npu_matmul_add_fp32"


@pytest.fixture(autouse=True)
def _library():
    need(NAME)


@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [0, 1, 77, 2500])
def test_the_sum_is_that_of_the_reference(tokens, dtype, layout):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for inputs, outputs in SHAPES:
        x = laid_out(numbers(tokens, inputs, dtype=dtype), layout)
        dy = laid_out(numbers(tokens, outputs, dtype=dtype, seed=2), layout)
        ours = laid_out(numbers(outputs, inputs, dtype=wide, seed=3), layout)
        theirs = ours.clone()
        npu_matmul_add_fp32(x, dy, ours)
        reference(NAME)._add(x, dy, theirs)
        assert_close(ours, theirs, 4e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ten_micro_batches_are_nearer_to_fp64_than_products_that_are_rounded_first(dtype):
    fused, rounded, exact = torch.zeros(50, 70), torch.zeros(50, 70), torch.zeros(50, 70, dtype=torch.float64)
    for batch in range(10):
        x, dy = numbers(256, 70, dtype=dtype, seed=2 * batch), numbers(256, 50, dtype=dtype, seed=2 * batch + 1)
        npu_matmul_add_fp32(x, dy, fused)
        rounded += (dy.t().float() @ x.float()).to(dtype).float()
        exact += dy.t().double() @ x.double()
    assert (fused - exact).abs().max() < (rounded - exact).abs().max() / 100


def test_pytorch_finds_nothing_wrong_with_the_operator():
    arguments = numbers(3, 2).bfloat16(), numbers(3, 4).bfloat16(), torch.zeros(4, 2)
    torch.library.opcheck(torch.ops.mindspeed.npu_matmul_add_fp32.default, arguments)
