"""Ring schedule: the block of keys of each rank at each step, and the transfers between ranks.

A ring of n ranks is n / w windows of w neighbours, rank = (W, p). At step t w + i rank (W, p) has block (W - t, p - i): inside
a window blocks go from rank to rank at every step, from window to window once in w steps, while all of those compute. A
window of one rank, or of all, is a plain ring. (Double ring: Gu et al., LoongTrain, arXiv 2406.18485.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hop:
    """A transfer that a rank posts: its current block to rank ``to``, and from rank ``source`` its block of step ``due``."""

    to: int
    source: int
    due: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """The steps of a ring of ``ranks`` with windows of ``window``, which divides it."""

    ranks: int
    window: int = 1

    def block(self, rank: int, step: int) -> int:
        """The block that ``rank`` has at ``step``; at step 0 it is the local block."""
        (outer, inner), (lap, place) = divmod(rank, self.window), divmod(step, self.window)
        return self._rank(outer - lap, inner - place)

    def hops(self, rank: int, step: int) -> Iterator[Hop]:
        """Give the transfers that ``rank`` posts before it computes step ``step``."""
        (outer, inner), place = divmod(rank, self.window), step % self.window
        if place == 0 and step + self.window < self.ranks:
            yield Hop(self._rank(outer + 1, inner), self._rank(outer - 1, inner), step + self.window)
        if place < self.window - 1:
            yield Hop(self._rank(outer, inner + 1), self._rank(outer, inner - 1), step + 1)

    def gradient_hop(self, rank: int, step: int) -> Hop:
        """Give the hop after step 1 or later: the gradient follows its block to the next rank, at last to its owner."""
        outer, inner = divmod(rank, self.window)
        across = int(step % self.window == self.window - 1)
        return Hop(self._rank(outer + across, inner + 1), self._rank(outer - across, inner - 1), step + 1)

    def _rank(self, outer: int, inner: int) -> int:
        return outer % (self.ranks // self.window) * self.window + inner % self.window
