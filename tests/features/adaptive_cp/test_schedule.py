"""The schedule of needed blocks: each once, nobody twice in a round, short, and frugal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mindspeed.features.adaptive_cp.schedule import Block, schedule

GRIDS = st.integers(1, 8).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=n, max_size=n))


@given(GRIDS)
def test_every_needed_block_is_computed_once_by_one_of_its_two_ranks(needed) -> None:
    done = [block for turn in schedule(needed) for block in turn]
    pairs = [(block.query, block.key) for block in done]
    assert sorted(pairs) == [(q, k) for q, row in enumerate(needed) for k, seen in enumerate(row) if seen]
    assert all(block.where in (block.query, block.key) for block in done)


@given(GRIDS)
def test_a_rank_computes_one_block_in_a_round_and_idles_only_when_it_can_do_nothing(needed) -> None:
    rounds = schedule(needed)
    for number, turn in enumerate(rounds):
        busy = [block.where for block in turn]
        assert len(set(busy)) == len(busy)
        later = [block for rest in rounds[number + 1 :] for block in rest]
        idle = set(range(len(needed))) - set(busy)
        assert not any(block.query in idle for block in later)


def test_a_full_grid_takes_as_many_rounds_as_ranks() -> None:
    assert len(schedule([[True] * 4] * 4)) == 4


def test_idle_ranks_help_under_a_causal_mask() -> None:
    needed = [[k <= q for k in range(4)] for q in range(4)]
    rounds = schedule(needed)
    assert len(rounds) == 3  # ten blocks on four ranks
    assert Block(3, 0, 0) in rounds[1]


def test_a_window_sends_only_the_neighbours_keys() -> None:
    needed = [[q - 1 <= k <= q for k in range(4)] for q in range(4)]
    moved = [block for turn in schedule(needed) for block in turn if block.moves_keys or block.moves_queries]
    assert len(moved) == 3
    assert len(schedule(needed)) == 2
