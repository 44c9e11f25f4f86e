"""The layer with a capacity on one, two and four ranks: equal bits for equal groups, bytes, and one capacity for all ranks."""

from typing import Any

import pytest
import torch

from benchmarks._moe_layer import Shape, plan_of
from mindspeed.workbench.verification.pool import WorkerPool
from tests.moe import closed_forms, grouped_layer
from tests.moe.grouped_layer import GROUPS, TOKENS, Seen, whole

SKEWS = {
    "even": {},
    "a starved expert": {5: -100.0},
    "starved ranks": {0: 100.0, 1: 100.0},
}
"""Numbers that are added to the logits of experts."""


def measure(*how: Any) -> Seen:
    return grouped_layer.measure(*how)


def reads(shape: Shape) -> int:
    from benchmarks import moe

    return moe.reads(shape)


def plan(ep: int, *more: str, tp: int = 1) -> Any:
    gate: dict[str, Any] = {"capacity_factor": 1.25, "min_capacity": 1}
    return plan_of("deepspeed-moe", *more, settings={"deepspeed-moe": gate}, ep=ep, tp=tp)


@pytest.mark.cover(1, because="the three layers share their gate and groups")
@pytest.mark.long
@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("layer", ["deepspeed-moe", "deepspeed-moe-rearrange", "deepspeed-moe-dropless"])
def test_any_number_of_ranks_gives_equal_bits_for_equal_groups(pool: WorkerPool, skew: str, layer: str) -> None:
    expected, *others = (pool.call(measure, ranks, SKEWS[skew], plan=plan(ranks, layer)) for ranks in (1, 2, 4))
    alone = whole(expected)
    assert bool(alone["kept"].sum(0).min() == 0) == (skew != "even")
    assert bool(alone["kept"].sum() < 2 * GROUPS * TOKENS) == (layer != "deepspeed-moe-dropless")
    for ranks in others:
        shared = whole(ranks)
        assert shared.keys() == alone.keys()
        assert [name for name in alone if not torch.equal(shared[name], alone[name])] == []
        router = torch.stack([rank.router for rank in ranks]).sum(0)
        torch.testing.assert_close(router, expected[0].router, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("layer", ["deepspeed-moe-rearrange", pytest.param("deepspeed-moe", marks=pytest.mark.long)])
def test_bytes_are_those_of_the_formula(pool: WorkerPool, ranks: int, layer: str) -> None:
    for rank in pool.call(measure, ranks, SKEWS["starved ranks"], plan=plan(ranks, layer)):
        rows = 8 * (GROUPS // ranks) * rank.capacity
        assert rank.all_to_all == closed_forms.equal_tables(rows, 32, 4, ranks) == 4 * rows * 32 * 4 * (ranks - 1) // ranks
        assert rank.maxima == (0, 0)


@pytest.mark.parametrize(
    ("ep", "tp"), [(2, 1), pytest.param(4, 1, marks=pytest.mark.long), pytest.param(2, 2, marks=pytest.mark.long)]
)
def test_one_rank_that_sends_all_to_one_expert_sets_the_capacity_of_all(pool: WorkerPool, ep: int, tp: int) -> None:
    """The other ranks need far fewer places, and the expert is another rank's."""
    seen = pool.call(measure, ep * tp, {0: 100.0}, [1], plan=plan(ep, "deepspeed-moe-dropless", tp=tp))
    assert {rank.capacity for rank in seen} == {TOKENS}
    rows = 8 * (GROUPS // (ep * tp)) * TOKENS
    for rank in seen:
        assert int(rank.kept.sum()) == 2 * TOKENS * GROUPS // (ep * tp)
        assert rank.maxima == (1, 8)
        assert rank.all_to_all == closed_forms.equal_tables(rows, 32, 4, ep)


@pytest.mark.long
@pytest.mark.parametrize("layer", ["deepspeed-moe", "deepspeed-moe-rearrange", "pipe-experts"])
def test_the_host_reads_the_device_once_where_the_capacity_follows_the_load_and_never_else(
    pool: WorkerPool, layer: str
) -> None:
    assert pool.call(reads, 2, Shape(), plan=plan(2, layer)) == [0, 0]
    assert pool.call(reads, 2, Shape(), plan=plan(2, layer, "deepspeed-moe-dropless")) == [1, 1]
