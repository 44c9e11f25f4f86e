"""Attention over blocks of keys, merged one after another, is attention over all keys: in plain torch and by the operator."""

import inspect
import math
from unittest.mock import patch

import pytest
import torch

from mindspeed.context_parallel import blocks
from mindspeed.context_parallel.blocks import Statistics, start
from mindspeed.features.ring_attention_update import layers
from mindspeed.ops import fusion_attention
from mindspeed.ops.fusion_attention import LANES, LANES_OF
from tests.ops.attention_formula import MASKS, N, dense, qkv, sight, to_layout

MERGES = (blocks.merge, layers.merge)
LENGTH, WIDTH = 12, 4


def blocks_of(q, k, v, size):
    """Results over blocks of keys as a causal ring meets them, the last one first, with -inf and 0 for rows that see none."""
    for first in [*range(0, LENGTH, size)][::-1]:
        keys = slice(first, first + size)
        mask = torch.ones(LENGTH, size, dtype=torch.bool).triu(1 - first)
        out, *found, _, _, _, _ = fusion_attention(q, k[keys], v[keys], N, "SBH", scale=0.5, atten_mask=mask, sparse_mode=1)
        yield out.view(LENGTH, -1, N, WIDTH), Statistics(*found)


def merged(merge, parts, like):
    running = start(like.view(LENGTH, -1, N, WIDTH), WIDTH)
    with patch.object(blocks, "merge", merge):
        for out, found in parts:
            running.add(slice(None), (0, LENGTH), out, once(found))
    return running.out.flatten(2), running.statistics.lse


def once(found):
    """Statistics as the operator makes them here: once."""
    return Statistics(*(x[..., :1] for x in found))


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
    longer = torch.zeros(LENGTH + 2, q.shape[1], N, WIDTH, dtype=q.dtype)
    running = start(longer, WIDTH)
    out, *found, _, _, _, _ = fusion_attention(q, k[:4], v[:4], N, "SBH", atten_mask=MASKS[3], sparse_mode=3)
    late = once(Statistics(*found))  # the first 8 queries see none
    with patch.object(blocks, "merge", merge):
        for _ in range(2):
            running.add(slice(None), (1, LENGTH + 1), out.view(LENGTH, -1, N, WIDTH), late)
    torch.testing.assert_close(running.out[1:-1].flatten(2), out, rtol=1e-12, atol=1e-12)
    lse = running.statistics.lse
    assert not running.out[:9].any()
    assert not running.out[-1].any()
    torch.testing.assert_close(lse[..., 1:-1], late.lse + math.log(2))
    assert torch.isinf(lse[..., [0, -1]]).all()


@pytest.mark.parametrize("merge", MERGES)
def test_statistics_may_be_repeated(merge):
    """As the kernels of an NPU make and read them."""
    q, k, v = (to_layout(x.detach().float(), "SBH") for x in qkv(width=WIDTH, queries=LENGTH, keys=LENGTH))
    parts = list(blocks_of(q, k, v, 4))
    expected = merged(merge, parts, q)
    with patch.dict(LANES_OF, cpu=LANES), patch.object(blocks, "merge", merge):
        running = start(q.view(LENGTH, -1, N, WIDTH), WIDTH)
        for out, found in parts:
            running.add(slice(None), (0, LENGTH), out, found)
    assert torch.equal(running.out.flatten(2), expected[0])
    assert torch.equal(running.statistics.lse, expected[1])


def test_the_stand_in_takes_what_the_plain_merge_takes():
    assert inspect.signature(layers.merge) == inspect.signature(blocks.merge)
