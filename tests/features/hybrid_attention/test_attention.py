"""Ulysses inside and a ring outside, against dense attention of one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel.layout import contiguous, nested, zigzag
from mindspeed.context_parallel.ring import ring_attention
from mindspeed.features.hybrid_attention.attention import hybrid_attention
from mindspeed.workbench.verification.pool import WorkerPool
from tests.context_parallel.shards import assert_like_dense, causal, made, reference


def shares(tensors: Sequence[Tensor], inner: int, window: int) -> list[Any]:
    """Result and gradients of this rank, with ``inner`` neighbours trading heads."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = nested(zigzag(world // inner), inner)
    near = [dist.new_group(list(range(first, first + inner))) for first in range(0, world, inner)][rank // inner]
    far = [dist.new_group(list(range(first, world, inner))) for first in range(inner)][rank % inner]
    *inputs, dout = (layout.take(x, rank).clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    out = hybrid_attention(q, k, v, near, lambda *parts: ring_attention(*parts, far, window=window))
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("world", "inner", "window"),
    [
        (2, 2, 1),
        (2, 1, 1),
        pytest.param(4, 2, 1, marks=pytest.mark.long),
        pytest.param(4, 2, 2, marks=pytest.mark.long),
    ],
)
def test_it_is_dense_attention(pool: WorkerPool, world: int, inner: int, window: int, dtype: torch.dtype) -> None:
    tensors = made(world * 2 * 3, 2, 4, 2, 8, 4, dtype)
    layout = nested(zigzag(world // inner), inner)
    shards = pool.call(shares, world, tensors, inner, window)
    assert_like_dense(shards, layout, reference(tensors, causal(tensors[0].shape[0])))


def test_a_ring_of_one_is_ulysses_on_a_contiguous_layout() -> None:
    assert nested(zigzag(1), 4).spans(2, 16) == contiguous(4).spans(2, 16)
