"""What the chunks of a layer hide, keep and compute, and the order of their transfers both ways."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _chunked_layer as chunked
from benchmarks._chunked_layer import MASK, Measured, Run, plan
from mindspeed.workbench.verification.pool import WorkerPool

pytestmark = pytest.mark.long

PLAIN = Run()
MOST = {2: 0.45, 4: 0.30}
"""Time of transfers that is not hidden, as a share of that of the whole layer, by chunks."""
KEPT = {2: 1.05, 4: 1.06}
"""Activations kept, as a multiple of the whole layer's, by chunks: of 24 tokens, where each chunk's routing weighs much."""


def measure(how: Run) -> Measured:
    return chunked.measure(how)


def ranks(pool: WorkerPool, parts: int, *more: str, how: Run = PLAIN, tp: int = 1, **options: Any) -> list[Measured]:
    """The layer on 2 x ``tp`` ranks, whole with 0 ``parts``."""
    return pool.call(measure, 2 * tp, how, plan=plan(parts, *more, tp=tp, **options))


def agree(some: list[Measured], others: list[Measured]) -> bool:
    pairs = [pair for a, b in zip(some, others, strict=True) for pair in zip(a.values, b.values, strict=True)]
    return all((x - y).abs().max() <= 2e-6 * y.abs().max() for x, y in pairs)


@pytest.mark.cover
@pytest.mark.parametrize("without", [(), ("flash-attention",)], ids=["operator", "scores"])
@pytest.mark.parametrize("full", [False, True], ids=["causal", "full"])
@pytest.mark.parametrize("tp", [1, 2])
def test_chunks_give_what_the_layer_gives(pool: WorkerPool, full: bool, tp: int, without: tuple[str, ...]) -> None:
    how = Run(full=full)
    whole = ranks(pool, 0, how=how, tp=tp, without=without)
    for parts in (2, 4):
        assert agree(ranks(pool, parts, how=how, tp=tp, without=without), whole)


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_of_a_chunk_are_computed_in_units(pool: WorkerPool, tp: int) -> None:
    whole, chunks = (ranks(pool, parts, "pipe-experts", tp=tp) for parts in (0, 2))
    assert agree(chunks, whole)
    assert all(rank.hooks == {1} for rank in chunks)


@pytest.mark.cover(1, because="test_chunks_give_what_the_layer_gives has the layouts")
@pytest.mark.parametrize("more", [(), ("moe-shared-experts",)], ids=["", "shared experts"])
@pytest.mark.parametrize("tp", [1, 2])
def test_losses_of_megatrons_router_are_of_all_chunks_together(pool: WorkerPool, tp: int, more: tuple[str, ...]) -> None:
    whole = ranks(pool, 0, *more, tp=tp, layer="moe-alltoall-overlap")
    for parts in (2, 4):
        assert agree(ranks(pool, parts, *more, tp=tp, layer="moe-alltoall-overlap"), whole)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_wrong_offset_of_a_chunk_is_seen(pool: WorkerPool, tp: int) -> None:
    assert not agree(ranks(pool, 2, how=Run(fault="offset"), tp=tp), ranks(pool, 0, tp=tp))


@pytest.mark.parametrize("parts", [2, 4])
def test_transfers_are_hidden_and_nothing_more_is_kept(pool: WorkerPool, parts: int) -> None:
    whole, chunks = (ranks(pool, number, "flash-attention") for number in (0, parts))
    for before, after in zip(whole, chunks, strict=True):
        assert after.exposed <= MOST[parts] * before.exposed
        assert after.kept - MASK <= KEPT[parts] * (before.kept - MASK)
    for before, eager in zip(whole, ranks(pool, parts, how=Run(fault="wait at the post")), strict=True):
        assert eager.exposed > MOST[parts] * before.exposed


@pytest.mark.parametrize("parts", [2, 4])
def test_a_weight_of_all_chunks_fires_its_hook_once(pool: WorkerPool, parts: int) -> None:
    assert [rank.hooks for rank in ranks(pool, parts)] == [{1}, {1}]


@pytest.mark.parametrize("parts", [2, 4])
def test_no_wait_is_missing_and_each_is_needed(pool: WorkerPool, parts: int) -> None:
    poison = {"poison": True}
    good = ranks(pool, parts, cpu=poison)
    assert all(value.isfinite().all() for rank in good for value in rank.values)
    assert good[0].waits == 4 * parts
    for skip in range(good[0].waits):
        spoiled = ranks(pool, parts, cpu=poison, how=Run(skip=skip))
        assert not all(value.isfinite().all() for rank in spoiled for value in rank.values)


@pytest.mark.parametrize("parts", [2, 4])
def test_posts_and_waits_are_in_the_order_of_the_pipeline_both_ways(pool: WorkerPool, tmp_path: Path, parts: int) -> None:
    ranks(pool, parts, cpu={"collective_log": str(tmp_path / "log")})
    for rank in range(2):
        assert events(tmp_path / f"log.{rank}") == pipeline(parts)


def pipeline(parts: int) -> list[str]:
    """Launches and waits of forward and, mirrored, of backward."""
    chunks = range(1, parts + 1)
    forward = [f"launch {c}" for c in chunks]
    for c in chunks:
        forward += [f"wait {c}", f"launch {parts + c}"]
    forward += [f"wait {parts + c}" for c in chunks]
    turned = {"wait": "launch", "launch": "wait"}
    backward = [row.split() for row in reversed(forward)]
    numbers = {number: 2 * parts + place for place, number in enumerate((n for act, n in backward if act == "wait"), 1)}
    return [*forward, *(f"{turned[act]} {numbers[number]}" for act, number in backward)]


def events(log: Path) -> list[str]:
    """Launches and waits of all-to-alls, numbered by launch."""
    names: dict[int, int] = {}
    rows = []
    for event in map(json.loads, log.read_text().splitlines()):
        if event["event"] == "launch" and event["kind"].startswith("all_to_all"):
            names[event["id"]] = len(names) + 1
        if event["event"] in ("launch", "wait") and event["id"] in names:
            rows.append(f"{event['event']} {names[event['id']]}")
    return rows
