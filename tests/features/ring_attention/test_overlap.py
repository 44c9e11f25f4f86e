"""A ring's transfers are hidden behind its blocks, and it never holds more than two blocks of others."""

from __future__ import annotations

import pytest

from mindspeed.features._shared.context_parallel.layout import zigzag
from mindspeed.verification.pool import WorkerPool
from tests.features._shared.shards import made
from tests.features._shared.watched import DELAY, delayed

RING = "mindspeed.features.ring_attention.attention.ring_attention"


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_transfers_cost_no_time_when_blocks_take_as_long(pool: WorkerPool, world: int) -> None:
    tensors = made(world * 4, 1, 2, 1, 4, 4)
    calls = 2 * (world + 1)  # the own block is two
    transfers = 3 * (world - 1)
    pool.call(delayed, world, RING, zigzag(world), tensors, True)  # the first call loads kernels
    early = max(result["seconds"] for result in pool.call(delayed, world, RING, zigzag(world), tensors, True))
    late = max(result["seconds"] for result in pool.call(delayed, world, RING, zigzag(world), tensors, False))
    assert early < DELAY * (calls + transfers / 2)
    assert late > DELAY * (calls + transfers * 0.9)


def test_at_most_two_blocks_of_others_are_there(pool: WorkerPool) -> None:
    world = 2
    for result in pool.call(delayed, world, RING, zigzag(world), made(8, 1, 2, 1, 4, 4), True):
        assert result["most"] <= 2
