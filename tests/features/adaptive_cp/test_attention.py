"""Adaptive attention against dense attention of one process, what it computes and what it sends."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mindspeed
from mindspeed.context_parallel import costs
from mindspeed.context_parallel.blocks import BlockCall
from mindspeed.context_parallel.heads import attention_by_heads
from mindspeed.context_parallel.layout import contiguous, nested
from mindspeed.features.adaptive_cp import attention
from mindspeed.features.adaptive_cp.attention import AdaptivePlan, adaptive_attention, best_layout, grid, plan_mask
from mindspeed.features.adaptive_cp.masks import WholeMask
from mindspeed.features.adaptive_cp.schedule import loads
from mindspeed.platforms.collectives import traffic
from mindspeed.workbench.verification.pool import WorkerPool
from tests.context_parallel.shards import assert_like_dense, causal, made, reference
from tests.features.adaptive_cp.masks import documents, interleaved, scattered, window

LONG = pytest.mark.long
CPU = torch.device("cpu")
WORLDS = [pytest.param(1, marks=LONG), 2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)]
DTYPES = [torch.float64, pytest.param(torch.float32, marks=LONG), pytest.param(torch.bfloat16, marks=LONG)]


def planned(mask: Tensor, ranks: int, reordered: bool, inner: int = 1) -> AdaptivePlan:
    return plan_mask(mask, ranks, best_layout(mask, ranks, mask.shape[0], inner) if reordered else None)


def shares(tensors: Sequence[Tensor], mask: Tensor, reordered: bool) -> list[Any]:
    """Result and gradients of this rank's share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = planned(mask, world, reordered)
    *inputs, dout = (plan.layout.take(x, rank).clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    out = adaptive_attention(q, k, v, dist.group.WORLD, plan)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


MASKS = {
    "causal": causal,
    "window": lambda n: window(n, n // 8),
    "scattered": scattered,
    "interleaved": interleaved,
    "documents": lambda n: documents(n, 4),
}


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("world", WORLDS)
def test_it_is_dense_attention(pool: WorkerPool, world: int, kind: str, dtype: torch.dtype) -> None:
    """Few key heads, another width of values, two samples, a row and a diagonal block that see nothing, any order."""
    tensors = made(world * 8, 2, 4, 2, 8, 4, dtype)
    mask, reordered = MASKS[kind](world * 8), kind in ("interleaved", "documents")
    layout = planned(mask, world, reordered).layout
    assert (layout != contiguous(world)) <= reordered  # whether an order pays depends on the number of ranks
    assert_like_dense(pool.call(shares, world, tensors, mask, reordered), layout, reference(tensors, mask))


def hybrid_shares(tensors: Sequence[Tensor], mask: Tensor, inner: int) -> list[Any]:
    """Result and gradients of this rank, with ``inner`` neighbours trading heads."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = planned(mask, world // inner, True, inner)
    layout = nested(plan.layout, inner)
    near = [dist.new_group(list(range(first, first + inner))) for first in range(0, world, inner)][rank // inner]
    far = [dist.new_group(list(range(first, world, inner))) for first in range(inner)][rank % inner]
    *inputs, dout = (layout.take(x, rank).clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    out = attention_by_heads(q, k, v, near, partial(adaptive_attention, group=far, plan=plan), "a test")
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize(("world", "inner"), [(2, 2), pytest.param(4, 2, marks=LONG)])
def test_neighbours_that_trade_heads_do_not_change_it(pool: WorkerPool, world: int, inner: int) -> None:
    tensors = made(world * 8, 2, 4, 2, 8, 4)
    mask = interleaved(world * 8)
    layout = nested(planned(mask, world // inner, True, inner).layout, inner)
    assert_like_dense(pool.call(hybrid_shares, world, tensors, mask, inner), layout, reference(tensors, mask))


def watched(tensors: Sequence[Tensor], mask: Tensor) -> dict[str, Any]:
    """Bytes that this rank sends in forward and backward, and the pairs of tokens whose scores it makes in each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plan, computed = plan_mask(mask, world), dict[str, list[Any]](accumulate_block=[], add_gradients=[])
    calls_of = AdaptivePlan.calls

    def watch(name: str, place: int) -> Any:
        original = getattr(attention, name)

        def call(*args: Any) -> Any:
            computed[name] += [args[place]] if name == "accumulate_block" else args[place]
            return original(*args)

        return call

    *inputs, dout = (contiguous(world).take(x, rank).clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    kept = {name: getattr(attention, name) for name in computed}
    blocks: list[tuple[int, int]] = []
    try:
        for name in computed:
            setattr(attention, name, watch(name, 2))
        AdaptivePlan.calls = lambda self, block, *how, **more: (  # type: ignore
            blocks.append((block.query, block.key)),
            calls_of(self, block, *how, **more),
        )[1]
        with traffic() as forward:
            out = adaptive_attention(q, k, v, dist.group.WORLD, plan)
        with traffic() as backward:
            out.backward(dout)
    finally:
        AdaptivePlan.calls = calls_of  # type: ignore[method-assign]
        for name, function in kept.items():
            setattr(attention, name, function)
    sent = [counted.total("send").bytes for counted in (forward, backward)]
    return {"sent": sent, "blocks": blocks, "calls": [len(calls) for calls in computed.values()]}


@pytest.mark.long
def test_a_window_of_an_eighth_sends_at_most_half_of_what_a_ring_does_and_computes_only_its_blocks(pool: WorkerPool) -> None:
    tensors = made(64, 1, 4, 4, 8, 8, torch.bfloat16)
    mask, ring = window(64, 8), costs.ring(costs.Attention(16, 4, 4, 8, 8, 2), 4)
    ranks = pool.call(watched, 4, tensors, mask, plan=mindspeed.plan(features=[], platform="cpu"))
    needed = [(q, k) for q in range(4) for k in range(4) if not mask[q * 16 : (q + 1) * 16, k * 16 : (k + 1) * 16].all()]
    assert sorted(block for rank in ranks for block in rank["blocks"]) == needed
    for rank in ranks:
        assert rank["calls"] == [len(rank["blocks"])] * 2
    forward, backward = zip(*(rank["sent"] for rank in ranks), strict=True)
    assert (
        sum(forward) == ring.forward
    )  # three blocks of keys and values by all four ranks, of which a ring has each send three
    assert max(forward) <= ring.forward / 2
    assert max(backward) <= ring.backward / 2
    assert max(forward) + max(backward) <= ring.both / 2


def bytes_of(plan: AdaptivePlan, rank: int, queries: int, keys: int, statistics: int) -> list[int]:
    """What a rank sends by the schedule, forward and backward, for so many bf16 numbers of queries, and keys with values."""
    forward = backward = 0
    for block in (block for turn in plan.rounds for block in turn):
        gives, computes = rank == (block.key if block.moves_keys else block.query), rank == block.where
        if block.moves_keys:
            forward += 2 * keys * gives
            backward += 2 * keys * gives + 4 * keys * computes
        elif block.moves_queries:
            forward += 2 * queries * gives + 4 * (queries + statistics) * computes
            backward += (3 * 2 * queries + 4 * statistics) * gives + 4 * queries * computes
    return [forward, backward]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=LONG)])
