"""Ring attention in Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.context_parallel.costs import cost_of_ring
from mindspeed.context_parallel.feature import NEEDS_GROUP, AlgorithmFeature
from mindspeed.context_parallel.rules import TWO_PIECES, interval_checks
from mindspeed.plugins import (
    Capability,
    Category,
    Check,
    FeatureArgs,
    FeatureSpec,
    Field,
    MegatronFlag,
    Numerics,
    Slot,
    hookimpl,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mindspeed.context_parallel.core_attention import CoreAttention


class RingAttentionArgs(FeatureArgs):
    window: int = Field(1, ge=1, description="neighbouring ranks of an inner ring; 1 is a single ring")
    keep: Literal["none", "half", "full"] = Field(
        "none", description="received blocks kept for backward instead of sent again: none, their keys, keys and values"
    )
    interval: int = Field(0, ge=0, description="layers between two that keep blocks; 0: every layer")
    second_communicator: bool = Field(
        False, description="send and receive on different communicators, for backends that run one transfer of each at a time"
    )


class RingAttention(AlgorithmFeature[RingAttentionArgs]):
    """Blocks of keys and values go from rank to rank, hidden behind the attention to the block before."""

    spec = FeatureSpec(
        name="ring-attention",
        summary="Context parallelism by passing key and value blocks around a ring",
        category=Category.CONTEXT_PARALLEL,
        slots={Slot.CONTEXT_PARALLEL},
        provides={Capability.DOCUMENTS, Capability.POSITION_BIAS},
        cost=cost_of_ring,
        constraints=(
            NEEDS_GROUP,
            TWO_PIECES,
            Check(
                lambda args, world: world.cp % args.window == 0 and args.window < world.cp,
                "window {args.window} is not a part of the ring of {world.cp} ranks",
                fix="--set ring-attention.window=1, or another divisor of {world.cp} that is smaller than it",
                when=lambda args, world: world.cp > 1 and args.window > 1,
            ),
            *interval_checks("ring-attention"),
        ),
        megatron_flags=(MegatronFlag("cp_comm_type", switch="on", values=("p2p",), size="cp"),),
        numerics=Numerics.reordered(reason="the softmax is summed block by block"),
    )

    second_group: ProcessGroup | None = None
    """Another communicator of the context-parallel ranks, where the setting asks for it."""

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        if self.args.second_communicator:
            import torch.distributed as dist

            ranks = dist.get_process_group_ranks(get_group("cp"))
            self.second_group = dist.new_group(ranks, use_local_synchronization=True, group_desc="RING_SECOND_GROUP")

    @hookimpl
    def groups_destroyed(self) -> None:
        if self.second_group is not None:
            import torch.distributed as dist

            dist.destroy_process_group(self.second_group)
            self.second_group = None

    def core_attention(self) -> type[CoreAttention]:
        from mindspeed.features.ring_attention.layers import RingCoreAttention

        return RingCoreAttention
