"""Layouts: every token is held once, and taking is undone by restoring."""

import pytest
import torch

from mindspeed.context_parallel.layout import Layout, contiguous, nested, zigzag

LAYOUTS = {
    "contiguous 3": contiguous(3),
    "zigzag 1": zigzag(1),
    "zigzag 4": zigzag(4),
    "zigzag 2 by 3": nested(zigzag(2), 3),
    "contiguous 2 by 2": nested(contiguous(2), 2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_token_is_held_once_and_restoring_undoes_taking(layout: Layout) -> None:
    x = torch.arange(2 * layout.count * 3 * 2).view(2, layout.count * 3, 2)
    shards = [layout.take(x, rank, 1) for rank in range(layout.ranks)]
    assert {shard.shape for shard in shards} == {(2, layout.count * 3 // layout.ranks, 2)}
    assert torch.equal(layout.restore(shards, 1), x)


def test_zigzag_gives_the_first_rank_both_ends() -> None:
    assert zigzag(2).spans(0, 8) == ((0, 2), (6, 8))
    assert zigzag(2).spans(1, 8) == ((2, 6),)


def test_neighbours_of_a_nested_layout_hold_together_what_their_outer_rank_holds() -> None:
    x = torch.arange(24)
    outer, layout = zigzag(2), nested(zigzag(2), 3)
    for ring in range(2):
        together = torch.cat([layout.take(x, 3 * ring + part) for part in range(3)])
        assert torch.equal(together, outer.take(x, ring))
