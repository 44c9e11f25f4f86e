"""Ulysses attention against dense attention of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed.context_parallel.heads_share import copies
from mindspeed.context_parallel.layout import contiguous
from mindspeed.verification.pool import WorkerPool
from tests.context_parallel.shards import assert_like_dense, attend, causal, document_numbers, made, reference, refusals

ULYSSES = "mindspeed.features.ulysses_attention.attention.ulysses_attention"
LONG = pytest.mark.long
WORLDS = [1, 2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)]


def run(pool: WorkerPool, world: int, tensors: Any, keywords: Any = None) -> Any:
    return pool.call(attend, world, ULYSSES, contiguous(world), tensors, keywords or {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("world", WORLDS)
def test_causal_with_any_number_of_key_heads(pool: WorkerPool, world: int, groups: int, dtype: torch.dtype) -> None:
    tensors = made(world * 7, 2, 12, 12 if groups == 6 else groups, 8, 4, dtype)
    expected = reference(tensors, causal(tensors[0].shape[0]))
    assert_like_dense(run(pool, world, tensors), contiguous(world), expected)


@pytest.mark.parametrize("world", WORLDS)
def test_masks_and_documents(pool: WorkerPool, world: int) -> None:
    tokens = 12 * world
    tensors = made(tokens, 2, 12, 4, 4, 4)
    mask = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[3] = True
    assert_like_dense(run(pool, world, tensors, {"mask": mask}), contiguous(world), reference(tensors, mask))
    ends = [[1, tokens // 2 + 1, tokens], [tokens]]
    hidden = torch.stack([causal(tokens) | (number[:, None] != number) for number in map(document_numbers, ends)])[:, None]
    assert_like_dense(run(pool, world, tensors, {"ends": ends}), contiguous(world), reference(tensors, hidden))


@pytest.mark.parametrize("world", WORLDS)
def test_alibi(pool: WorkerPool, world: int) -> None:
    tensors = made(world * 5, 2, 12, 12, 4, 4)
    tokens = tensors[0].shape[0]
    slopes = 2.0 ** -torch.arange(12.0)
    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs()
    expected = reference(tensors, causal(tokens), None, -slopes.double()[:, None, None] * distance)
    assert_like_dense(run(pool, world, tensors, {"slopes": slopes}), contiguous(world), expected)


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "times"),
    [(8, 8, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (8, 1, 4, 4), (12, 4, 3, 3), (12, 6, 4, 2)],
)
def test_key_heads_are_sent_no_more_often_than_needed(heads: int, groups: int, ranks: int, times: int) -> None:
    assert copies(heads, groups, ranks) == times


def test_heads_that_the_ranks_do_not_divide_are_refused(pool: WorkerPool) -> None:
    q, k, v, _ = made(4, 1, 3, 1, 4, 4)
    q4, k2, v2, _ = made(4, 1, 4, 2, 4, 4)
    for messages in pool.call(refusals, 2, ULYSSES, [([q, k, v], {}), ([q4, k2, v2], {"kv_allgather": True})]):
        assert messages == [
            "MS505 ulysses_attention: 3 query heads do not divide among 2 ranks",
            "MS505 ulysses_attention: 2 key heads are here, and only a single one is gathered",
        ]
