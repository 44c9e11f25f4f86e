"""The core attention that layers are built with, and what a rank holds of batches and position tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.context_parallel.communicators import RING_OUTER_GROUP
from mindspeed.context_parallel.conditions import keeps
from mindspeed.context_parallel.core_attention import CoreAttention
from mindspeed.context_parallel.groups import Groups, require_groups
from mindspeed.context_parallel.heads import own_heads
from mindspeed.context_parallel.layout import Layout, zigzag
from mindspeed.context_parallel.packed import document_slicer, rope_function_of_packed, slicer_of_packed
from mindspeed.context_parallel.ring import ring_attention
from mindspeed.context_parallel.slicing import batch_share, batch_slicer, table_share
from mindspeed.features.hybrid_attention.attention import hybrid_attention, nested
from mindspeed.ops.attention_mask import AttentionVisibility

if TYPE_CHECKING:
    from mindspeed.features.hybrid_attention.feature import HybridAttention

_OP = "hybrid_attention"


class HybridCoreAttention(CoreAttention):
    """Core attention by `hybrid_attention` around `ring_attention`."""

    feature: HybridAttention

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visibility: AttentionVisibility) -> Tensor:
        groups, args = require_groups(self.feature.groups, _OP), self.feature.args
        attention_kwargs = self.attention_kwargs(visibility, query.device)
        attention_kwargs["slopes"] = own_heads(attention_kwargs["slopes"], groups.inner)

        def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ring_attention(
                q,
                k,
                v,
                groups.outer,
                **attention_kwargs,
                window=args.window,
                keep=args.keep if keeps(self.attention_number, args.interval) else "none",
                outer_group=self.feature.ring_groups.get(RING_OUTER_GROUP),
                layout=zigzag(groups.outer.size()),
            )

        return hybrid_attention(query, key, value, groups.inner, ring)


@batch_slicer
def share_of_batch(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    """Replaces Megatron's slicing of a batch. Of an attention mask it keeps the rows that the neighbours hold together."""
    outer = _groups().outer
    ring = zigzag(outer.size())
    return batch_share(batch, cp_group, _layout, lambda mask: ring.take(mask, outer.rank(), 2))


def share_of_table(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
    """Replaces Megatron's slicing of a position table."""
    return table_share(pos_emb, seq_dim, cp_group, _layout)


def _groups() -> Groups:
    feature: HybridAttention | None = ms.active_feature("hybrid-attention")
    return require_groups(None if feature is None else feature.groups, _OP)


def _layout(ranks: int) -> Layout:
    ring = _groups().outer.size()
    return nested(zigzag(ring), ranks // ring)


share_of_packed, rope_of_packed = slicer_of_packed(_layout), rope_function_of_packed(_layout)
share_of_documents = document_slicer(_layout)
