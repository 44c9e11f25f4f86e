"""Adaptive context parallelism: attention under any mask, computing and sending the blocks that it needs and no others.

The mask is cut into a grid of blocks, one for each pair of ranks. Blocks in which nothing is seen cost nothing; `schedule`
spreads the others over the ranks. Results that another rank computed are merged like blocks of a ring. Which tokens a rank
holds is a `Layout`, in order or as `best_layout` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel.blocks import BlockCall, Scoring, accumulate_block, start, statistics
from mindspeed.context_parallel.layout import Layout, Span, check_shares, contiguous
from mindspeed.context_parallel.local_attention import add_gradients
from mindspeed.context_parallel.tiles import Tile, together
from mindspeed.features.adaptive_cp.masks import Mask, as_mask
from mindspeed.features.adaptive_cp.schedule import BALANCED, Block, Round, loads, schedule
from mindspeed.ops.attention_mask import AttentionVisibility, compressed_mask
from mindspeed.ops.errors import require

Tensors = list[Tensor]
_MOST_STRETCHES: Final = 16
"""Stretches of the sequence that a rank gets at most where ranks exchange them for balance."""
_MOST_CALLS: Final = 8
"""Calls for a block of the mask at most; a block that would need more is one call."""


class BlockMessage(NamedTuple):
    """Tensors on their way for a block; on the target they are room to receive into."""

    block: Block
    source: int
    target: int
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class Work:
    """The functions by which a rank handles blocks that it does not compute alone.

    ``given(block)`` are this rank's tensors of the kind that travel for a block, ``compute(block, tensors)`` the results that
    go back (none for a block of its own), ``sums(block)`` tensors shaped like those results, ``take(block, results)`` adds
    results that another rank computed.
    """

    given: Callable[[Block], Tensors]
    compute: Callable[[Block, Tensors], Tensors]
    sums: Callable[[Block], Tensors]
    take: Callable[[Block, Tensors], None]


def run(rounds: Sequence[Round], group: dist.ProcessGroup, work: Work, returns: Callable[[Block], bool]) -> None:
    """Compute this rank's blocks and receive the results of other ranks. ``returns`` marks blocks whose results are sent."""
    rank = group.rank()
    computed: dict[Block, Tensors] = {}

    def inputs(turn: Round) -> Iterator[BlockMessage]:
        for block in turn:
            source = block.key if block.moves_keys else block.query
            if source != block.where:
                yield BlockMessage(block, source, block.where, _sent_or_room(rank, source, block, work.given))

    def results(turn: Round) -> Iterator[BlockMessage]:
        for block in turn:
            target = block.key if block.moves_keys else block.query
            if target != block.where and returns(block):
                sent = computed.pop(block) if rank == block.where else _room(work.sums(block))
                yield BlockMessage(block, block.where, target, sent)

    turns = [(), *rounds, (), ()]
    coming, going = _post(group, [*inputs(turns[1])]), _post(group, [])
    for before, turn, after in zip(turns, turns[1:], turns[2:], strict=False):
        arrived = {message.block: message.tensors for message in coming.wait()}
        for message in going.wait():
            work.take(message.block, message.tensors)
        coming, going = _post(group, [*inputs(after)]), _post(group, [*results(before)])
        for block in turn:
            if block.where == rank:
                computed[block] = work.compute(block, arrived.get(block, []))
    for message in going.wait():
        work.take(message.block, message.tensors)


@dataclass(frozen=True, slots=True)
class _Posted:
    messages: list[BlockMessage]
    works: list[dist.Work]

    def wait(self) -> list[BlockMessage]:
        """Give the messages that arrived for this rank."""
        for work in self.works:
            work.wait()
        return self.messages


