"""Attention over blocks of keys, merged one after another, is attention over all keys: in plain torch and by the operator."""

import inspect

import pytest
import torch

from mindspeed.context_parallel import blocks
from mindspeed.features.ring_attention_update import layers
from mindspeed.ops import fusion_attention
from tests.ops.attention_formula import MASKS, N, dense, qkv, sight, to_layout

MERGES = (blocks.merge, layers.merge)
LENGTH, WIDTH = 12, 4


def blocks_of(q, k, v, size):
    """Results over blocks of keys as a causal ring meets them, the last one first: (out, lse), -inf for rows that see none."""
    for start in [*range(0, LENGTH, size)][::-1]:
        keys = slice(start, start + size)
        mask = torch.ones(LENGTH, size, dtype=torch.bool).triu(1 - start)
        out, maximum, total, *_ = fusion_attention(q, k[keys], v[keys], N, "SBH", scale=0.5, atten_mask=mask, sparse_mode=1)
        yield out, (maximum + total.log())[..., 0]


def merged(merge, parts, like):
    batch = like.shape[1]
    out = torch.zeros(LENGTH, batch, N, WIDTH, dtype=torch.promote_types(like.dtype, torch.float32))
    lse = torch.full((batch, N, LENGTH), -torch.inf, dtype=out.dtype)
    for part in parts:
        merge(out, lse, *part)
    return out.flatten(2), lse


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("size", [1, 3, 4, 6, 12])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_merged_blocks_are_dense_attention(merge, size, dtype, tolerance):
    inputs = [x.detach() for x in qkv(width=WIDTH, queries=LENGTH, keys=LENGTH)]
    expected, maximum, total = dense(*inputs, sight(2, LENGTH, LENGTH))
    q, k, v = (to_layout(x, "SBH").to(dtype) for x in inputs)
    out, lse = merged(merge, blocks_of(q, k, v, size), q)
    torch.testing.assert_close(out.double(), to_layout(expected, "SBH"), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), maximum + total.log(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("merge", MERGES)
def test_blocks_may_come_in_any_order(merge):
    q, k, v = (to_layout(x.detach(), "SBH") for x in qkv(width=WIDTH, queries=LENGTH, keys=LENGTH))
    parts = list(blocks_of(q, k, v, 3))
    expected = merged(merge, parts, q)
    for order in ([3, 1, 0, 2], [0, 1, 2, 3]):
        for value, reference in zip(merged(merge, [parts[n] for n in order], q), expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("merge", MERGES)
def test_rows_that_nothing_saw_stay_zero_and_others_are_not_touched(merge):
    q, k, v = (to_layout(x.detach(), "SBH") for x in qkv(width=WIDTH, queries=LENGTH, keys=LENGTH))
    out, lse = torch.zeros(LENGTH + 2, 2, N, WIDTH, dtype=q.dtype), torch.full((2, N, LENGTH + 2), -torch.inf, dtype=q.dtype)
    late = fusion_attention(q, k[:4], v[:4], N, "SBH", atten_mask=MASKS[3], sparse_mode=3)  # the first 8 queries see none
    late_lse = (late[1] + late[2].log())[..., 0]
    merge(out[1:-1], lse[..., 1:-1], late[0], late_lse)
    assert torch.equal(out[1:-1].flatten(2), late[0])
    assert not out[:9].any()
    assert not out[-1].any()
    assert torch.equal(lse[..., 1:-1], late_lse)
    assert torch.isinf(lse[..., [0, -1]]).all()


def test_the_stand_in_takes_what_the_plain_merge_takes():
    assert inspect.signature(layers.merge) == inspect.signature(blocks.merge)
