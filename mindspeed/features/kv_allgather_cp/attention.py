"""Attention with all keys and values gathered on every rank: no merging, memory for all keys, any visible shape.

Dubey et al., The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2. Keys and values are gathered again in backward
instead of being kept; their gradients are summed in fp32 by a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel.blocks import BlockCall, Scoring, accumulate_block, parts, start, statistics
from mindspeed.context_parallel.exchange import pack, unpack
from mindspeed.context_parallel.layout import Layout, check_shares, contiguous, zigzag
from mindspeed.context_parallel.local_attention import add_gradients
from mindspeed.ops.attention_mask import attention_visibility

__all__ = ["Layout", "contiguous", "kv_allgather_attention", "zigzag"]


def kv_allgather_attention(
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
    layout: Layout | None = None,
) -> Tensor:
    """Attention over a sequence that is spread over the ranks of ``group``; differentiable.

    Arguments are those of ring attention: tensors [tokens here, batch, heads, width], ``mask`` [tokens here, all tokens],
    ``layout`` by default `zigzag` when ``causal``, else `contiguous`. Raises OperatorError.
    """
    layout = layout or (zigzag if causal and mask is None else contiguous)(group.size())
    check_shares("kv_allgather_attention", query, key, value, mask, ends, layout, group.size())
    chosen = query.shape[-1] ** -0.5 if scale is None else scale
    scoring = Scoring(chosen, attention_visibility(causal, mask, ends), slopes, dropout, dist.get_rank())
    with scoring.own_numbers(query.device):
        result: Tensor = _Gathered.apply(query, key, value, _Plan(scoring, layout, group))  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, slots=True)
class _Plan:
    scoring: Scoring
    layout: Layout
    group: dist.ProcessGroup

    def work(self, query: Tensor) -> list[BlockCall]:
        length = query.shape[0] * self.layout.ranks
        return list(parts(self.scoring, self.layout.spans(self.group.rank(), length), [(0, length)], query.device))

    def gather(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Keys and values of all ranks, in the order of the sequence."""
        message = pack([key, value])
        received = message.new_empty((self.layout.ranks, message.numel()))
        dist.all_gather_into_tensor(received.view(-1), message, group=self.group)
        shares = [unpack(row, [key, value]) for row in received]
        return [self.layout.restore([share[n] for share in shares]) for n in range(2)]

    def scatter(self, dk: Tensor, dv: Tensor) -> list[Tensor]:
        """This rank's share of gradients of all keys and values, summed over ranks."""
        rows = [[self.layout.take(x, rank) for x in (dk, dv)] for rank in range(self.layout.ranks)]
        message = torch.stack([pack(row) for row in rows])
        received = torch.empty_like(message[0])
        dist.reduce_scatter_tensor(received, message.view(-1), group=self.group)
        return unpack(received, rows[0])


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> Tensor:
        running = start(query, value.shape[-1])
        keys, values = plan.gather(key, value)
        ctx.plan = plan
        ctx.work = [accumulate_block(running, plan.scoring, part, query, keys, values) for part in plan.work(query)]
        out = running.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, running.statistics.lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        keys, values = ctx.plan.gather(key, value)
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (query, keys, values))
        add_gradients([dq, dk, dv], ctx.plan.scoring, ctx.work, dout, query, keys, values, out, statistics(lse))
        own_dk, own_dv = ctx.plan.scatter(dk, dv)
        return dq.to(query.dtype), own_dk.to(key.dtype), own_dv.to(value.dtype), None
