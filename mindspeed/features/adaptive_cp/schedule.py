"""Schedule: the rank and the round of each block of the score matrix, for any number of visible pairs in each block.

Block (q, k) is the queries of rank q against the keys of rank k. A rank computes the blocks of its own row, for which keys come
to it. A rank with much work leaves some of them to ranks with little, which compute them with their own keys: queries go there,
and results come back. Blocks in which nothing is seen move nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

Grid = Sequence[Sequence[int]]
"""``pairs[q][k]``: how many pairs of a query of rank q and a key of rank k are visible."""
BALANCED: Final = 1.05
"""The work of the busiest rank, as a multiple of the mean, that counts as balanced."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of rank ``query`` against keys of rank ``key``, computed by rank ``where``, which is one of the two."""

    query: int
    key: int
    where: int

    @property
    def moves_keys(self) -> bool:
        """True where the keys travel to the queries."""
        return self.where != self.key

    @property
    def moves_queries(self) -> bool:
        """True where the queries travel to the keys, and their result back."""
        return self.where != self.query


Round = tuple[Block, ...]
"""Blocks computed at the same time, at most one by each rank, in the order of ranks."""


def schedule(pairs: Grid) -> list[Round]:
    """Return rounds in which every block with a visible pair is computed once."""
    turns: list[list[Block]] = [[] for _ in pairs]
    for block in balanced(pairs):
        turns[block.where].append(block)
    for rank, blocks in enumerate(turns):
        # the own block first, then those behind it: neighbours then want different keys at a time
        blocks.sort(key=lambda block: (block.moves_queries, (rank - block.key) % len(pairs), block.query))
    found = zip_longest(*turns)
    return [tuple(block for block in turn if block is not None) for turn in found]


def balanced(pairs: Grid) -> list[Block]:
    """Assign each block to one of its two ranks, so that the busiest rank has about as much to do as the mean."""
    ranks = range(len(pairs))
    where = {(q, k): q for q in ranks for k in ranks if pairs[q][k]}
    load = [sum(row) for row in pairs]
    enough = BALANCED * sum(load) / len(load)
    while max(load) > enough:
        busy = max(ranks, key=lambda rank: (load[rank], rank))
        moves = [
            (max(load[busy] - pairs[q][k], load[other] + pairs[q][k]), (q, k), other)
            for (q, k), rank in where.items()
            if rank == busy and (other := q + k - busy) != busy
        ]
        if not moves or (best := min(moves))[0] >= load[busy]:
            break
        _, (q, k), other = best
        where[q, k] = other
        load[busy] -= pairs[q][k]
        load[other] += pairs[q][k]
    return [Block(q, k, rank) for (q, k), rank in where.items()]


def loads(rounds: Sequence[Round], pairs: Grid) -> list[int]:
    """Return the visible pairs that each rank computes."""
    found = [0] * len(pairs)
    for block in (block for turn in rounds for block in turn):
        found[block.where] += pairs[block.query][block.key]
    return found
