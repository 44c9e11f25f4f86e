"""The core attention that layers are built with."""

from __future__ import annotations

from torch import Tensor

from mindspeed.context_parallel.core_attention import CoreAttention
from mindspeed.context_parallel.layout import zigzag
from mindspeed.features.kv_allgather_cp.attention import kv_allgather_attention
from mindspeed.ops.attention_mask import AttentionVisibility


class GatheredCoreAttention(CoreAttention):
    """Core attention by `kv_allgather_attention`; Megatron spreads tokens in zig-zag."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visibility: AttentionVisibility) -> Tensor:
        return kv_allgather_attention(
            query,
            key,
            value,
            self.group,
            **self.attention_kwargs(visibility, query.device),
            layout=zigzag(self.group.size()),
        )
