"""Transfers are posted before and waited for after the blocks that hide them; a missing wait shows; few blocks are held."""

from typing import Any

import pytest
import torch

import mindspeed
from mindspeed.workbench.verification.pool import WorkerPool
from tests.context_parallel.algorithms import Algorithm, algorithms
from tests.context_parallel.shards import made
from tests.context_parallel.watched import DELAY, Run, all_recorded, results

LONG = pytest.mark.long
WORLDS = [2, pytest.param(4, marks=LONG)]
FORGETFUL = ("ring", "ulysses", "hybrid")
"""The algorithms whose every wait a test can forget: other ranks wait for the transfers all the same."""


def overlapping(world: int) -> dict[str, Algorithm]:
    """The algorithms that hide transfers, the adaptive one with as much to do for all ranks."""
    kinds = ("ring", "hybrid", "adaptive")
    return {name: one for name, one in algorithms(world).items() if one.kind in kinds and one.mask == "full"}


def hidden(events: list[tuple[str, int]]) -> list[bool]:
    """For each transfer whether a block is computed between its post and its wait."""
    numbers = [number for kind, number in events if kind == "post"]
    return [("block", 0) in events[events.index(("post", n)) : events.index(("wait", n))] for n in numbers]


def recorded(cases: dict[str, Algorithm], tensors: Any) -> dict[str, Run]:
    return all_recorded(cases, tensors)


@pytest.mark.parametrize("world", WORLDS)
def test_every_transfer_is_behind_a_block_in_forward_and_backward(pool: WorkerPool, world: int) -> None:
    cases, tensors = overlapping(world), made(world * 8, 1, 4, 4, 8, 8)
    for rank in pool.call(recorded, world, cases, tensors):
        for name, algorithm in cases.items():
            forward, backward = (hidden(side) for side in rank[name].events)
            steps = world // algorithm.inner - 1
            posts = steps * (1 + algorithm.second)  # on two communicators the directions are posted one by one
            again = {"none": 2, "half": 2, "full": 1}[algorithm.keep] * posts
            assert (len(forward), len(backward)) == (posts, again), name
            assert all(forward), name
            # the last gradients of the adaptive one come when nothing is left to compute
            assert all(backward[:-1] if algorithm.kind == "adaptive" else backward), name


@pytest.mark.parametrize("world", WORLDS)
def test_a_slow_transport_costs_no_time_unless_transfers_are_not_posted_early(pool: WorkerPool, world: int) -> None:
    cases = {name: one for name, one in overlapping(world).items() if name in ("ring", "double ring", "adaptive, all seen")}
    tensors = made(world * 8, 1, 4, 4, 8, 8)
    early = pool.call(slow, world, cases, tensors, False)
    at_once = pool.call(slow, world, cases, tensors, True)
    for name in cases:
        transfers = 3 * (world - 1)
        exposed = DELAY * (name.startswith("adaptive") + transfers / 4)
        for rank in early:
            assert rank[name].waited < exposed, name
        for rank in at_once:
            assert rank[name].waited > 0.9 * transfers * DELAY > exposed, name
        seconds = [max(rank[name].seconds for rank in side) for side in (early, at_once)]
        assert seconds[1] - seconds[0] > 0.5 * (transfers - 1) * DELAY, name


def slow(cases: dict[str, Algorithm], tensors: Any, at_once: bool) -> dict[str, Run]:
    """The quickest of three, for other load only adds."""
    runs = [all_recorded(cases, tensors, slow=True, at_once=at_once) for _ in range(3)]
    return {name: min((run[name] for run in runs), key=lambda one: one.seconds) for name in cases}


@pytest.mark.parametrize("world", WORLDS)
def test_a_ring_holds_its_own_block_and_at_most_two_more(pool: WorkerPool, world: int) -> None:
    """A double ring holds one more, which is on its way between windows while a window's blocks go round."""
    cases = {name: one for name, one in algorithms(world).items() if one.kind == "ring" and one.keep == "none"}
    for rank in pool.call(recorded, world, cases, made(world * 8, 1, 4, 4, 8, 8, torch.bfloat16)):
        for name, algorithm in cases.items():
            most = 3 if 1 < algorithm.window < world else 2
            assert max(rank[name].alive) == most, name


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_is_used_before_it_is_waited_for_and_a_missing_wait_is_found(pool: WorkerPool, world: int) -> None:
    cases, tensors = algorithms(world), made(world * 8, 2, 4, 2, 8, 4, torch.bfloat16)
    plain = pool.call(results, world, cases, tensors)
    poisoned, forgotten = zip(*pool.call(with_poison, world, cases, tensors, plan=poison()), strict=True)
    for name, algorithm in cases.items():
        for one, other in zip(plain, poisoned, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one[name], other[name], strict=True)), name
        if algorithm.kind in FORGETFUL:
            for rank in forgotten:
                assert any(x.isnan().any() for x in rank[name]), name


def with_poison(cases: dict[str, Algorithm], tensors: Any) -> tuple[Any, Any]:
    forgetful = {name: one for name, one in cases.items() if one.kind in FORGETFUL}
    return results(cases, tensors), results(forgetful, tensors, early=True)


def poison() -> Any:
    return mindspeed.plan(features=[], platform="cpu", settings={"device-emulation": {"poison": True}})