def _post(group: dist.ProcessGroup, messages: Iterable[BlockMessage]) -> _Posted:
    """Begin all messages of which this rank is an end, in one order on all ranks."""
    rank, operations, arriving = group.rank(), [], []
    for message in messages:
        if rank == message.source:
            operations += [dist.P2POp(dist.isend, x, group=group, group_peer=message.target) for x in message.tensors]
        elif rank == message.target:
            arriving.append(message)
            operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=message.source) for x in message.tensors]
    return _Posted(arriving, dist.batch_isend_irecv(operations) if operations else [])


def _sent_or_room(rank: int, source: int, block: Block, given: Callable[[Block], Tensors]) -> Tensors:
    own = given(block)
    return own if rank == source else _room(own)


def _room(like: Tensors) -> Tensors:
    return [torch.empty_like(x) for x in like]


@dataclass(frozen=True, slots=True)
class LayoutCost:
    """The cost of a layout: pairs that the busiest rank computes, needed blocks, and rounds in which they are computed."""

    busiest: int
    blocks: int
    rounds: int

    def weighted(self, pairs: int, ranks: int) -> tuple[float, int]:
        """Give what layouts are compared by: the work of the busiest rank and, with a fifth of its weight, the traffic.

        Both are shares: of the work of a balanced rank for so many ``pairs``, and of the blocks of a ring.
        """
        return self.busiest * ranks / pairs + self.blocks / (5 * ranks**2) if pairs else 0.0, self.rounds


