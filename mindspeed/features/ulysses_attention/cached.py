"""Keys and values of a rank's heads for Ulysses attention: fetched from other ranks, and kept for backward or fetched again.

Where key heads are few each is sent to several ranks, so that what a rank has after the all-to-all is more than what it had
before. Keeping what it had saves that memory for the bytes of fetching again. Results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel.blocks import Scoring
from mindspeed.context_parallel.costs import Keep
from mindspeed.context_parallel.exchange import pack, unpack
from mindspeed.context_parallel.heads import by_rank, head_all_to_all, heads_to_tokens, times_sent
from mindspeed.context_parallel.local_attention import gradients_of, local_attention
from mindspeed.ops.errors import require
from mindspeed.ops.numerics import unflatten


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetches the keys and values of a rank's heads. ``gather``: by an all-gather, where all ranks need the only head."""

    group: dist.ProcessGroup
    times: int
    keep: Keep
    gather: bool

    def all(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Query, key and value of this rank's heads, [all tokens, batch, heads here, width]."""
        if self.gather:
            return [*self._all_to_all([query]), *self.keys([key, value])]
        return self._all_to_all([query, *map(self._repeated, (key, value))])

    def keys(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Keys, values, or both, of this rank's heads."""
        if not self.gather:
            return self._all_to_all([*map(self._repeated, own)])
        message = pack(own)
        received = message.new_empty((self.group.size(), message.numel()))
        dist.all_gather_into_tensor(received.view(-1), message, group=self.group)
        shares = [unpack(row, own) for row in received]
        return [torch.cat([share[n] for share in shares]) for n in range(len(own))]

    def back(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of this rank's tokens, of query, key and value in the shapes of before, from those of its heads."""
        ranks = self.group.size()
        received = head_all_to_all(self.group, [unflatten(x, 0, (ranks, -1)) for x in grads])
        dq, dk, dv = (x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in received)
        return [dq, *(unflatten(x, 2, (-1, self.times)).sum(3) if self.times > 1 else x for x in (dk, dv))]

    def _all_to_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x.flatten(0, 1) for x in head_all_to_all(self.group, [by_rank(x, self.group.size()) for x in tensors])]

    def _repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.times, 2) if self.times > 1 else x


def attention_of_heads(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, fetch: Fetch) -> Tensor:
    """Attention by heads, of tensors with a share of the tokens and all heads, to such a tensor; differentiable."""
    out: Tensor = _Fetched.apply(query, key, value, scoring, fetch)  # type: ignore[no-untyped-call]
    return heads_to_tokens(out, fetch.group)


def fetch_of(query: Tensor, key: Tensor, group: dist.ProcessGroup, keep: Keep, gather: bool, op: str) -> Fetch:
    """Raises OperatorError where the heads do not divide, or more than one key head would be gathered."""
    groups = key.shape[2]
    require(not gather or groups == 1, op, f"kv_allgather supports one key head per rank, but this rank has {groups}")
    return Fetch(group, times_sent(query.shape[2], groups, group.size(), op), keep, gather)


class _Fetched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, fetch: Fetch) -> Tensor:
        q, k, v = fetch.all(query, key, value)
        whole = [(0, q.shape[0])]
        out, lse, ctx.work = local_attention(q, k, v, scoring, whole, whole)
        ctx.scoring, ctx.fetch = scoring, fetch
        ctx.save_for_backward(q, k if fetch.keep == "none" else key, value if fetch.keep == "full" else v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        keep = ctx.fetch.keep
        if keep == "full":
            k, v = ctx.fetch.keys([k, v])
        elif keep == "half":
            (k,) = ctx.fetch.keys([k])
        grads = gradients_of(ctx.scoring, ctx.work, dout, q, k, v, out, lse)
        return *ctx.fetch.back(grads), None, None
