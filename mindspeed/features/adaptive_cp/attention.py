"""Adaptive context parallelism: attention under any mask, computing and sending the blocks that it needs and no others.

The mask is cut into a grid of blocks, one for each pair of ranks. Blocks in which nothing is seen cost nothing; `schedule`
spreads the others over the ranks. Results that another rank computed are merged like blocks of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.features._shared.context_parallel.blocks import Part, Rule, Running, gradients, merge, see, start
from mindspeed.features._shared.context_parallel.checks import check_shares
from mindspeed.features._shared.context_parallel.layout import contiguous
from mindspeed.features._shared.context_parallel.tiles import Tile
from mindspeed.features.adaptive_cp.rounds import Tensors, Work, run
from mindspeed.features.adaptive_cp.schedule import Block, Round, schedule


@dataclass(frozen=True, slots=True)
class AdaptivePlan:
    """A mask with the rounds in which its blocks are computed; made once and used by every layer.

    ``mask`` [tokens, tokens] is True where hidden, in the order in which tokens are spread over ranks.
    """

    mask: Tensor
    ranks: int
    rounds: Sequence[Round]

    def tile(self, block: Block) -> Tensor | None:
        """The mask of a block; None when nothing in it is hidden."""
        size = self.mask.shape[0] // self.ranks
        tile = self.mask[block.query * size : (block.query + 1) * size, block.key * size : (block.key + 1) * size]
        return tile if bool(tile.any()) else None


def plan_mask(mask: Tensor, ranks: int) -> AdaptivePlan:
    """The plan of a mask whose side is a multiple of ``ranks``."""
    size = mask.shape[0] // ranks
    seen = ~mask.view(ranks, size, ranks, size).all(3).all(1)
    return AdaptivePlan(mask, ranks, schedule(seen.tolist()))


def adaptive_attention(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, plan: AdaptivePlan, *, scale: float | None = None
) -> Tensor:
    """Attention over a sequence that is spread in order over the ranks of ``group``, under the mask of ``plan``.

    ``query`` is [tokens here, batch, heads, width], ``key`` and ``value`` have as many tokens, perhaps fewer heads, and the
    value perhaps another width; the result is [tokens here, batch, heads, width of value]. Differentiable, without dropout.
    Raises OperatorError.
    """
    op, rows = "adaptive_attention", slice(group.rank() * query.shape[0], (group.rank() + 1) * query.shape[0])
    check_shares(op, query, key, value, plan.mask[rows], (), contiguous(plan.ranks), group.size())
    rule = Rule(query.shape[-1] ** -0.5 if scale is None else scale, causal=False)
    result: Tensor = _Adaptive.apply(query, key, value, rule, group, plan)  # type: ignore[no-untyped-call]
    return result


def _part(plan: AdaptivePlan, block: Block, tokens: int) -> Part:
    return Part(Tile((0, tokens), (0, tokens), False, 0), slice(None), plan.tile(block), None)


class _Adaptive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rule: Rule, group: dist.ProcessGroup, plan: AdaptivePlan
    ) -> Tensor:
        tokens, own = query.shape[0], [query.contiguous(), *(x.contiguous() for x in (key, value))]
        running = start(query, value.shape[-1])

        def compute(block: Block, arrived: Tensors) -> Tensors:
            q = arrived[0] if block.moves_queries else query
            k, v = arrived if block.moves_keys else (key, value)
            into = start(q, value.shape[-1]) if block.moves_queries else running
            see(into, rule, _part(plan, block, tokens), q, k, v)
            return [into.out, into.lse]

        def take(_: Block, results: Tensors) -> None:
            merge(running.out, running.lse, *results)

        def given(block: Block) -> Tensors:
            return own[1:] if block.moves_keys else own[:1]

        run(plan.rounds, group, Work(given, compute, lambda _: _both(running), take), lambda block: block.moves_queries)
        out = running.out.to(query.dtype)
        ctx.rule, ctx.group, ctx.plan = rule, group, plan
        ctx.save_for_backward(*own, out, running.lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        plan, dout, tokens = ctx.plan, dout.contiguous(), query.shape[0]
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value))

        def compute(block: Block, arrived: Tensors) -> Tensors:
            q, o, do, statistics = arrived if block.moves_queries else (query, out, dout, lse)
            k, v = arrived if block.moves_keys else (key, value)
            shares = gradients(ctx.rule, _part(plan, block, tokens), do, q, k, v, o, statistics)
            wide = [share.to(lse.dtype) for share in shares]
            if not block.moves_queries:
                dq.add_(wide[0])
            if block.moves_keys:
                return wide[1:]
            dk.add_(wide[1])
            dv.add_(wide[2])
            return wide[:1]

        def sums(block: Block) -> Tensors:
            return [dk, dv] if block.moves_keys else [dq]

        def take(block: Block, results: Tensors) -> None:
            for total, share in zip(sums(block), results, strict=True):
                total.add_(share)

        def given(block: Block) -> Tensors:
            return [key, value] if block.moves_keys else [query, out, dout, lse]

        run(plan.rounds, ctx.group, Work(given, compute, sums, take), lambda block: block.query != block.key)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None, None


def _both(running: Running) -> Tensors:
    return [running.out, running.lse]
