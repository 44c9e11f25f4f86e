"""Ring attention: queries stay, blocks of keys and values go round, and partial results are merged.

Liu et al., arXiv 2310.01889. With the zig-zag layout every rank has equal work under a causal mask: each block but its own
is half visible. No rank ever has more than its own and two other blocks, and no scores are kept.

Backward runs the same rounds. The gradient of a block travels one step behind the block and reaches its owner at the end;
both transfers are hidden: the first block arrives while the later half of the own queries is computed, the last gradient
while the earlier half is.

In a double ring, each inner ring sums the gradient of a block over its own ranks. The sum goes to the next inner ring, which
adds it when it has its own. So a transfer between inner rings has a whole lap of an inner ring to arrive, in both directions
of time. These transfers have a communicator of their own: those of one communicator run one after another, so that a slow one
would hold each fast one that is posted after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel.blocks import BlockCall, Scoring, accumulate_block, parts, start, statistics
from mindspeed.context_parallel.costs import Keep
from mindspeed.context_parallel.exchange import Exchange, pack, unpack
from mindspeed.context_parallel.layout import Layout, check_shares, contiguous, zigzag
from mindspeed.context_parallel.local_attention import add_gradients
from mindspeed.ops.attention_mask import attention_visibility
from mindspeed.ops.errors import require
from mindspeed.ops.process_groups import PendingCollective


@dataclass(frozen=True, slots=True)
class Hop:
    """A transfer that a rank posts: to rank ``to``, and from rank ``source`` what it needs in step ``due``.

    ``between`` is true for a transfer between inner rings.
    """

    to: int
    source: int
    due: int
    between: bool


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
            yield Hop(self._rank(outer + 1, inner), self._rank(outer - 1, inner), step + self.window, True)
        if place < self.window - 1:
            yield Hop(self._rank(outer, inner + 1), self._rank(outer, inner - 1), step + 1, False)

    def gradient_hop(self, rank: int, step: int) -> Hop:
        """Give the hop after step 1 or later. An inner ring passes its sum to its next rank, a whole sum to the next ring.

        There it is due when that ring has its own sum of the same block, which is at the same place. The last one goes to the
        owner of the block.
        """
        (outer, inner), due = divmod(rank, self.window), min(step + self.window, self.ranks)
        if step % self.window < self.window - 1:
            return Hop(self._rank(outer, inner + 1), self._rank(outer, inner - 1), step + 1, False)
        home = int(due == self.ranks)
        return Hop(self._rank(outer + 1, inner + home), self._rank(outer - 1, inner - home), due, True)

    def _rank(self, outer: int, inner: int) -> int:
        return outer % (self.ranks // self.window) * self.window + inner % self.window


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    *,
    scale: float | None = None,
    causal: bool = True,
    mask: Tensor | None = None,
    ends: Sequence[Sequence[int]] = (),
    slopes: Tensor | None = None,
    dropout: float = 0.0,
    window: int = 1,
    keep: Keep = "none",
    narrow_gradients: bool = False,
    second_group: dist.ProcessGroup | None = None,
    outer_group: dist.ProcessGroup | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """Attention over a sequence that is spread over the ranks of ``group``; differentiable.

    ``query`` is [tokens here, batch, heads, width], ``key`` and ``value`` have as many tokens, perhaps fewer heads, and the
    value perhaps another width; the result is [tokens here, batch, heads, width of value]. Which tokens are here says
    ``layout``: by default `zigzag` when ``causal``, else `contiguous`.

    ``mask`` [tokens here, all tokens] or [batch, 1, tokens here, all tokens], True where hidden, takes the place of
    ``causal``. ``ends`` has for each row of the batch the ends of the documents packed into it, which do not see one another.
    ``slopes`` [heads] are those of ALiBi. Ranks with one random state drop different places. ``window`` ranks form an inner
    ring. ``outer_group`` has the ranks of ``group`` too and is for transfers between inner rings, which hold those within
    otherwise. ``narrow_gradients`` sends the gradients of keys and values in the type of the keys: the sum of the ranks so far
    is rounded at each of the P - 1 hops, by at most P - 1 times half a unit in the last place of the largest such sum in all.
    Raises OperatorError.
    """
    layout = layout or (zigzag if causal and mask is None else contiguous)(group.size())
    check_shares("ring_attention", query, key, value, mask, ends, layout, group.size())
    require(group.size() % window == 0, "ring_attention", f"window={window} does not divide {group.size()} ranks")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scoring = Scoring(scale, attention_visibility(causal, mask, ends), slopes, dropout, dist.get_rank())
    inner = Exchange(group, second_group)
    outer = inner if outer_group is None else Exchange(outer_group)
    plan = _Plan(scoring, layout, Rounds(group.size(), window), inner, outer, keep, narrow_gradients)
    with scoring.own_numbers(query.device):
        result: Tensor = _Ring.apply(query, key, value, plan)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, slots=True)
class _Plan:
    scoring: Scoring
    layout: Layout
    rounds: Rounds
    inner: Exchange
    outer: Exchange
    keep: Keep
    narrow_gradients: bool = False

    def post(self, sent: Tensor, hop: Hop) -> PendingCollective:
        return (self.outer if hop.between else self.inner).post(sent, hop.to, hop.source)

    def work(self, rank: int, tokens: int, device: torch.device) -> list[list[BlockCall]]:
        """The parts of each step, and last of all those of the own block that wait for the end of backward."""
        length, layout = tokens * self.rounds.ranks, self.layout
        blocks = [layout.spans(self.rounds.block(rank, step), length) for step in range(self.rounds.ranks)]
        later, earlier = (tokens // 2, tokens), (0, tokens // 2)
        mine = layout.spans(rank, length)
        made = [list(parts(self.scoring, mine, keys, device, later if n == 0 else None)) for n, keys in enumerate(blocks)]
        return [*made, list(parts(self.scoring, mine, blocks[0], device, earlier))]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> Tensor:
        rank, ranks = plan.inner.group.rank(), plan.rounds.ranks
        work = plan.work(rank, query.shape[0], query.device)
        running = start(query, value.shape[-1])
        block, kept = pack([key, value]), list[Tensor]()
        arriving: dict[int, PendingCollective] = {}
        for step in range(ranks):
            if step:
                block = arriving.pop(step).wait()
                if plan.keep != "none":
                    kept.append(block if plan.keep == "full" else block[: key.numel()].clone())
            for hop in plan.rounds.hops(rank, step):
                arriving[hop.due] = plan.post(block, hop)
            k, v = unpack(block, [key, value])
            for calls in [work[step], work[-1]] if step == 0 else [work[step]]:
                calls[:] = [accumulate_block(running, plan.scoring, part, query, k, v) for part in calls]
            del k, v  # views of the block, which would outlive it
        out = running.out.to(query.dtype)
        ctx.plan, ctx.work = plan, work
        ctx.save_for_backward(query, key, value, out, running.statistics.lse, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, lse, *kept = ctx.saved_tensors
        plan, work = ctx.plan, ctx.work
        rank, ranks = plan.inner.group.rank(), plan.rounds.ranks
        like = [key, value]
        sent = {"none": like, "half": [value], "full": []}[plan.keep]
        wide, found = lse.dtype, statistics(lse)
        dq = torch.zeros_like(query, dtype=wide)
        own = torch.zeros(key.numel() + value.numel(), dtype=wide, device=query.device)

        def add(step: int, k: Tensor, v: Tensor, total: Tensor) -> None:
            add_gradients([dq, *unpack(total, like)], plan.scoring, work[step], dout, query, k, v, out, found)

        block = pack(sent) if sent else None
        arriving: dict[int, PendingCollective] = {}
        returning: defaultdict[int, list[PendingCollective]] = defaultdict(list)
        for step in range(ranks):
            if block is not None:
                block = arriving.pop(step).wait() if step else block
                for hop in plan.rounds.hops(rank, step):
                    arriving[hop.due] = plan.post(block, hop)
            k, v = _block(step, block, kept, like)
            total = own if step == 0 else torch.zeros_like(own)
            add(step, k, v, total)
            del k, v
            if step:
                for sum_of_others in returning.pop(step, ()):
                    total.add_(sum_of_others.wait())
                hop = plan.rounds.gradient_hop(rank, step)
                sum_so_far = total.to(key.dtype) if plan.narrow_gradients else total
                returning[hop.due].append(plan.post(sum_so_far, hop))
        add(-1, key, value, own)
        for sum_of_others in returning.pop(ranks, ()):
            own += sum_of_others.wait()
        dk, dv = unpack(own, like)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None


def _block(step: int, received: Tensor | None, kept: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Keys and values of a step of backward: own, kept, received, or one of each."""
    if step == 0:
        return like
    if received is None:
        return unpack(kept[step - 1], like)
    return [kept[step - 1].view(like[0].shape), received.view(like[1].shape)] if kept else unpack(received, like)
