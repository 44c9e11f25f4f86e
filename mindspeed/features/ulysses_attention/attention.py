"""Ulysses attention: every rank computes some heads over the whole sequence, between two all-to-alls.

Jacobs et al., arXiv 2309.14509. Results are those of one process to the bit of the attention itself: nothing is merged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel.blocks import Scoring
from mindspeed.context_parallel.costs import Keep
from mindspeed.context_parallel.heads import own_heads
from mindspeed.context_parallel.layout import check_mask, contiguous
from mindspeed.features.ulysses_attention.cached import attention_of_heads, fetch_of
from mindspeed.ops.attention_mask import attention_visibility

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
