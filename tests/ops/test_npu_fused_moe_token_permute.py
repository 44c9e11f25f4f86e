import pytest
import torch

from mindspeed.ops import npu_fused_moe_token_permute as permute
from mindspeed.ops import npu_fused_moe_token_unpermute as unpermute
from tests.ops.operator_checks import TOLERANCE, assert_close_to_fp64, randn, refused, strided


def experts(tokens, topk, number=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.stack([torch.randperm(number, generator=generator)[:topk] for _ in range(tokens)])
        if tokens
        else (torch.zeros(0, topk, dtype=torch.int64))
    )


def rows_of_experts(tokens, indices, kept):
    """Expert after expert, token after token: a list of (token, slot)."""
    flat = indices.reshape(tokens.shape[0], -1)
    pairs = [(int(flat[t, k]), t, k) for t in range(flat.shape[0]) for k in range(flat.shape[1])]
    return [(t, k) for _, t, k in sorted(pairs)][:kept]


def permuted(tokens, indices, kept=None):
    pairs = rows_of_experts(tokens, indices, kept)
    return torch.stack([tokens[t] for t, _ in pairs]) if pairs else tokens[:0]


def combined(rows, indices, probs, kept=None):
    """Each token is the sum of its rows times their probabilities."""
    out = [rows.new_zeros(rows.shape[1]) for _ in range(indices.shape[0])]
    for r, (t, k) in enumerate(rows_of_experts(indices, indices, kept)):
        out[t] = out[t] + rows[r] * (1 if probs is None else probs[t, k])
    return torch.stack(out) if out else rows[:0]


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("kept", [None, 5, 1, -2])
def test_rows_come_expert_after_expert_and_go_back_to_their_tokens(topk, kept):
    tokens, indices = randn(6, 3), experts(6, topk)
    probs, end = randn(6, topk, seed=3), {None: None, 5: 5, 1: 1, -2: 6 * topk - 2}[kept]
    rows, slots = permute(tokens, indices, kept)
    assert torch.equal(rows, permuted(tokens, indices, end))
    assert slots.dtype == torch.int32
    torch.testing.assert_close(unpermute(rows, slots, probs), combined(rows, indices, probs, end))
    assert torch.autograd.gradcheck(lambda t: permute(t, indices, kept)[0], (tokens,))
    rows = rows.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda r, p: unpermute(r, slots, p), (rows, probs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_there_and_back_is_exact_for_one_expert_per_token(dtype):
    tokens, indices = randn(33, 5, dtype=dtype), experts(33, 1)
    for shaped in (indices, indices.flatten(), indices.int()):
        rows, slots = permute(tokens, shaped)
        assert torch.equal(unpermute(rows, slots), tokens)
        assert torch.equal(unpermute(rows, slots, torch.ones(33, 1)), tokens)


def test_rows_of_several_experts_are_summed_without_probabilities_for_a_given_number_of_tokens():
    tokens, indices = randn(6, 3), experts(6, 2)
    rows, slots = permute(tokens, indices)
    torch.testing.assert_close(unpermute(rows, slots, restore_shape=(6, 3)), combined(rows, indices, None))
    with refused("npu_fused_moe_token_unpermute: 12 sorted_indices are not a multiple of 5 tokens"):
        unpermute(rows, slots, restore_shape=(5, 3))


def test_tokens_of_one_expert_keep_their_order():
    tokens = torch.arange(100.0)[:, None]
    rows, slots = permute(tokens, torch.zeros(100, 1, dtype=torch.int64))
    assert torch.equal(rows, tokens)
    assert torch.equal(slots, torch.arange(100, dtype=torch.int32))


def test_experts_without_tokens_have_no_rows():
    tokens, indices = randn(4, 3), torch.tensor([[0, 3], [3, 0], [0, 3], [0, 3]])
    rows, slots = permute(tokens, indices)
    assert torch.equal(rows, torch.cat((tokens, tokens)))
    assert torch.equal(unpermute(rows, slots, torch.full((4, 2), 0.5, dtype=torch.float64)), tokens)


def test_a_dropped_row_gives_and_gets_nothing():
    tokens, indices, probs = randn(3, 2), torch.tensor([[0], [1], [2]]), torch.ones(3, 1).double().requires_grad_()
    rows, slots = permute(tokens, indices, 2)
    out = unpermute(rows, slots, probs)
    assert torch.equal(out, torch.cat((tokens[:2], torch.zeros(1, 2))))
    out.sum().backward()
    assert tokens.grad[2].tolist() == [0, 0]
    assert probs.grad[2].item() == 0


@pytest.mark.parametrize(("tokens", "topk", "width"), [(0, 2, 3), (0, 1, 3), (4, 2, 0)])
def test_no_token_and_no_width_are_no_problem(tokens, topk, width):
    x, probs = randn(tokens, width), randn(tokens, topk)
    rows, slots = permute(x, experts(tokens, topk))
    assert rows.shape == (tokens * topk, width)
    y = unpermute(rows, slots, probs)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert probs.grad.shape == probs.shape


def test_all_rows_may_be_dropped():
    tokens, probs = randn(2, 3), randn(2, 1)
    rows, slots = permute(tokens, torch.tensor([[0], [1]]), -2)
    assert rows.shape == (0, 3)
    y = unpermute(rows, slots, probs)
    assert torch.equal(y, torch.zeros(2, 3, dtype=torch.float64))
    y.sum().backward()
    assert torch.equal(tokens.grad, torch.zeros(2, 3, dtype=torch.float64))


def test_padded_rows_name_their_tokens():
    """Three experts of capacity two: a token may be in several, one may be in none, the last slot repeats token 0."""
    tokens, source, probs = randn(5, 3), torch.tensor([[0, 2], [2, 3], [1, 0]]), randn(3, 2, seed=2)
    rows, slots = permute(tokens, source, padded_mode=True)
    assert torch.equal(rows, tokens[[0, 2, 2, 3, 1, 0]])
    out = unpermute(rows, slots, probs, padded_mode=True, restore_shape=tokens.shape)
    p = probs.flatten()
    shares = torch.stack((p[0] + p[5], p[4], p[1] + p[2], p[3], torch.zeros((), dtype=torch.float64)))
    torch.testing.assert_close(out, tokens * shares[:, None])
    assert torch.autograd.gradcheck(lambda t: permute(t, source, padded_mode=True)[0], (tokens,))
    rows = rows.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda r, p: unpermute(r, slots, p, True, (5, 3)), (rows, probs))
    assert torch.autograd.gradcheck(lambda r: unpermute(r, slots, None, True, (5, 3)), (rows,))


