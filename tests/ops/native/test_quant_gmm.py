from __future__ import annotations

import pytest
import torch

from mindspeed.ops import quant_gmm
from tests.ops.native.moe_cases import SHAPES, SIZES, assert_close, laid_out, need, numbers, reference

NAME = "quant_gmm"


@pytest.fixture(autouse=True)
def _library():
    need(NAME)


def integers(*shape, seed=1, dtype=torch.int8, limit=128):
    return torch.randint(-limit, limit, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def cases(sizes, layout="plain"):
    """Arguments of the operator up to the groups, for every shape."""
    for inner, columns in SHAPES:
        x, w = integers(sum(sizes), inner), integers(len(sizes), inner, columns, seed=2)
        scale, per_token = numbers(len(sizes), columns, seed=3) / 128, numbers(sum(sizes), seed=4)
        bias = integers(len(sizes), columns, seed=5, dtype=torch.int32, limit=2**31 - 1)
        yield laid_out(x, layout), laid_out(w, layout), scale, per_token, bias


@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("name", SIZES)
def test_without_activation_it_is_the_reference_bit_for_bit(name, layout):
    groups, forward = torch.tensor(SIZES[name]), reference(NAME)._forward
    for x, w, scale, per_token, bias in cases(SIZES[name], layout):
        for dtype, scales, token, added in (
            (torch.bfloat16, scale, per_token, bias),
            (torch.float16, scale.bfloat16(), None, bias),
            (torch.bfloat16, scale.view(torch.int32).long(), per_token, None),
            (torch.int8, scale / 64, None, None),
        ):
            for activation in (0,) if dtype == torch.int8 else (0, 1):
                arguments = x, w, scales, token, added, groups, dtype, activation, False
                assert torch.equal(torch.ops.mindspeed.quant_gmm(*arguments), forward(*arguments))


@pytest.mark.parametrize("activation", [2, 4, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_activations_differ_by_a_rounding_at_most(activation, dtype, tolerance):
    sizes, forward = SIZES["balanced"], reference(NAME)._forward
    for x, w, scale, per_token, _ in cases(sizes):
        arguments = x, w, scale / 256, per_token, None, torch.tensor(sizes), dtype, activation, False
        ours, theirs = torch.ops.mindspeed.quant_gmm(*arguments), forward(*arguments)
        assert_close(ours, theirs, tolerance)
        assert (ours == theirs).double().mean() > 0.95 or not ours.numel()


@pytest.mark.parametrize("inner", [4099, 70001])
def test_integer_sums_are_exact_at_the_ends_of_their_range(inner):
    for a in (127, -128):
        x, w = torch.full((9, inner), a, dtype=torch.int8), torch.full((1, inner, 2), -128, dtype=torch.int8)
        bias = torch.ones(1, 2, dtype=torch.int32)
        y = quant_gmm(x, w, torch.full((1, 2), 1.0), bias=bias, group_list=[9])
        assert torch.equal(y, torch.full((9, 2), -128.0 * a * inner + 1, dtype=torch.float64).float().bfloat16())


def test_pytorch_finds_nothing_wrong_with_the_operator():
    x, w, scale, per_token, _ = next(iter(cases([3, 0, 2])))
    arguments = x, w, scale, per_token, None, torch.tensor([3, 0, 2]), torch.bfloat16, 5, False
    torch.library.opcheck(torch.ops.mindspeed.quant_gmm.default, arguments)
