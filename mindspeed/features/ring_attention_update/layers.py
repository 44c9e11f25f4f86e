"""Stand-in for the merge of attention blocks, with its signature."""

from __future__ import annotations

from torch import Tensor

from mindspeed.context_parallel.blocks import Statistics
from mindspeed.ops.npu_ring_attention_update import npu_ring_attention_update


def merge(out: Tensor, found: Statistics, new_out: Tensor, new: Statistics, seen: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Merge ``new`` with a result [queries, batch, heads, width]; statistics stay as the attention kernel made them."""
    sides = (out.flatten(2), *found, new_out.to(out.dtype).flatten(2), *new)
    merged, maximum, total = npu_ring_attention_update(*sides, seen=seen)
    return merged.view(out.shape), maximum, total
