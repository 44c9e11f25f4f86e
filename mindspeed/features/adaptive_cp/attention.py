"""Adaptive context parallelism: attention under any mask, computing and sending the blocks that it needs and no others.

The mask is cut into a grid of blocks, one for each pair of ranks. Blocks in which nothing is seen cost nothing; `schedule`
spreads the others over the ranks. Results that another rank computed are merged like blocks of a ring. Which tokens a rank
holds is a `Layout`, in order or as `best_layout` finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel.blocks import BlockCall, Running, Scoring, accumulate_block, merge, seed, start
from mindspeed.context_parallel.layout import Layout, check_shares, contiguous
from mindspeed.context_parallel.local_attention import add_gradients
from mindspeed.context_parallel.tiles import Tile
from mindspeed.features.adaptive_cp.masks import Mask, as_mask
from mindspeed.features.adaptive_cp.remap import best_layout, grid
from mindspeed.features.adaptive_cp.rounds import Tensors, Work, run
from mindspeed.features.adaptive_cp.schedule import Block, Round, schedule
from mindspeed.ops.attention_mask import AttentionVisibility, compressed_mask
from mindspeed.ops.errors import require

__all__ = ["AdaptivePlan", "Layout", "adaptive_attention", "best_layout", "contiguous", "plan_mask"]


@dataclass(frozen=True, slots=True)
class AdaptivePlan:
    """A mask with the rounds in which its blocks are computed; made once and used by every layer.

    ``mask`` is in the order of the sequence; ``layout`` says who holds which tokens.
    """

    mask: Mask
    layout: Layout
    rounds: Sequence[Round]
    _parts: dict[tuple[int, int], BlockCall] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return self.layout.ranks

    def part(self, block: Block, device: torch.device) -> BlockCall:
        """Give the visible part of a block: the smallest rectangle around it, with its mask unless that is empty or causal."""
        place = block.query, block.key
        if place not in self._parts:
            numbers = torch.arange(self.mask.tokens, device=device)
            self._parts[place] = _part(self.mask.block(*(self.layout.take(numbers, rank) for rank in place)))
        return self._parts[place]


def plan_mask(mask: Tensor | Mask, ranks: int, layout: Layout | None = None) -> AdaptivePlan:
    """The plan of a mask, [tokens, tokens] and True where hidden if it is a tensor; by default with the tokens in order."""
    mask, layout = as_mask(mask), layout or contiguous(ranks)
    return AdaptivePlan(mask, layout, schedule(grid(mask.seen(layout.count).cpu(), layout).tolist()))


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
    result: Tensor = _Adaptive.apply(query, key, value, scoring, group, plan)  # type: ignore[no-untyped-call]
    return result


def _part(tile: Tensor) -> BlockCall:
    seen = ~tile
    rows, columns = (_around(seen.any(dim)) for dim in (1, 0))
    tile = tile[slice(*rows), slice(*columns)]
    causal = tile.shape[0] == tile.shape[1] and torch.equal(tile, torch.ones_like(tile).triu_(1))
    mask = compressed_mask(tile.device) if causal else tile.contiguous() if bool(tile.any()) else None
    return BlockCall(Tile(rows, columns, causal, 0), slice(None), mask, None)


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
        parts: dict[Block, BlockCall] = {}

        def compute(block: Block, arrived: Tensors) -> Tensors:
            q = arrived[0] if block.moves_queries else own[0]
            k, v = arrived if block.moves_keys else own[1:]
            into = start(q, value.shape[-1]) if block.moves_queries else running
            parts[block] = replace(plan.part(block, query.device), seed=seed(scoring, query.device))
            accumulate_block(into, scoring, parts[block], q, k, v)
            return _both(into)

        def take(_: Block, results: Tensors) -> None:
            merge(running.out, running.lse, *results)

        def given(block: Block) -> Tensors:
            return own[1:] if block.moves_keys else own[:1]

        run(plan.rounds, group, Work(given, compute, lambda _: _both(running), take), lambda block: block.moves_queries)
        out = running.out.to(query.dtype)
        ctx.scoring, ctx.group, ctx.plan, ctx.parts = scoring, group, plan, parts
        ctx.save_for_backward(*own, out, running.lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        dout = dout.contiguous()
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value))

        def compute(block: Block, arrived: Tensors) -> Tensors:
            q, o, do, statistics = arrived if block.moves_queries else (query, out, dout, lse)
            k, v = arrived if block.moves_keys else (key, value)
            foreign = [torch.zeros_like(x) for x in sums(block)]
            into = [dq, *foreign] if block.moves_keys else [*foreign, dk, dv] if block.moves_queries else [dq, dk, dv]
            add_gradients(into, ctx.scoring, [ctx.parts[block]], do, q, k, v, o, statistics)
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


def _both(running: Running) -> Tensors:
    return [running.out, running.lse]
