"""The core attention that layers are built with, and what a rank holds of batches and position tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from mindspeed.context_parallel.core_attention import CoreAttention, with_core_attention
from mindspeed.context_parallel.groups import forget_groups, made_groups, make_groups
from mindspeed.context_parallel.heads import own_heads
from mindspeed.context_parallel.layout import Layout, zigzag
from mindspeed.context_parallel.packed import slicer_of_packed, turner_of_packed
from mindspeed.context_parallel.ring import ring_attention
from mindspeed.context_parallel.rules import keeps
from mindspeed.context_parallel.sight import Sight
from mindspeed.context_parallel.slicing import batch_share, table_share
from mindspeed.features.hybrid_attention.attention import hybrid_attention, nested
from mindspeed.features.hybrid_attention.feature import HybridAttentionArgs

__all__ = [
    "forget_groups",
    "make_groups",
    "share_of_batch",
    "share_of_packed",
    "share_of_table",
    "turn_of_packed",
    "with_hybrid_attention",
]


class HybridCoreAttention(CoreAttention):
    """Core attention by `hybrid_attention` around `ring_attention`."""

    feature = "hybrid-attention"
    args: ClassVar[HybridAttentionArgs] = HybridAttentionArgs()  # type: ignore[call-arg]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
        groups = made_groups("hybrid_attention")
        asked = self.asked(replace(sight, slopes=own_heads(sight.slopes, groups.inner)))

        def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ring_attention(
                q,
                k,
                v,
                groups.outer,
                **asked,
                window=self.args.window,
                keep=self.args.keep if keeps(self.layer_number, self.args.interval) else "none",
                layout=zigzag(groups.outer.size()),
            )

        return hybrid_attention(query, key, value, groups.inner, ring)


def with_hybrid_attention(spec: Any, config: Any, args: HybridAttentionArgs) -> Any:
    """The spec of a block with every core attention exchanged for one with these settings."""
    attention = type("HybridCoreAttention", (HybridCoreAttention,), {"args": args, "__module__": __name__})
    return with_core_attention(spec, config, attention)


def share_of_batch(batch: dict[str, Any], cp_group: Any = None) -> dict[str, Any]:
    """Stands for Megatron's slicing of a batch. Of an attention mask it takes the rows that the neighbours hold together."""
    outer = made_groups("hybrid_attention").outer
    ring = zigzag(outer.size())
    return batch_share(batch, cp_group, _layout, lambda mask: ring.take(mask, outer.rank(), 2))


def share_of_table(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
    """Stands for Megatron's slicing of a position table."""
    return table_share(pos_emb, seq_dim, cp_group, _layout)


def _layout(ranks: int) -> Layout:
    ring = made_groups("hybrid_attention").outer.size()
    return nested(zigzag(ring), ranks // ring)


share_of_packed, turn_of_packed = slicer_of_packed(_layout), turner_of_packed(_layout)
