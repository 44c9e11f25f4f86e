"""Head all-to-all: exchange a share of the tokens for a share of the heads, as Ulysses attention (arXiv 2309.14509).

Each rank has some tokens of all heads before, and all tokens of some heads after; key heads are sent as often as ranks
need them, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel.costs import copies
from mindspeed.ops.errors import require
from mindspeed.ops.numerics import unflatten
from mindspeed.ops.process_groups import post_all_to_all

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of query, key and value, each [tokens, batch, heads, width], to [tokens, batch, heads, width of value]."""


def attention_by_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, attend: Attend, op: str) -> Tensor:
    """``attend`` with all tokens of the group and a share of the heads, on tensors with a share of the tokens and all heads.

    The tokens of the ranks of ``group`` follow one another. ``op`` names the caller in errors. Raises OperatorError.
    """
    ranks, heads, groups = group.size(), query.shape[2], key.shape[2]
    times = times_sent(heads, groups, ranks, op)
    key, value = (x.repeat_interleave(times, 2) if times > 1 else x for x in (key, value))
    gathered = _HeadAllToAll.apply(group, *(by_rank(x, ranks) for x in (query, key, value)))  # type: ignore[no-untyped-call]
    out = attend(*(x.flatten(0, 1) for x in gathered))
    return heads_to_tokens(out, group)


def heads_to_tokens(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All heads of this rank's tokens, from all tokens of this rank's heads; differentiable."""
    (scattered,) = _HeadAllToAll.apply(group, unflatten(out, 0, (group.size(), -1)))  # type: ignore[no-untyped-call]
    result: Tensor = scattered.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return result


def times_sent(heads: int, groups: int, ranks: int, op: str) -> int:
    """Count the ranks that each key head is sent to. Raises OperatorError where the heads do not divide."""
    require(heads % ranks == 0, op, f"{heads} query heads are not divisible by {ranks} ranks")
    require(heads % groups == 0, op, f"{heads} query heads are not divisible by {groups} key heads")
    return copies(heads, groups, ranks)


def own_heads(x: Tensor | None, group: dist.ProcessGroup) -> Tensor | None:
    """Slice a tensor with an entry for every query head to the heads of this rank."""
    return None if x is None else x.chunk(group.size())[group.rank()]


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """[tokens, batch, heads, width] as [ranks, tokens, batch, heads of a rank, width]."""
    return unflatten(x, 2, (ranks, -1)).permute(2, 0, 1, 3, 4)


class _HeadAllToAll(torch.autograd.Function):
    """Slice r of dimension 0 of each tensor goes to rank r; what comes back has the sender in dimension 0. Its own gradient."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return head_all_to_all(group, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *head_all_to_all(ctx.group, grads)


def head_all_to_all(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Post one all-to-all for each tensor, all before the first is waited for: no copies into a message and out of it."""
    pending = [post_all_to_all(group, x) for x in tensors]
    return tuple(one.wait() for one in pending)
