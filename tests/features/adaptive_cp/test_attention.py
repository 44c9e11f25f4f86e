"""Adaptive attention against dense attention of one process, and what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mindspeed
from mindspeed.features._shared.context_parallel import costs
from mindspeed.features._shared.context_parallel.layout import contiguous
from mindspeed.features.adaptive_cp.attention import adaptive_attention, plan_mask
from mindspeed.platforms.collectives import traffic
from mindspeed.verification.pool import WorkerPool
from tests.features._shared.shards import assert_like_dense, causal, made, reference

LONG = pytest.mark.long


def shares(tensors: Sequence[Tensor], mask: Tensor) -> list[Any]:
    """Result and gradients of this rank's share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    *inputs, dout = (contiguous(world).take(x, rank).clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    out = adaptive_attention(q, k, v, dist.group.WORLD, plan_mask(mask, world))
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def sent(tensors: Sequence[Tensor], mask: Tensor) -> int:
    """Bytes that this rank sends in forward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    q, k, v = (contiguous(world).take(x, rank) for x in tensors[:3])
    with traffic() as counted:
        adaptive_attention(q, k, v, dist.group.WORLD, plan_mask(mask, world))
    return counted.total("send").bytes


def window(tokens: int, width: int) -> Tensor:
    return ~torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - width)


def scattered(tokens: int) -> Tensor:
    """A random mask with blocks of any size that see nothing, on the diagonal as well, and a row that sees nothing."""
    mask = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[: tokens // 2, : tokens // 2] = True
    mask[tokens - 3] = True
    return mask


MASKS = {"causal": causal, "window": lambda n: window(n, n // 8), "scattered": scattered}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)])
def test_it_is_dense_attention(pool: WorkerPool, world: int, kind: str, dtype: torch.dtype) -> None:
    tensors = made(world * 8, 2, 4, 2, 8, 4, dtype)
    mask = MASKS[kind](world * 8)
    assert_like_dense(pool.call(shares, world, tensors, mask), contiguous(world), reference(tensors, mask))


@pytest.mark.long
def test_a_window_of_an_eighth_sends_at_most_half_of_what_a_ring_does(pool: WorkerPool) -> None:
    tensors = made(64, 1, 4, 4, 8, 8, torch.bfloat16)
    plan = mindspeed.plan(features=[], platform="cpu")
    bytes_sent = pool.call(sent, 4, tensors, window(64, 8), plan=plan)
    ring = costs.ring(costs.Attention(16, 4, 4, 8, 8, 2), 4).forward
    assert sum(bytes_sent) == ring  # three blocks of keys and values by all four ranks, of which a ring has each send three
    assert max(bytes_sent) <= ring / 2
