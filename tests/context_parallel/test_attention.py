"""Algorithms of context-parallel attention against dense attention of one process: results and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed.context_parallel.costs import copies
from mindspeed.context_parallel.layout import contiguous, zigzag
from mindspeed.workbench.verification.pool import WorkerPool
from tests.context_parallel.shards import assert_like_dense, attend, causal, document_numbers, made, reference, refusals

RING = "mindspeed.context_parallel.ring:ring_attention"
ULYSSES = "mindspeed.features.ulysses_attention.attention:ulysses_attention"
GATHERED = "mindspeed.features.kv_allgather_cp.attention:kv_allgather_attention"
KINDS = [(RING, contiguous), (RING, zigzag), (ULYSSES, contiguous), (GATHERED, contiguous), (GATHERED, zigzag)]
LONG = pytest.mark.long
WORLDS = [1, 2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)]


def check(
    pool: WorkerPool,
    world: int,
    name: str,
    kind: Any,
    tensors: list[Tensor],
    hidden: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    **keywords: Any,
) -> None:
    """The shares of all ranks against the formula with what is hidden and added; all but Ulysses get a share of the mask."""
    layout, cut = kind(world), None if name == ULYSSES else mask
    if mask is not None or "ends" in keywords:
        keywords |= {"mask": mask} if name == ULYSSES else {"layout": layout}
    shards = pool.call(attend, world, name, layout, tensors, keywords, cut)
    assert_like_dense(shards, layout, reference(tensors, hidden, None, bias))


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "kind", "length", "heads", "groups", "value"),
    [
        (RING, zigzag, 10, 4, 2, 12),
        (GATHERED, zigzag, 10, 4, 2, 12),
        *((ULYSSES, contiguous, 7, 12, groups, 4) for groups in (1, 2, 12)),
    ],
)
@pytest.mark.parametrize("world", WORLDS)
def test_causal_with_any_number_of_key_heads_and_another_width_of_values(
    pool: WorkerPool, world: int, name: str, kind: Any, length: int, heads: int, groups: int, value: int, dtype: torch.dtype
) -> None:
    check(pool, world, name, kind, made(world * length, 2, heads, groups, 8, value, dtype), causal(world * length))


@pytest.mark.cover(1, because="every algorithm and layout is in the default run on two ranks")
@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_masks_with_a_row_that_sees_nothing(pool: WorkerPool, world: int, name: str, kind: Any) -> None:
    tokens = world * 12
    tensors = made(tokens, 2, 12, 4, 4, 4)
    mask = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[tokens // 2] = True
    by_batch = torch.stack([mask, mask.flip(1)])[:, None]
    for hidden in (mask, by_batch):
        check(pool, world, name, kind, tensors, hidden, mask=hidden)


@pytest.mark.cover(1, because="every algorithm and layout is in the default run on two ranks")
@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize("world", WORLDS)
def test_documents_packed_into_a_row_do_not_see_one_another(pool: WorkerPool, world: int, name: str, kind: Any) -> None:
    tokens = world * 12
    ends = [[1, tokens // 2 + 1, tokens], [tokens], [5, 6, 7, tokens - 1, tokens]]
    hidden = torch.stack([causal(tokens) | (number[:, None] != number) for number in map(document_numbers, ends)])[:, None]
    check(pool, world, name, kind, made(tokens, 3, 12, 4, 4, 4), hidden, ends=ends)


@pytest.mark.parametrize(("name", "kind"), [(RING, zigzag), (ULYSSES, contiguous)])
@pytest.mark.parametrize("world", WORLDS)
def test_alibi(pool: WorkerPool, world: int, name: str, kind: Any) -> None:
    tokens, slopes = world * 8, 2.0 ** -torch.arange(1, 13)
    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs()
    bias = -slopes.double()[:, None, None] * distance
    check(pool, world, name, kind, made(tokens, 2, 12, 12, 4, 4), causal(tokens), bias, slopes=slopes)


@pytest.mark.parametrize("world", WORLDS)
def test_without_a_mask_every_key_of_a_ring_is_seen(pool: WorkerPool, world: int) -> None:
    check(pool, world, RING, contiguous, made(world * 3, 1, 2, 2, 4, 4), causal=False)


@pytest.mark.parametrize(("world", "window"), [(2, 2), pytest.param(4, 2, marks=LONG), pytest.param(4, 4, marks=LONG)])
def test_a_double_ring(pool: WorkerPool, world: int, window: int) -> None:
    check(pool, world, RING, zigzag, made(world * 4, 1, 2, 1, 4, 4), causal(world * 4), window=window)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=LONG)])
@pytest.mark.parametrize("keep", ["half", "full"])
def test_kept_blocks_change_no_bit(pool: WorkerPool, world: int, keep: str) -> None:
    layout, tensors = zigzag(world), made(world * 6, 2, 2, 1, 4, 6, torch.bfloat16)
    plain, kept = (pool.call(attend, world, RING, layout, tensors, {"keep": choice}) for choice in ("none", keep))
    for one, other in zip(plain, kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_wrong_shapes_of_a_ring_are_refused(pool: WorkerPool) -> None:
    q, k, v, _ = made(4, 1, 2, 1, 4, 4)
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        (
            [q, k[1:], v[1:]],
            {},
            "query, key and value of shapes (4, 1, 2, 4), (3, 1, 1, 4), (3, 1, 1, 4) are not chunks of one sequence",
        ),
        ([q, q[:, :, [0, 0, 1]], q[:, :, [0, 0, 1]]], {}, "2 query heads are not divisible by 3 key heads"),
        ([q[:3], k[:3], v[:3]], {}, "3 local tokens cannot be split into 2 equal chunks"),
        ([q, k, v], {"window": 2}, "window=2 does not divide 1 ranks"),
        ([q, k, v], {"mask": torch.ones(4, 8).bool()}, "mask has shape (4, 8), but (4, 4) or (1, 1, 4, 4) is expected"),
        ([q, k, v], {"ends": [[2, 3]]}, "the document ends do not describe 1 rows whose last document ends at 4"),
        ([q, k, v], {"layout": zigzag(2)}, "the layout is for 2 ranks, but the group has 1"),
    ]
    (messages,) = pool.call(refusals, 1, RING, [case[:2] for case in cases])
    assert messages == [
        f"MS505 ring_attention: {message}\n  fix: see the docstring of ring_attention" for _, _, message in cases
    ]


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
            f"MS505 ulysses_attention: {text}\n  fix: see the docstring of ulysses_attention"
            for text in (
                "3 query heads are not divisible by 2 ranks",
                "kv_allgather supports one key head per rank, but this rank has 2",
            )
        ]
