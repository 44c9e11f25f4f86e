"""Hybrid attention: head all-to-alls between intra-node ranks, a ring of key and value blocks between inter-node ranks.

Fang and Zhao, USP, arXiv 2405.07719. The ranks of ``inner`` exchange tokens for heads (Ulysses) and then hold together what one
rank of a ring holds; the ranks of ``outer`` are that ring.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel.heads import Attend, attention_by_heads
from mindspeed.context_parallel.layout import nested

__all__ = ["hybrid_attention", "nested"]


def hybrid_attention(query: Tensor, key: Tensor, value: Tensor, inner: dist.ProcessGroup, attend: Attend) -> Tensor:
    """``attend`` over the outer ring, with the tokens of all ranks of ``inner`` and a share of the heads.

    Tensors are [tokens here, batch, heads, width], tokens spread by `nested` of the ring's layout over ``inner``. Raises
    OperatorError.
    """
    return attention_by_heads(query, key, value, inner, attend, "hybrid_attention")
