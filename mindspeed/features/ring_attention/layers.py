"""The core attention that layers are built with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mindspeed.context_parallel.communicators import RING_OUTER_GROUP, RING_SECOND_GROUP
from mindspeed.context_parallel.conditions import keeps
from mindspeed.context_parallel.core_attention import CoreAttention
from mindspeed.context_parallel.layout import zigzag
from mindspeed.context_parallel.ring import ring_attention
from mindspeed.ops.attention_mask import AttentionVisibility

if TYPE_CHECKING:
    from mindspeed.features.ring_attention.feature import RingAttention


class RingCoreAttention(CoreAttention):
    """Core attention by `ring_attention`; Megatron spreads tokens in zig-zag."""

    feature: RingAttention

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visibility: AttentionVisibility) -> Tensor:
        args = self.feature.args
        return ring_attention(
            query,
            key,
            value,
            self.group,
            **self.attention_kwargs(visibility, query.device),
            window=args.window,
            narrow_gradients=args.narrow_gradients,
            keep=args.keep if keeps(self.attention_number, args.interval) else "none",
            second_group=self.feature.ring_groups.get(RING_SECOND_GROUP),
            outer_group=self.feature.ring_groups.get(RING_OUTER_GROUP),
            layout=zigzag(self.group.size()),
        )
