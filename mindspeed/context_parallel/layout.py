"""Layout: the tokens of each context-parallel rank, as some of the equal chunks of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from mindspeed.ops.errors import require

if TYPE_CHECKING:
    from torch import Tensor


Span = tuple[int, int]
"""Start and end of a range of tokens."""


@dataclass(frozen=True, slots=True)
class Layout:
    """``pieces[rank]`` are the numbers of the chunks that a rank holds, in its local order; together they are all chunks."""

    pieces: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return len(self.pieces)

    @property
    def count(self) -> int:
        """Number of chunks that the sequence is split into; its length must be a multiple of this."""
        return sum(map(len, self.pieces))

    def spans(self, rank: int, length: int) -> tuple[Span, ...]:
        """Global ranges of a sequence of ``length`` tokens that ``rank`` holds, neighbours joined."""
        size = length // self.count
        joined: list[Span] = []
        for piece in self.pieces[rank]:
            start, end = piece * size, (piece + 1) * size
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, end))
        return tuple(joined)

    def take(self, x: Tensor, rank: int, dim: int = 0) -> Tensor:
        """The tokens of ``rank``, in its local order, from a tensor with all tokens in dimension ``dim``."""
        import torch

        return torch.cat([x.narrow(dim, start, end - start) for start, end in self.spans(rank, x.shape[dim])], dim)

    def restore(self, shards: list[Tensor], dim: int = 0) -> Tensor:
        """The whole sequence from what every rank holds; the inverse of `take`."""
        import torch

        length = sum(shard.shape[dim] for shard in shards)
        found: list[tuple[int, Tensor]] = []
        for rank, shard in enumerate(shards):
            spans = self.spans(rank, length)
            parts = torch.split(shard, [end - start for start, end in spans], dim)
            found += [(start, part) for (start, _), part in zip(spans, parts, strict=True)]
        return torch.cat([part for _, part in sorted(found, key=lambda pair: pair[0])], dim)


def contiguous(ranks: int) -> Layout:
    """Rank r holds the r-th of equal parts."""
    return Layout(tuple((rank,) for rank in range(ranks)))


def zigzag(ranks: int) -> Layout:
    """Rank r holds parts r and 2 n - 1 - r of 2 n, so that under a causal mask all ranks have equal work."""
    return Layout(tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))


def nested(outer: Layout, inner: int) -> Layout:
    """Spread the tokens of each rank of ``outer`` in order over ``inner`` neighbouring ranks.

    Gathering the parts of those neighbours in order restores what the rank of ``outer`` would hold.
    """
    fine = [[piece * inner + part for piece in pieces for part in range(inner)] for pieces in outer.pieces]
    share = len(outer.pieces[0])
    return Layout(tuple(tuple(pieces[n * share : (n + 1) * share]) for pieces in fine for n in range(inner)))


def check_shares(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    ends: Sequence[Sequence[int]],
    layout: Layout,
    ranks: int,
) -> None:
    """Raise OperatorError unless all belong together: shares as long as ``layout`` gives them, mask rows of this share."""
    tokens, batch, heads, width = query.shape
    fits = key.shape[:3] == value.shape[:3] and key.shape[:2] == (tokens, batch) and key.shape[3] == width
    shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
    require(fits, op, f"query, key and value of shapes {shapes} are not chunks of one sequence")
    require(heads % key.shape[2] == 0, op, f"{heads} query heads are not divisible by {key.shape[2]} key heads")
    require(layout.ranks == ranks, op, f"the layout is for {layout.ranks} ranks, but the group has {ranks}")
    pieces = layout.count // ranks
    require(tokens % pieces == 0, op, f"{tokens} local tokens cannot be split into {pieces} equal chunks")
    check_mask(op, mask, batch, (tokens, tokens * ranks))
    fits = not ends or (len(ends) == batch and all(row and row[-1] == tokens * ranks for row in ends))
    require(fits, op, f"the document ends do not describe {batch} rows whose last document ends at {tokens * ranks}")


def check_mask(op: str, mask: Tensor | None, batch: int, shape: tuple[int, int]) -> None:
    """Raise OperatorError unless a mask has ``shape``, queries and keys, or that with [batch, 1] in front."""
    given = None if mask is None else tuple(mask.shape)
    expected = f"{shape} or {(batch, 1, *shape)}"
    require(given in (None, shape, (batch, 1, *shape)), op, f"mask has shape {given}, but {expected} is expected")
