"""Attention with gathered keys and values against dense attention of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed.context_parallel.layout import contiguous, zigzag
from mindspeed.verification.pool import WorkerPool
from tests.context_parallel.shards import assert_like_dense, attend, causal, document_numbers, made, reference

GATHERED = "mindspeed.features.kv_allgather_cp.attention.kv_allgather_attention"
LONG = pytest.mark.long
WORLDS = [1, 2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_causal_with_fewer_key_heads_and_a_wider_value(pool: WorkerPool, world: int, dtype: torch.dtype) -> None:
    layout, tensors = zigzag(world), made(world * 2 * 5, 2, 4, 2, 8, 12, dtype)
    shards = pool.call(attend, world, GATHERED, layout, tensors, {})
    assert_like_dense(shards, layout, reference(tensors, causal(tensors[0].shape[0])))


@pytest.mark.parametrize("kind", [contiguous, zigzag])
@pytest.mark.parametrize("world", WORLDS)
def test_masks_and_documents(pool: WorkerPool, world: int, kind: Any) -> None:
    layout, tokens = kind(world), world * 12
    tensors = made(tokens, 2, 2, 1, 4, 4)
    ends = [[1, tokens // 2 + 1, tokens], [5, 6, tokens]]
    hidden = torch.stack([causal(tokens) | (number[:, None] != number) for number in map(document_numbers, ends)])[:, None]
    shards = pool.call(attend, world, GATHERED, layout, tensors, {"layout": layout, "ends": ends})
    assert_like_dense(shards, layout, reference(tensors, hidden))
    mask = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(1)) < 0.4
    shards = pool.call(attend, world, GATHERED, layout, tensors, {"layout": layout}, mask)
    assert_like_dense(shards, layout, reference(tensors, mask))
