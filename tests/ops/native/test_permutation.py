"""Tokens that go to experts and back: the C++ kernels beside their plain-torch references."""

import pytest
import torch

from tests.ops.native.moe_cases import ROUNDING, TYPES, assert_close, laid_out, need, numbers, reference

OPS = torch.ops.mindspeed
THERE, BACK = "npu_fused_moe_token_permute", "npu_fused_moe_token_unpermute"


@pytest.fixture(autouse=True)
def _library():
    need(THERE, BACK)


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
            theirs = reference(THERE)._forward(tokens, indices, kept, False)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))


def test_rows_named_by_their_token_are_those_of_the_reference():
    tokens, indices = numbers(9, 5), integers(0, 9, 4, 6)
    ours, theirs = (
        OPS.npu_fused_moe_token_permute(tokens, indices, 24, True),
        reference(THERE)._forward(tokens, indices, 24, True),
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        OPS.npu_fused_moe_token_permute(tokens, torch.full((1, 2), 9), 2, True)


def test_a_large_result_that_passes_the_caches_is_the_same():
    tokens, indices = numbers(4096, 1024).bfloat16(), integers(0, 32, 4096, 4)
    ours = OPS.npu_fused_moe_token_permute(tokens, indices, 16384, False)
    theirs = reference(THERE)._forward(tokens, indices, 16384, False)
    assert ours[0].nbytes >= 32 << 20
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


WIDTHS = [1, 31, 64, 200]


def slots_of(tokens, topk):
    order = torch.randperm(tokens * topk, generator=torch.Generator().manual_seed(1))
    return order.to(torch.int32)


@pytest.mark.parametrize("topk", [1, 2, 5])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("weighed", [None, torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_reference_bit_for_bit(topk, dtype, weighed):
    slots, forward = slots_of(30, topk), reference(BACK)._forward
    probs = None if weighed is None else numbers(30, topk, dtype=weighed, seed=3)
    for width in WIDTHS:
        for kept in (30 * topk, 17, 0):
            rows = numbers(kept, width, dtype=dtype)
            for layout in ("plain", "strided"):
                ours = OPS.npu_fused_moe_token_unpermute(laid_out(rows, layout), slots, probs, 30, topk, False)
                assert torch.equal(ours, forward(rows, slots, probs, 30, topk, False))
            assert torch.equal(OPS.npu_fused_moe_token_unpermute(rows, slots.long(), probs, 30, topk, False), ours)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("weighed", [False, True])
def test_rows_that_name_their_token_are_summed_as_by_the_reference(dtype, weighed):
    names = torch.randint(0, 7, (40,), generator=torch.Generator().manual_seed(1))
    rows, probs = numbers(40, 33, dtype=dtype), numbers(5, 8, seed=2) if weighed else None
    ours = OPS.npu_fused_moe_token_unpermute(rows, names, probs, 9, 1, True)
    assert_close(ours, reference(BACK)._forward(rows, names, probs, 9, 1, True), 2 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("weighed", [None, torch.float32, torch.bfloat16])
def test_its_gradients_are_those_of_the_reference(dtype, padded, weighed):
    tokens, topk, backward = 30, 1 if padded else 3, reference(BACK)._backward
    indices = slots_of(30, 1) if padded else slots_of(30, 3)
    for width in WIDTHS:
        for kept in (indices.numel(), indices.numel() if padded else 40):
            dout, rows = numbers(tokens, width, dtype=dtype), numbers(kept, width, dtype=dtype, seed=2)
            probs = None if weighed is None else numbers(tokens, topk, dtype=weighed, seed=3)
            for known in (rows, None):
                ours = OPS.npu_fused_moe_token_unpermute_backward(dout, known, indices, probs, kept, topk, padded)
                theirs = backward(dout, known, indices, probs, kept, topk, padded)
                assert torch.equal(ours[0], theirs[0])
                tolerance = 4e-6 if theirs[1].dtype == torch.float32 else 2 * ROUNDING[theirs[1].dtype]
                assert_close(ours[1], theirs[1], tolerance)


def test_large_gradients_that_pass_the_caches_are_the_same():
    slots, dout, probs = slots_of(4096, 4), numbers(4096, 1024).bfloat16(), numbers(4096, 4, seed=2)
    ours = OPS.npu_fused_moe_token_unpermute_backward(dout, None, slots, probs, 16384, 4, False)[0]
    assert ours.nbytes >= 32 << 20
    assert torch.equal(ours, reference(BACK)._backward(dout, None, slots, probs, 16384, 4, False)[0])


def test_an_index_that_names_no_row_of_any_list_is_refused():
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        OPS.npu_fused_moe_token_unpermute(torch.ones(2, 3), torch.tensor([0, -3]), None, 2, 1, False)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        OPS.npu_fused_moe_token_unpermute(torch.ones(2, 3), torch.tensor([0, 2]), None, 2, 1, True)
