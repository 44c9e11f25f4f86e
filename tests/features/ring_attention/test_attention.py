"""Ring attention against dense attention of one process: every layout, window and kind of mask, results and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed.context_parallel.layout import contiguous, zigzag
from mindspeed.verification.pool import WorkerPool
from tests.context_parallel.shards import assert_like_dense, attend, causal, document_numbers, made, reference, refusals

RING = "mindspeed.features.ring_attention.attention.ring_attention"
LONG = pytest.mark.long
WORLDS = [1, 2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)]


def run(pool: WorkerPool, world: int, layout: Any, tensors: Any, keywords: Any = None, mask: Any = None) -> Any:
    return pool.call(attend, world, RING, layout, tensors, keywords or {}, mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_causal_with_fewer_key_heads_and_a_wider_value(pool: WorkerPool, world: int, dtype: torch.dtype) -> None:
    layout, tensors = zigzag(world), made(world * 2 * 5, 2, 4, 2, 8, 12, dtype)
    expected = reference(tensors, causal(tensors[0].shape[0]))
    assert_like_dense(run(pool, world, layout, tensors), layout, expected)


@pytest.mark.parametrize("world", WORLDS)
def test_a_general_mask_with_a_row_that_sees_nothing(pool: WorkerPool, world: int) -> None:
    layout, tensors = contiguous(world), made(world * 7, 2, 2, 1, 4, 4)
    tokens = tensors[0].shape[0]
    mask = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[tokens // 2] = True
    by_batch = torch.stack([mask, mask.flip(1)])[:, None]
    for hidden in (mask, by_batch):
        assert_like_dense(run(pool, world, layout, tensors, mask=hidden), layout, reference(tensors, hidden))


@pytest.mark.parametrize("world", WORLDS)
def test_without_a_mask_every_key_is_seen(pool: WorkerPool, world: int) -> None:
    layout, tensors = contiguous(world), made(world * 3, 1, 2, 2, 4, 4)
    assert_like_dense(run(pool, world, layout, tensors, {"causal": False}), layout, reference(tensors))


@pytest.mark.parametrize("kind", [contiguous, zigzag])
@pytest.mark.parametrize("world", WORLDS)
def test_documents_packed_into_a_row_do_not_see_one_another(pool: WorkerPool, world: int, kind: Any) -> None:
    layout = kind(world)
    tokens = world * 12
    tensors = made(tokens, 3, 2, 1, 4, 4)
    ends = [[1, tokens // 2 + 1, tokens], [tokens], [5, 6, 7, tokens - 1, tokens]]
    hidden = torch.stack([causal(tokens) | (number[:, None] != number) for number in map(document_numbers, ends)])[:, None]
    assert_like_dense(run(pool, world, layout, tensors, {"layout": layout, "ends": ends}), layout, reference(tensors, hidden))


@pytest.mark.parametrize("world", WORLDS)
def test_alibi(pool: WorkerPool, world: int) -> None:
    layout, tensors = zigzag(world), made(world * 8, 2, 4, 2, 4, 4)
    tokens = tensors[0].shape[0]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs()
    expected = reference(tensors, causal(tokens), None, -slopes.double()[:, None, None] * distance)
    assert_like_dense(run(pool, world, layout, tensors, {"slopes": slopes}), layout, expected)


@pytest.mark.parametrize(("world", "window"), [(2, 2), pytest.param(4, 2, marks=LONG), pytest.param(4, 4, marks=LONG)])
def test_a_double_ring(pool: WorkerPool, world: int, window: int) -> None:
    layout, tensors = zigzag(world), made(world * 4, 1, 2, 1, 4, 4)
    expected = reference(tensors, causal(tensors[0].shape[0]))
    assert_like_dense(run(pool, world, layout, tensors, {"window": window}), layout, expected)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=LONG)])
@pytest.mark.parametrize("keep", ["half", "full"])
def test_kept_blocks_change_no_bit(pool: WorkerPool, world: int, keep: str) -> None:
    layout, tensors = zigzag(world), made(world * 6, 2, 2, 1, 4, 6, torch.bfloat16)
    plain, kept = (run(pool, world, layout, tensors, {"keep": choice}) for choice in ("none", keep))
    for one, other in zip(plain, kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_wrong_shapes_are_refused(pool: WorkerPool) -> None:
    q, k, v, _ = made(4, 1, 2, 1, 4, 4)
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        (
            [q, k[1:], v[1:]],
            {},
            "query, key and value of shapes (4, 1, 2, 4), (3, 1, 1, 4), (3, 1, 1, 4) are not shares of one sequence",
        ),
        ([q, q[:, :, [0, 0, 1]], q[:, :, [0, 0, 1]]], {}, "3 key heads do not divide 2 query heads"),
        ([q[:3], k[:3], v[:3]], {}, "3 tokens here are not 2 equal pieces"),
        ([q, k, v], {"window": 2}, "a window of 2 does not divide 1 ranks"),
        ([q, k, v], {"mask": torch.ones(4, 8).bool()}, "mask has shape (4, 8); expected is (4, 4) or (1, 1, 4, 4)"),
        ([q, k, v], {"ends": [[2, 3]]}, "ends do not give 1 rows whose last document ends at 4"),
        ([q, k, v], {"layout": zigzag(2)}, "the layout is for 2 ranks and the group has 1"),
    ]
    (messages,) = pool.call(refusals, 1, RING, [case[:2] for case in cases])
    assert messages == [f"MS505 ring_attention: {message}" for _, _, message in cases]
