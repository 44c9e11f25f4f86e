from __future__ import annotations

import pytest
import torch

from mindspeed.ops import npu_fused_moe_token_permute as permute
from mindspeed.ops import npu_fused_moe_token_unpermute as unpermute
from tests.ops.native.moe_cases import ROUNDING, TYPES, assert_close, laid_out, need, numbers, reference
from tests.ops.operator_checks import assert_holds_everywhere, randn

OPS = torch.ops.mindspeed
NAME = "npu_fused_moe_token_unpermute"
WIDTHS = [1, 31, 64, 200]


@pytest.fixture(autouse=True)
def _library():
    need(NAME)


def slots_of(tokens, topk):
    order = torch.randperm(tokens * topk, generator=torch.Generator().manual_seed(1))
    return order.to(torch.int32)


@pytest.mark.parametrize("topk", [1, 2, 5])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("weighed", [None, torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_reference_bit_for_bit(topk, dtype, weighed):
    slots, forward = slots_of(30, topk), reference(NAME)._forward
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
    assert_close(ours, reference(NAME)._forward(rows, names, probs, 9, 1, True), 2 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("weighed", [None, torch.float32, torch.bfloat16])
def test_its_gradients_are_those_of_the_reference(dtype, padded, weighed):
    tokens, topk, backward = 30, 1 if padded else 3, reference(NAME)._backward
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
    assert torch.equal(ours, reference(NAME)._backward(dout, None, slots, probs, 16384, 4, False)[0])


def test_an_index_that_names_no_row_of_any_list_is_refused():
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        OPS.npu_fused_moe_token_unpermute(torch.ones(2, 3), torch.tensor([0, -3]), None, 2, 1, False)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        OPS.npu_fused_moe_token_unpermute(torch.ones(2, 3), torch.tensor([0, 2]), None, 2, 1, True)


def test_it_undoes_the_permutation_with_gradients():
    indices = torch.randint(0, 4, (6, 2), generator=torch.Generator().manual_seed(1))
    tokens, probs = randn(6, 3), randn(6, 2, seed=3)

    def there_and_back(tokens, probs):
        rows, slots = permute(tokens, indices)
        return unpermute(rows, slots, probs)

    torch.testing.assert_close(there_and_back(tokens, probs), tokens * probs.sum(1, keepdim=True))
    assert torch.autograd.gradcheck(there_and_back, (tokens, probs))


def test_it_is_the_same_compiled_recomputed_and_in_inference_mode():
    slots = slots_of(30, 3)
    inputs = randn(90, 34, dtype=torch.bfloat16), randn(30, 3, dtype=torch.float32)
    assert_holds_everywhere(lambda r, p: unpermute(r, slots, p), *inputs)


def test_pytorch_finds_nothing_wrong_with_the_operators():
    slots, probs = slots_of(6, 2), randn(6, 2, dtype=torch.float32)
    torch.library.opcheck(OPS.npu_fused_moe_token_unpermute.default, (randn(12, 3), slots, randn(6, 2), 6, 2, False))
    arguments = numbers(6, 3), numbers(12, 3), slots, probs.detach(), 12, 2, False
    torch.library.opcheck(OPS.npu_fused_moe_token_unpermute_backward.default, arguments)
