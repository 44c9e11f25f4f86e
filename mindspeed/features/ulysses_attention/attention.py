"""Ulysses attention: every rank computes some heads over the whole sequence, between two all-to-alls.

Jacobs et al., arXiv 2309.14509. Results are those of one process to the bit of the attention itself: nothing is merged.
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
from mindspeed.context_parallel.heads import by_rank, head_all_to_all, heads_to_tokens, own_heads, times_sent
from mindspeed.context_parallel.layout import check_mask, contiguous
from mindspeed.context_parallel.local_attention import gradients_of, local_attention
from mindspeed.ops.attention_mask import attention_visibility
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
    with scoring.own_numbers(query.device):
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


__all__ = ["Keep", "contiguous", "ulysses_attention"]


def ulysses_attention(
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
    keep: Keep = "none",
    kv_allgather: bool = False,
) -> Tensor:
    """Attention over a sequence that is spread in order over the ranks of ``group``; differentiable.

    ``query`` is [tokens here, batch, heads, width], ``key`` and ``value`` have as many tokens, perhaps fewer heads, and the
    value perhaps another width; the result is [tokens here, batch, heads, width of value]. The ranks divide the query heads.

    ``mask`` [all tokens, all tokens] or [batch, 1, all tokens, all tokens], True where hidden, takes the place of ``causal``.
    ``ends`` has for each row of the batch the ends of the documents packed into it, which do not see one another. ``slopes``
    [heads] are those of ALiBi. Ranks with one random state drop different places.

    Backward finds keys and values as attention saw them. Of those that ``keep`` names (half: keys, full: both) it finds this
    rank's own and fetches the others again: less memory where key heads are fewer than ranks. ``kv_allgather`` gathers the
    keys and values of a single key head instead of sending a copy to each rank. Raises OperatorError.
    """
    chosen = query.shape[-1] ** -0.5 if scale is None else scale
    own = own_heads(slopes, group)
    scoring = Scoring(chosen, attention_visibility(causal, mask, ends), own, dropout, dist.get_rank())
    tokens = query.shape[0] * group.size()
    check_mask("ulysses_attention", mask, query.shape[1], (tokens, tokens))
    fetch = fetch_of(query, key, group, keep, kv_allgather, "ulysses_attention")
    return attention_of_heads(query, key, value, scoring, fetch)
