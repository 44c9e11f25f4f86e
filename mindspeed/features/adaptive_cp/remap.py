"""An order of tokens in which a mask needs fewer blocks: chunks that attend to one another are assigned to one rank.

The mask is read piece by piece. Two orders are tried beside the one of the sequence, and one is taken only when it needs
fewer blocks, or as many in fewer rounds: pieces walked from neighbour to neighbour, which gathers what is connected (Cuthill
and McKee, Proc. 24th ACM National Conference, 1969), and pieces put into clusters of those that see alike, for any number of
clusters. All is done in whole numbers, so that every rank finds the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed.context_parallel.layout import Layout, contiguous
from mindspeed.features.adaptive_cp.masks import Mask, as_mask
from mindspeed.features.adaptive_cp.schedule import schedule


@dataclass(frozen=True, slots=True)
class LayoutCost:
    """The cost of a layout, compared in this order: needed blocks, then rounds in which they are computed."""

    blocks: int
    rounds: int

    def __lt__(self, other: LayoutCost) -> bool:
        return (self.blocks, self.rounds) < (other.blocks, other.rounds)


def best_layout(mask: Tensor | Mask, ranks: int, pieces: int, inner: int = 1) -> Layout:
    """The layout of the tokens of a mask [tokens, tokens], True where hidden, over ``ranks``.

    ``pieces`` is the largest number that the sequence may be cut into; the true one is the largest multiple of ``ranks``
    that fits. Each piece can be cut into ``inner`` parts.
    """
    mask = as_mask(mask)
    seen = mask.seen(_count(mask.tokens // inner, ranks, pieces)).cpu()
    best, least = contiguous(ranks), cost(mask.seen(ranks))
    for order in _orders(seen, ranks):
        layout = Layout(tuple(tuple(sorted(share)) for share in order.view(ranks, -1).tolist()))
        found = cost(grid(seen, layout))
        if found < least:
            best, least = layout, found
    return best


def cost(needed: Tensor) -> LayoutCost:
    """Give the cost of the blocks ``needed`` [ranks, ranks]."""
    return LayoutCost(int(needed.sum()), len(schedule(needed.tolist())))


def grid(seen: Tensor, layout: Layout) -> Tensor:
    """The blocks needed, [ranks, ranks], of chunks [count, count] in this layout."""
    order = torch.tensor(layout.pieces, device=seen.device)
    ranks, share = order.shape
    return seen[order.flatten()][:, order.flatten()].view(ranks, share, ranks, share).any(3).any(1)


def _count(tokens: int, ranks: int, most: int) -> int:
    """The largest multiple of ``ranks`` up to ``most`` that divides ``tokens``, which it divides itself."""
    shares = tokens // ranks
    return ranks * max(n for n in range(1, max(1, min(shares, most // ranks)) + 1) if shares % n == 0)


def _orders(seen: Tensor, ranks: int) -> Iterator[Tensor]:
    yield _walk(seen | seen.T)
    looks = torch.cat([seen, seen.T], 1).float()
    same = looks @ looks.T  # below 2**24, so exact in any order of summation
    own = same.diagonal()
    apart = own[:, None] + own[None, :] - 2 * same
    for clusters in range(2, min(max(8, 2 * ranks), seen.shape[0]) + 1):
        yield _clustered(apart, clusters)


def _walk(joined: Tensor) -> Tensor:
    """All pieces, each beside its neighbours: from one with few neighbours on, nearest first."""
    degree = joined.sum(1)
    left = torch.ones_like(degree, dtype=torch.bool)
    found: list[int] = []
    place = 0
    while len(found) < len(left):
        if place == len(found):
            fewest = int(degree.masked_fill(~left, len(left) + 1).argmin())
            left[fewest] = False
            found.append(fewest)
        near = (joined[found[place]] & left).nonzero().flatten()
        found += near[degree[near].argsort(stable=True)].tolist()
        left[near] = False
        place += 1
    return torch.tensor(found, device=joined.device)


def _clustered(apart: Tensor, clusters: int) -> Tensor:
    """All pieces by cluster: each belongs to the nearest of pieces that are as far from one another as can be."""
    centres = [0]
    nearest = apart[0].clone()
    while len(centres) < clusters:
        centres.append(int(nearest.argmax()))
        nearest = torch.minimum(nearest, apart[centres[-1]])
    return apart[torch.tensor(centres, device=apart.device)].argmin(0).argsort(stable=True)