def test_strided_tokens_and_rows_give_the_same():
    tokens, indices, probs = strided(4, 3), experts(8, 2).t().flatten()[::4].view(4, 1), strided(4, 1, seed=3)
    rows, slots = permute(tokens, indices)
    assert torch.equal(rows, permuted(tokens, indices))
    strided_rows = rows.detach().t().contiguous().t().requires_grad_()
    torch.testing.assert_close(unpermute(strided_rows, slots, probs), combined(rows, indices, probs))
    assert torch.autograd.gradcheck(lambda r, p: unpermute(r, slots, p), (strided_rows, probs))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("prob_dtype", [torch.float32, None])
def test_values_and_gradients_are_close_to_the_fp64_formula(dtype, prob_dtype):
    tokens, indices, probs = randn(16, 32, dtype=dtype), experts(16, 4, 8), randn(16, 4, dtype=prob_dtype or dtype)
    slots = permute(tokens, indices)[1]
    assert_close_to_fp64(lambda t: permute(t, indices)[0], lambda t: permuted(t, indices), (tokens,))
    rows = randn(64, 32, dtype=dtype)
    assert_close_to_fp64(lambda r, p: unpermute(r, slots, p), lambda r, p: combined(r, indices, p), (rows, probs))


def test_the_gradient_of_many_rows_is_summed_wide_and_rounded_once():
    tokens = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    rows, _ = permute(tokens, torch.arange(512)[None])
    rows.backward(torch.full((512, 1), 1.0078125, dtype=torch.bfloat16))
    assert tokens.grad.item() == 516


def test_backward_of_unpermute_keeps_the_rows_only_for_the_probabilities():
    rows, probs = randn(4, 3), randn(2, 2, grad=False)
    slots = torch.arange(4, dtype=torch.int32)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        unpermute(rows, slots, probs)
        assert rows.data_ptr() not in saved
        unpermute(rows, slots, probs.requires_grad_())
    assert rows.data_ptr() in saved


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: permute(torch.ones(4), torch.zeros(4).long()), "permute: tokens has shape (4,), but must be [tokens, width]"),
        (lambda: permute(torch.ones(4, 2), torch.zeros(4)), "permute: indices is torch.float32, but must be int32 or int64"),
        (
            lambda: permute(torch.ones(4, 2), torch.zeros(3, 1).int()),
            "permute: indices of shape (3, 1) do not match 4 tokens",
        ),
        (
            lambda: unpermute(torch.ones(4), torch.zeros(4).int()),
            "unpermute: permuted_tokens is torch.float32 of shape (4,), but must be a floating-point matrix",
        ),
        (
            lambda: unpermute(torch.ones(4, 2), torch.zeros(4)),
            "unpermute: sorted_indices is torch.float32, but must be int32 or int64",
        ),
        (
            lambda: unpermute(torch.ones(4, 2), torch.zeros(4).int(), torch.ones(2, 2).int()),
            "unpermute: probs must have a floating-point type",
        ),
        (
            lambda: unpermute(torch.ones(4, 2), torch.zeros(4).int(), torch.ones(2, 3)),
            "unpermute: probs must be [tokens, K] with one number for each of the 4 sorted_indices",
        ),
        (
            lambda: unpermute(torch.ones(4, 2), torch.zeros(4).int(), None, True),
            "unpermute: padded_mode needs restore_shape=(tokens, 2), but restore_shape is None",
        ),
        (
            lambda: unpermute(torch.ones(4, 2), torch.zeros(3).int(), None, True, (2, 2)),
            "unpermute: sorted_indices has 3 entries, but permuted_tokens has 4 rows",
        ),
        (
            lambda: unpermute(torch.ones(4, 2), torch.zeros(4).int(), torch.ones(3), True, (2, 2)),
            "unpermute: probs must have one number for each of 4 rows",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with refused(f"npu_fused_moe_token_{message}"):
        call()