@pytest.mark.parametrize("kind", ["causal", "scattered"])
def test_it_sends_what_the_schedule_says(pool: WorkerPool, world: int, kind: str) -> None:
    tensors = made(world * 8, 2, 4, 2, 8, 8, torch.bfloat16)
    mask = MASKS[kind](world * 8)
    ranks = pool.call(watched, world, tensors, mask, plan=mindspeed.plan(features=[], platform="cpu"))
    numbers = 8 * 2 * 4 * 8, 2 * 8 * 2 * 2 * 8, 8 * 2 * 4
    assert [rank["sent"] for rank in ranks] == [bytes_of(plan_mask(mask, world), rank, *numbers) for rank in range(world)]


def calls(plan: AdaptivePlan, packed: bool = False) -> dict[tuple[int, int], list[BlockCall]]:
    return {(block.query, block.key): plan.calls(block, CPU, packed) for turn in plan.rounds for block in turn}


def computed(found: dict[tuple[int, int], list[BlockCall]]) -> int:
    """The pairs that calls compute: half of a causal square."""
    pairs = 0
    for one in (one for group in found.values() for one in group):
        rows, columns = one.ends or ([one.tile.rows[1] - one.tile.rows[0]], [one.tile.columns[1] - one.tile.columns[0]])
        for (r, r_end), (c, c_end) in zip(pairwise([0, *rows]), pairwise([0, *columns]), strict=True):
            high, wide = r_end - r, c_end - c
            pairs += high * wide - (high * (high - 1) // 2 if one.tile.causal else 0)
    return pairs


def test_of_a_block_only_the_rectangle_in_which_something_is_seen_is_computed() -> None:
    parts = calls(plan_mask(window(64, 8), 4))
    (corner,), (diagonal,) = parts[1, 0], parts[1, 1]
    assert (corner.tile.rows, corner.tile.columns) == ((0, 7), (9, 16))
    assert diagonal.tile.rows == diagonal.tile.columns == (0, 16)
    assert not corner.tile.causal
    assert not diagonal.tile.causal
    assert calls(plan_mask(causal(64), 4))[0, 0][0].tile.causal


@pytest.mark.parametrize("packed", [False, True])
def test_documents_are_computed_apart_and_in_one_call_where_there_is_one_sample(packed: bool) -> None:
    ends = [5, 6, 13, 16]
    number = torch.bucketize(torch.arange(16), torch.tensor(ends), right=True)
    mask = causal(16) | (number[:, None] != number[None, :])
    found = calls(plan_mask(mask, 1), packed)
    assert len(found[0, 0]) == (1 if packed else 4)
    assert all(one.tile.causal for one in found[0, 0])
    assert computed(found) == int((~mask).sum())


@pytest.mark.parametrize("ranks", [4, 8])
def test_sixteen_documents_are_balanced_and_few_hidden_pairs_are_computed(ranks: int) -> None:
    for seed in range(3):
        mask = documents(2048, seed=seed)
        layout = best_layout(mask, ranks, 1024)
        plan, pairs = plan_mask(mask, ranks, layout), grid(WholeMask(mask).pairs(layout.count), layout).tolist()
        work = loads(plan.rounds, pairs)
        assert max(work) <= 1.05 * sum(work) / ranks
        assert computed(calls(plan, packed=True)) <= 1.2 * int((~mask).sum())


def test_a_plan_for_another_length_is_refused(pool: WorkerPool) -> None:
    (message,) = pool.call(refused, 1, made(8, 1, 2, 2, 8, 8), causal(12))
    assert message == (
        "MS505 adaptive_attention: the plan of the mask is for 12 tokens, but the ranks hold 8\n"
        "  fix: see the docstring of adaptive_attention"
    )


def refused(tensors: Sequence[Tensor], mask: Tensor) -> str:
    try:
        adaptive_attention(*tensors[:3], dist.group.WORLD, plan_mask(mask, 1))
    except Exception as error:
        return str(error)
    return "not refused"


def test_the_layout_is_made_of_whole_numbers_alone() -> None:
    """The same order whatever the number of threads, as ranks may have different ones."""
    mask = scattered(96)
    before = torch.get_num_threads()
    try:
        layouts = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            layouts.append(attention.best_layout(mask, 4, 96))
    finally:
        torch.set_num_threads(before)
    assert layouts[0] == layouts[1]
