"""The core attention that layers are built with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed.context_parallel.core_attention import CoreAttention, with_core_attention
from mindspeed.context_parallel.sight import Sight
from mindspeed.features.kv_allgather_cp.attention import kv_allgather_attention, zigzag


class GatheredCoreAttention(CoreAttention):
    """Core attention by `kv_allgather_attention`; Megatron spreads tokens in zig-zag."""

    feature = "kv-allgather-cp"
    zigzag = True

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
        return kv_allgather_attention(
            query,
            key,
            value,
            self.group,
            **self.asked(sight),
            layout=zigzag(self.group.size()),
        )


def with_gathered_attention(spec: Any, config: Any) -> Any:
    """The spec of a block with every core attention exchanged."""
    return with_core_attention(spec, config, GatheredCoreAttention)
