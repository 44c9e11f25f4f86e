"""The rounds of a ring: each rank has each block once, both ends of a transfer agree, gradients come home."""

import pytest

from mindspeed.context_parallel.ring import Rounds

RINGS = [Rounds(ranks, window) for ranks in range(1, 13) for window in range(1, ranks + 1) if ranks % window == 0]


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: f"{ring.ranks} by {ring.window}")
def test_each_rank_has_each_block_once_beginning_with_its_own(ring: Rounds) -> None:
    for rank in range(ring.ranks):
        blocks = [ring.block(rank, step) for step in range(ring.ranks)]
        assert blocks[0] == rank
        assert sorted(blocks) == list(range(ring.ranks))


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: f"{ring.ranks} by {ring.window}")
def test_both_ends_of_each_transfer_agree_and_every_block_arrives(ring: Rounds) -> None:
    for step in range(ring.ranks):
        for rank in range(ring.ranks):
            for hop in ring.hops(rank, step):
                assert ring.block(hop.source, step) == ring.block(rank, hop.due)
                assert any(back.to == rank and back.due == hop.due for back in ring.hops(hop.source, step))
    for rank in range(ring.ranks):
        arriving = [hop.due for step in range(ring.ranks) for hop in ring.hops(rank, step)]
        assert sorted(arriving) == list(range(1, ring.ranks))


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: f"{ring.ranks} by {ring.window}")
def test_a_gradient_follows_its_block_and_ends_at_its_owner(ring: Rounds) -> None:
    for rank in range(ring.ranks):
        for step in range(1, ring.ranks):
            hop = ring.gradient_hop(rank, step)
            assert ring.gradient_hop(hop.to, step).source == rank
            followed = ring.block(hop.to, hop.due) if hop.due < ring.ranks else hop.to
            assert ring.block(rank, step) == followed
