"""The core attention that layers are built with."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from mindspeed.context_parallel.core_attention import CoreAttention, with_core_attention
from mindspeed.context_parallel.rules import keeps
from mindspeed.context_parallel.sight import Sight
from mindspeed.features.ring_attention.attention import ring_attention, zigzag
from mindspeed.features.ring_attention.feature import RingAttentionArgs

_second: list[dist.ProcessGroup] = []


def make_second_group(cp_group: dist.ProcessGroup) -> None:
    """Another communicator of the same ranks; called by every rank of the group."""
    ranks = dist.get_process_group_ranks(cp_group)
    _second[:] = [dist.new_group(ranks, use_local_synchronization=True, group_desc="RING_SECOND_GROUP")]


def forget_second_group() -> None:
    """Megatron's groups are about to go, and this with them."""
    for group in _second:
        dist.destroy_process_group(group)
    _second.clear()


class RingCoreAttention(CoreAttention):
    """Core attention by `ring_attention`; Megatron spreads tokens in zig-zag."""

    feature = "ring-attention"
    zigzag = True
    args: ClassVar[RingAttentionArgs] = RingAttentionArgs()  # type: ignore[call-arg]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
        return ring_attention(
            query,
            key,
            value,
            self.group,
            **self.asked(sight),
            window=self.args.window,
            keep=self.args.keep if keeps(self.layer_number, self.args.interval) else "none",
            second_group=_second[0] if _second else None,
            layout=zigzag(self.group.size()),
        )


def with_ring_attention(spec: Any, config: Any, args: RingAttentionArgs) -> Any:
    """The spec of a block with every core attention exchanged for one with these settings."""
    attention = type("RingCoreAttention", (RingCoreAttention,), {"args": args, "__module__": __name__})
    return with_core_attention(spec, config, attention)
