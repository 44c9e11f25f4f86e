"""The schedule of needed blocks: each once, nobody twice in a round, short, and frugal."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed.features.adaptive_cp import attention
from mindspeed.features.adaptive_cp.schedule import BALANCED, Block, loads, schedule

PAIRS = st.one_of(st.just(0), st.integers(1, 64))
GRIDS = st.integers(1, 8).flatmap(lambda n: st.lists(st.lists(PAIRS, min_size=n, max_size=n), min_size=n, max_size=n))


@given(GRIDS)
def test_every_needed_block_is_computed_once_by_one_of_its_two_ranks(needed) -> None:
    done = [block for turn in schedule(needed) for block in turn]
    pairs = [(block.query, block.key) for block in done]
    assert sorted(pairs) == [(q, k) for q, row in enumerate(needed) for k, seen in enumerate(row) if seen]
    assert all(block.where in (block.query, block.key) for block in done)


@given(GRIDS)
def test_a_rank_computes_one_block_in_a_round_without_a_gap(pairs) -> None:
    turns = [[block.where for block in turn] for turn in schedule(pairs)]
    assert all(len(set(turn)) == len(turn) for turn in turns)
    assert all(set(after) <= set(before) for before, after in pairwise(turns))


@given(GRIDS)
def test_work_is_given_away_only_by_a_rank_that_has_too_much(pairs) -> None:
    rows, work = [sum(row) for row in pairs], loads(schedule(pairs), pairs)
    assert sum(work) == sum(rows)
    assert max(work) <= max(rows)
    if max(rows) * len(rows) <= BALANCED * sum(rows):
        assert work == rows


def test_a_full_grid_takes_as_many_rounds_as_ranks() -> None:
    assert len(schedule([[2] * 4] * 4)) == 4


def test_idle_ranks_help_under_a_causal_mask() -> None:
    pairs = [[2 * (k < q) + (k == q) for k in range(4)] for q in range(4)]
    turns = schedule(pairs)
    assert len(turns) == 3  # ten blocks on four ranks
    assert Block(3, 0, 0) in turns[1]
    assert sorted(loads(turns, pairs)) == [3, 3, 5, 5]


def test_a_window_sends_only_the_neighbours_keys() -> None:
    needed = [[int(q - 1 <= k <= q) for k in range(4)] for q in range(4)]
    moved = [block for turn in schedule(needed) for block in turn if block.moves_keys or block.moves_queries]
    assert len(moved) == 3
    assert len(schedule(needed)) == 2


class Channels:
    """A transport as strict as can be: a message moves when both ends have posted it, each pair's in the order of posting."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.posted: dict[tuple[int, int, str], int] = {}
        self.met: dict[tuple[int, int, int], tuple[threading.Event, threading.Event, list[Any]]] = {}

    def place(self, source: int, target: int, end: str) -> tuple[threading.Event, threading.Event, list[Any]]:
        """The place of the next message of a pair as seen by one of its ends."""
        with self.lock:
            number = self.posted[source, target, end] = self.posted.get((source, target, end), -1) + 1
            return self.met.setdefault((source, target, number), (threading.Event(), threading.Event(), []))

    def post(self, group: Any, messages: Iterable[attention.BlockMessage]) -> Any:
        waits, arriving = [], []
        for message in messages:
            if group.rank() == message.source:
                sent, taken, content = self.place(message.source, message.target, "send")
                content += [message.block, *(x.clone() for x in message.tensors)]
                sent.set()
                waits.append((taken, None, []))
            elif group.rank() == message.target:
                sent, taken, content = self.place(message.source, message.target, "receive")
                taken.set()
                waits.append((sent, message, content))
                arriving.append(message)

        def wait() -> list[attention.BlockMessage]:
            for event, message, content in waits:
                assert event.wait(20), "a message is waited for that the other end never posts"
                if message is not None:
                    assert content[0] == message.block
                    for room, x in zip(message.tensors, content[1:], strict=True):
                        room.copy_(x)
            return arriving

        return SimpleNamespace(wait=wait)


def run_rank(rank: int, turns: list[Any], returns: Callable[[Block], bool]) -> tuple[list[Block], list[Block]]:
    """What a rank computes and what it takes of others; every message says whose it is."""
    computed: list[Block] = []
    taken: list[Block] = []

    def compute(block: Block, arrived: list[torch.Tensor]) -> list[torch.Tensor]:
        source = block.key if block.moves_keys else block.query
        assert [int(x) for x in arrived] == ([] if source == rank else [source])
        computed.append(block)
        return [torch.tensor(100 * block.query + block.key)]

    def take(block: Block, results: list[torch.Tensor]) -> None:
        assert [int(x) for x in results] == [100 * block.query + block.key]
        taken.append(block)

    own = [torch.tensor(rank)]
    work = attention.Work(lambda block: own, compute, lambda block: [torch.tensor(0)], take)
    attention.run(turns, SimpleNamespace(rank=lambda: rank), work, returns)  # type: ignore[arg-type]
    return computed, taken


@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=pytest.mark.long)])
@settings(max_examples=40)
@given(needed=GRIDS)
def test_both_ends_of_every_transfer_agree_and_nobody_waits_for_ever(backward: bool, needed: list[list[bool]]) -> None:
    def returns(block: Block) -> bool:
        return block.query != block.key if backward else block.moves_queries

    turns, ranks, channels = schedule(needed), range(len(needed)), Channels()
    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(len(needed)) as threads:
        patched.setattr(attention, "_post", channels.post)
        done = list(threads.map(lambda rank: run_rank(rank, turns, returns), ranks, timeout=60))
    blocks = [block for turn in turns for block in turn]
    for rank, (computed, taken) in zip(ranks, done, strict=True):
        assert computed == [block for block in blocks if block.where == rank]
        owners = {block: block.key if block.moves_keys else block.query for block in blocks if returns(block)}
        assert sorted(taken, key=str) == sorted((b for b, owner in owners.items() if owner == rank != b.where), key=str)
    assert all(sent.is_set() and taken.is_set() for sent, taken, _ in channels.met.values())
