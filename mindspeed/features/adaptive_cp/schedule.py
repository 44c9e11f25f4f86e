"""Schedule: the rank and the round of each block of the score matrix, for any pattern of needed blocks.

Block (q, k) is the queries of rank q against the keys of rank k. A rank computes blocks of its own row, for which keys come
to it; once its row is done it helps the row that has most left by computing that row's block with its own keys, for which
queries come to it and results go back. Blocks in which nothing is seen move nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Grid = Sequence[Sequence[bool]]
"""``needed[q][k]``: whether any query of rank q sees a key of rank k."""


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


def schedule(needed: Grid) -> list[Round]:
    """Rounds in which every needed block is computed once."""
    ranks = range(len(needed))
    left = [{k for k in ranks if needed[q][k]} for q in ranks]
    rounds: list[Round] = []
    while any(left):
        turn, busy = len(rounds), {}
        for rank in ranks:
            if left[rank]:
                # its own block first, then those behind it: neighbours then want different keys at a time
                key = min(left[rank], key=lambda k: ((rank - turn - k) % len(needed), k))
                left[rank].remove(key)
                busy[rank] = Block(rank, key, rank)
        for rank in ranks:
            rows = [q for q in ranks if rank in left[q]] if rank not in busy else []
            if rows:
                query = max(rows, key=lambda q: (len(left[q]), -q))
                left[query].remove(rank)
                busy[rank] = Block(query, rank, rank)
        rounds.append(tuple(busy[rank] for rank in sorted(busy)))
    return rounds
