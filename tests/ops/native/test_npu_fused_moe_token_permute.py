from __future__ import annotations

import pytest
import torch

from mindspeed.ops import npu_fused_moe_token_permute as permute
from tests.ops.native.moe_cases import TYPES, laid_out, need, numbers, reference
from tests.ops.operator_checks import assert_holds_everywhere, randn

OPS = torch.ops.mindspeed
NAME = "npu_fused_moe_token_permute"


@pytest.fixture(autouse=True)
def _library():
    need(NAME)


def integers(low, high, *shape):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1))


INDICES = {
    "one expert per token": integers(0, 5, 33, 1),
    "a vector": integers(0, 5, 33),
    "several experts": integers(0, 8, 33, 6),
    "one expert has all": torch.full((33, 2), 3),
    "negative numbers": integers(-4, 4, 33, 2),
    "far apart": integers(-(2**60), 2**60, 33, 2),
    "no token": torch.zeros(0, 2, dtype=torch.int64),
    "enough for all threads": integers(0, 32, 3000, 4),
}


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", INDICES)
def test_rows_and_slots_are_those_of_the_reference_bit_for_bit(name, dtype, kind):
    indices = INDICES[name].to(kind)
    tokens = numbers(indices.shape[0], 33, dtype=dtype)
    for kept in {indices.numel(), indices.numel() // 3, 0}:
        for layout in ("plain", "strided"):
            ours = OPS.npu_fused_moe_token_permute(laid_out(tokens, layout), indices, kept, False)
            theirs = reference(NAME)._forward(tokens, indices, kept, False)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))


def test_rows_named_by_their_token_are_those_of_the_reference():
    tokens, indices = numbers(9, 5), integers(0, 9, 4, 6)
    ours, theirs = (
        OPS.npu_fused_moe_token_permute(tokens, indices, 24, True),
        reference(NAME)._forward(tokens, indices, 24, True),
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        OPS.npu_fused_moe_token_permute(tokens, torch.full((1, 2), 9), 2, True)


def test_a_large_result_that_passes_the_caches_is_the_same():
    tokens, indices = numbers(4096, 1024).bfloat16(), integers(0, 32, 4096, 4)
    ours = OPS.npu_fused_moe_token_permute(tokens, indices, 16384, False)
    theirs = reference(NAME)._forward(tokens, indices, 16384, False)
    assert ours[0].nbytes >= 32 << 20
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_its_gradient_is_right_also_a_second_time():
    tokens, indices = randn(6, 3), INDICES["several experts"][:6]
    assert torch.autograd.gradcheck(lambda t: permute(t, indices, 20)[0], (tokens,))
    permuted, slots = permute(tokens, indices)
    assert permuted.requires_grad
    assert not slots.requires_grad


def test_it_is_the_same_compiled_recomputed_and_in_inference_mode():
    indices = INDICES["several experts"]
    assert_holds_everywhere(lambda t: permute(t, indices)[0], randn(33, 34, dtype=torch.bfloat16))


def test_pytorch_finds_nothing_wrong_with_the_operator():
    torch.library.opcheck(OPS.npu_fused_moe_token_permute.default, (randn(6, 3), INDICES["several experts"][:6], 20, False))
