"""The core attention that layers are built with, and what a rank holds of batches and position tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from mindspeed.context_parallel.conditions import keeps
from mindspeed.context_parallel.core_attention import CoreAttention
from mindspeed.context_parallel.packed import document_slicer, rope_function_of_packed, slicer_of_packed
from mindspeed.context_parallel.slicing import batch_share, batch_slicer, table_share
from mindspeed.features.ulysses_attention.attention import contiguous, ulysses_attention
from mindspeed.ops.attention_mask import AttentionVisibility

if TYPE_CHECKING:
    from mindspeed.features.ulysses_attention.feature import UlyssesAttention


class UlyssesCoreAttention(CoreAttention):
    """Core attention by `ulysses_attention`."""

    feature: UlyssesAttention

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visibility: AttentionVisibility) -> Tensor:
        args = self.feature.args
        return ulysses_attention(
            query,
            key,
            value,
            self.group,
            **self.attention_kwargs(visibility, query.device),
            keep=args.keep if keeps(self.attention_number, args.interval) else "none",
            kv_allgather=args.kv_allgather,
        )


@batch_slicer
def share_of_batch(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    """Replaces Megatron's slicing of a batch. An attention mask is kept whole, because attention processes all queries."""
    return batch_share(batch, cp_group, contiguous, lambda mask: mask)


def share_of_table(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
    """Replaces Megatron's slicing of a position table."""
    return table_share(pos_emb, seq_dim, cp_group, contiguous)


share_of_packed, rope_of_packed = slicer_of_packed(contiguous), rope_function_of_packed(contiguous)
share_of_documents = document_slicer(contiguous)
