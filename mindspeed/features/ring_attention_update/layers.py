"""Stand-in for the merge of attention blocks, with its signature."""

from __future__ import annotations

from torch import Tensor

from mindspeed.ops.npu_ring_attention_update import npu_ring_attention_update


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge ``new`` into ``out`` [queries, batch, heads, width] and ``lse`` [batch, heads, queries], in place."""
    sides = [_side(x.reshape(out.shape).to(out.dtype), stat.to(lse.dtype)) for x, stat in ((out, lse), (new_out, new_lse))]
    merged, maximum, total = npu_ring_attention_update(*sides[0], *sides[1])
    out.copy_(merged.view(out.shape))
    lse.copy_((maximum + total.log())[..., 0])


def _side(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An output [S, B, H] and its statistics [B, N, S, 1]: ``(lse, 1)``, and (-inf, 0) for rows that saw nothing."""
    seen = (lse > -float("inf")).to(lse.dtype)
    return out.flatten(2), lse[..., None], seen[..., None]
