import pytest
import torch

from mindspeed.ops import npu_fused_moe_token_permute as permute
from mindspeed.ops import npu_fused_moe_token_unpermute as unpermute
from tests.ops.operator_checks import strided
from tests.ops.triton.kernels import TYPES, assert_like_reference, leaf, on_triton


def experts(tokens, topk, number=5):
    order = torch.rand(tokens, number, generator=torch.Generator().manual_seed(3)).argsort(1)
    return order[:, :topk]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("kept", [None, 5, -2, 1000])
def test_permute_is_like_the_reference_forward_and_backward(kept, topk, dtype):
    indices = experts(7, topk)
    call = lambda tokens: permute(tokens, indices, kept)  # noqa: E731
    assert_like_reference(call, leaf(7, 33, dtype=dtype), kernels={"spread", "gather"})


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("kept", [None, 5])
def test_unpermute_is_like_the_reference_forward_and_backward(kept, topk, dtype):
    rows, slots = permute(leaf(7, 33, dtype=dtype, grad=False), experts(7, topk), kept)
    rows, probs = rows.clone().requires_grad_(), leaf(7, topk, dtype=dtype, seed=4)
    weighed = lambda rows, probs: unpermute(rows, slots, probs)  # noqa: E731
    assert_like_reference(weighed, rows, probs, kernels={"gather", "spread_and_dot"})
    assert_like_reference(weighed, rows, probs.detach(), kernels={"gather", "spread"})
    assert_like_reference(weighed, rows, leaf(7, topk, seed=4), kernels={"gather", "spread_and_dot"}, tolerance=8e-3)
    assert_like_reference(lambda rows: unpermute(rows, slots), rows, kernels={"gather", "spread"})


def test_wide_rows_strides_vectors_of_indices_and_int32_are_taken():
    call = lambda tokens: permute(tokens, experts(3, 2).int())[0]  # noqa: E731
    assert_like_reference(call, leaf(3, 4100), kernels={"spread", "gather"})
    assert_like_reference(call, strided(3, 20, dtype=torch.float32), kernels={"spread", "gather"})
    assert_like_reference(lambda tokens: permute(tokens, experts(3, 1).flatten()), leaf(3, 8), kernels={"spread", "gather"})
    rows, slots = permute(leaf(3, 4100, grad=False), experts(3, 2))
    weighed = lambda rows, probs: unpermute(rows, slots, probs)  # noqa: E731
    inputs = rows.clone().requires_grad_(), leaf(3, 2, seed=4)
    assert_like_reference(weighed, *inputs, kernels={"gather", "spread_and_dot"})


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float64])
def test_tokens_of_other_types_are_copied(dtype):
    tokens, indices = torch.arange(12).view(3, 4).to(dtype), experts(3, 2)
    expected = permute(tokens, indices)
    with on_triton() as ran:
        found = permute(tokens, indices)
    assert ran == {"spread"}
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nothing_to_move_and_padded_rows():
    none = torch.zeros(0, 2, dtype=torch.int64)
    assert_like_reference(lambda tokens: permute(tokens, none), leaf(0, 8), kernels=set())
    probs = leaf(0, 2, seed=4)
    slots = none.flatten().int()
    assert_like_reference(lambda rows, probs: unpermute(rows, slots, probs), leaf(0, 8), probs, kernels=set())
    indices = torch.tensor([[2, 0], [1, 2]])
    assert_like_reference(lambda tokens: permute(tokens, indices, padded_mode=True), leaf(3, 8), kernels=set(), tolerance=0)