def best_layout(mask: Tensor | Mask, ranks: int, pieces: int, inner: int = 1) -> Layout:
    """The layout of the tokens of a mask [tokens, tokens], True where hidden, over ``ranks``.

    ``pieces`` is the largest number that the sequence may be cut into; the true one is the largest multiple of ``ranks``
    that fits. Each piece can be cut into ``inner`` parts.
    """
    mask = as_mask(mask)
    pairs = mask.pairs(_count(mask.tokens // inner, ranks, pieces)).cpu()
    total = int(pairs.sum())
    return min(_layouts(pairs, ranks), key=lambda layout: cost(grid(pairs, layout)).weighted(total, ranks))


def cost(pairs: Tensor) -> LayoutCost:
    """Give the cost of blocks with so many visible ``pairs`` [ranks, ranks]."""
    numbers = pairs.tolist()
    rounds = schedule(numbers)
    return LayoutCost(max(loads(rounds, numbers)), int((pairs > 0).sum()), len(rounds))


def grid(pairs: Tensor, layout: Layout) -> Tensor:
    """The visible pairs of each two ranks, [ranks, ranks], of those of chunks, in this layout of as many or fewer."""
    order = torch.tensor(layout.pieces, device=pairs.device)
    ranks, share = order.shape
    chunks = _joined(pairs, layout.count)
    return chunks[order.flatten()][:, order.flatten()].view(ranks, share, ranks, share).sum((1, 3))


def _joined(pairs: Tensor, count: int) -> Tensor:
    """The visible pairs of ``count`` chunks, which divides the number of those that are given."""
    size = len(pairs) // count
    return pairs.view(count, size, count, size).sum((1, 3))


def _layouts(pairs: Tensor, ranks: int) -> Iterator[Layout]:
    """Yield layouts to choose from, those with the longest stretches of the sequence first."""
    yield contiguous(ranks)
    share = 2
    while share <= _MOST_STRETCHES and len(pairs) % (ranks * share) == 0:
        yield _exchanged(_joined(pairs, ranks * share).sum(1), ranks)
        share *= 2
    for order in _orders(pairs > 0, ranks):
        yield Layout(tuple(tuple(sorted(part)) for part in order.view(ranks, -1).tolist()))


def _exchanged(weights: Tensor, ranks: int) -> Layout:
    """Begin in order, and exchange chunks between the ranks with most and least work as long as that brings them together."""
    shares = torch.arange(len(weights)).view(ranks, -1)
    while True:
        work = weights[shares].sum(1)
        most, least = int(work.argmax()), int(work.argmin())
        gap = int(work[most] - work[least])
        moved = weights[shares[most]][:, None] - weights[shares[least]][None, :]
        off = (2 * moved - gap).abs()
        place = int(off.argmin())
        if gap * len(work) <= (BALANCED - 1) * int(work.sum()) or int(off.flatten()[place]) >= gap:
            return Layout(tuple(tuple(sorted(part)) for part in shares.tolist()))
        one, other = divmod(place, shares.shape[1])
        shares[most, one], shares[least, other] = shares[least, other].clone(), shares[most, one].clone()


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


__all__ = ["AdaptivePlan", "Layout", "adaptive_attention", "best_layout", "contiguous", "plan_mask"]


@dataclass(frozen=True, slots=True)
class AdaptivePlan:
    """A mask with the rounds in which its blocks are computed; made once and used by every layer.

    ``mask`` is in the order of the sequence; ``layout`` says who holds which tokens.
    """

    mask: Mask
    layout: Layout
    rounds: Sequence[Round]
    _calls: dict[tuple[int, int, bool], list[BlockCall]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return self.layout.ranks

    def calls(self, block: Block, device: torch.device, packed: bool) -> list[BlockCall]:
        """Give the calls for a block: rectangles around what is visible, with their masks unless these are empty or causal.

        ``packed``: there is one sample, so that one call takes causal rectangles that follow one another.
        """
        place = block.query, block.key, packed
        if place not in self._calls:
            numbers = torch.arange(self.mask.tokens, device=device)
            rows, columns = (self.layout.take(numbers, rank) for rank in place[:2])
            self._calls[place] = _calls_of(self.mask.block(rows, columns), packed)
        return self._calls[place]


def plan_mask(mask: Tensor | Mask, ranks: int, layout: Layout | None = None) -> AdaptivePlan:
    """The plan of a mask, [tokens, tokens] and True where hidden if it is a tensor; by default with the tokens in order."""
    mask, layout = as_mask(mask), layout or contiguous(ranks)
    return AdaptivePlan(mask, layout, schedule(grid(mask.pairs(layout.count).cpu(), layout).tolist()))


def adaptive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    plan: AdaptivePlan,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention over a sequence that is spread by ``plan.layout`` over the ranks of ``group``, under the mask of ``plan``.

    ``query`` is [tokens here, batch, heads, width], ``key`` and ``value`` have as many tokens, perhaps fewer heads, and the
    value perhaps another width; the result is [tokens here, batch, heads, width of value]. Differentiable. Ranks with one
    random state drop different places. Raises OperatorError.
    """
    op, tokens = "adaptive_attention", query.shape[0] * group.size()
    check_shares(op, query, key, value, None, (), plan.layout, group.size())
    require(
        plan.mask.tokens == tokens, op, f"the plan of the mask is for {plan.mask.tokens} tokens, but the ranks hold {tokens}"
    )
    chosen = query.shape[-1] ** -0.5 if scale is None else scale
    scoring = Scoring(chosen, AttentionVisibility(), dropout_p=dropout, rank=dist.get_rank())
    with scoring.own_numbers(query.device):
        result: Tensor = _Adaptive.apply(query, key, value, scoring, group, plan)  # type: ignore[no-untyped-call]
    return result


def _calls_of(hidden: Tensor, packed: bool) -> list[BlockCall]:
    apart = [*_rectangles(hidden, _runs(~hidden), packed)]
    return apart if len(apart) <= _MOST_CALLS else [*_rectangles(hidden, [_around((~hidden).any(1))], packed)]


def _runs(seen: Tensor) -> list[Span]:
    """Give the ranges of rows in which the first and the last visible key do not jump, and rows share keys with the next."""
    width = seen.shape[1]
    numbers = torch.arange(width, device=seen.device)
    first, last = (~seen * width + numbers).amin(1), (seen * (numbers + 1)).amax(1)  # width and 0 in a row that sees nothing
    jumps = (torch.stack([first, last]).diff(dim=1).abs() > 1).any(0)
    apart = (first[1:] >= last[:-1]) | ((last[1:] > 0) != (last[:-1] > 0))
    ends = [0, *((jumps | apart).nonzero().flatten() + 1).tolist(), len(seen)]
    return [(begin, end) for begin, end in pairwise(ends) if bool(last[begin])]


def _rectangles(hidden: Tensor, runs: Sequence[Span], packed: bool) -> Iterator[BlockCall]:
    found: list[tuple[Tile, Tensor | None]] = []
    for rows in runs:
        columns = _around(~hidden[slice(*rows)].all(0))
        part = hidden[slice(*rows), slice(*columns)]
        behind = part.shape[1] - part.shape[0]
        causal = behind >= 0 and torch.equal(part, torch.ones_like(part).triu_(1 + behind))
        found.append((Tile(rows, columns, causal, 0), part.contiguous() if not causal and bool(part.any()) else None))
    for masked, group in groupby(found, lambda one: one[1] is not None):
        if masked:
            yield from (BlockCall(tile, slice(None), mask) for tile, mask in group)
            continue
        for tile, ends in together([tile for tile, _ in group], packed, False):
            yield BlockCall(tile, slice(None), compressed_mask(hidden.device) if tile.causal else None, ends)


def _around(marked: Tensor) -> tuple[int, int]:
    places = marked.nonzero()
    return int(places[0]), int(places[-1]) + 1


class _Adaptive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, group: dist.ProcessGroup, plan: AdaptivePlan
    ) -> Tensor:
        own = [x.contiguous() for x in (query, key, value)]
        running = start(query, value.shape[-1])
        calls: dict[Block, list[BlockCall]] = {}

        def compute(block: Block, arrived: Tensors) -> Tensors:
            q = arrived[0] if block.moves_queries else own[0]
            k, v = arrived if block.moves_keys else own[1:]
            into = start(q, value.shape[-1]) if block.moves_queries else running
            parts = plan.calls(block, query.device, packed=query.shape[1] == 1)
            calls[block] = [accumulate_block(into, scoring, part, q, k, v) for part in parts]
            return [into.out, into.statistics.lse] if block.moves_queries else []

        def take(_: Block, results: Tensors) -> None:
            running.add(slice(None), (0, query.shape[0]), results[0], statistics(results[1]))

        def sums(_: Block) -> Tensors:
            return [running.out, running.statistics.maximum[..., 0]]

        def given(block: Block) -> Tensors:
            return own[1:] if block.moves_keys else own[:1]

        run(plan.rounds, group, Work(given, compute, sums, take), lambda block: block.moves_queries)
        out = running.out.to(query.dtype)
        ctx.scoring, ctx.group, ctx.plan, ctx.calls = scoring, group, plan, calls
        ctx.save_for_backward(*own, out, running.statistics.lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        dout = dout.contiguous()
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value))

        def compute(block: Block, arrived: Tensors) -> Tensors:
            q, o, do, denominators = arrived if block.moves_queries else (query, out, dout, lse)
            k, v = arrived if block.moves_keys else (key, value)
            foreign = [torch.zeros_like(x) for x in sums(block)]
            into = [dq, *foreign] if block.moves_keys else [*foreign, dk, dv] if block.moves_queries else [dq, dk, dv]
            add_gradients(into, ctx.scoring, ctx.calls[block], do, q, k, v, o, statistics(denominators))
            return foreign

        def sums(block: Block) -> Tensors:
            return [dk, dv] if block.moves_keys else [dq] if block.moves_queries else []

        def take(block: Block, results: Tensors) -> None:
            for total, share in zip(sums(block), results, strict=True):
                total.add_(share)

        def given(block: Block) -> Tensors:
            return [key, value] if block.moves_keys else [query, out, dout, lse]

        run(ctx.plan.rounds, ctx.group, Work(given, compute, sums, take), lambda block: block.query != block.key)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None, None
