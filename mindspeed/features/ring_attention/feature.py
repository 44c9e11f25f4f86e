"""Ring attention in Megatron."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from mindspeed import plugins as ms
from mindspeed.context_parallel.communicators import communicators_of_ring
from mindspeed.context_parallel.conditions import KeepArgs, interval_is_inside, two_chunks_for_each_rank
from mindspeed.context_parallel.costs import (
    NOTHING,
    Attention,
    attention_of,
    blocks_of_ring,
    cost,
    given_inputs,
    ring,
    with_blocks,
)
from mindspeed.context_parallel.feature import ALGORITHM, AlgorithmFeature
from mindspeed.plugins.saved_tensors import SavedTensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mindspeed.context_parallel.core_attention import CoreAttention


class RingAttentionArgs(KeepArgs):
    window: int = ms.Field(
        1,
        ge=1,
        description="Number of neighbouring ranks in an inner ring, such as those of a node. Keys and values pass around "
        "each inner ring, then between the inner rings. 1 = one ring of all ranks",
    )
    keep: Literal["none", "half", "full"] = ms.Field(
        "none",
        description="Received blocks that are kept for backward: none (all are received again), half (keys are kept) or full "
        "(keys and values). Keeping blocks saves transfers but uses memory",
    )
    narrow_gradients: bool = ms.Field(
        False,
        description="Send the gradients of keys and values in the type of the weights instead of fp32. In bf16 this sends half "
        "the bytes, and each hop rounds the sum of the ranks so far to bf16",
    )
    second_communicator: bool = ms.Field(
        False,
        description="Use separate communicators for sending and receiving. Helps with backends that run only one transfer "
        "per communicator at a time",
    )


def _has_window(args: RingAttentionArgs, world: ms.World) -> bool:
    """Return whether ranks form inner rings."""
    return args.window > 1


@ms.condition(
    "the ring of cp={world.cp} ranks cannot be split into two or more inner rings of window={args.window} ranks",
    fix=(
        ms.Fix.give_setting("window", 1),
        ms.Fix.give_setting("window", note="a divisor of {world.cp}, smaller than {world.cp}"),
    ),
    when=_has_window,
)
def window_divides_ring(args: RingAttentionArgs, world: ms.World) -> bool:
    """Check that inner rings are of equal size, and several."""
    return bool(world.cp % args.window == 0 and args.window < world.cp)


class RingAttention(AlgorithmFeature[RingAttentionArgs]):
    """Pass keys and values around a ring of ranks.

    Attention to one block of keys and values is computed while the next block is received.
    """

    spec = ms.FeatureSpec(
        name="ring-attention",
        category=ms.Category.CONTEXT_PARALLEL,
        slots={ms.Slot.CONTEXT_PARALLEL},
        provides={ms.Capability.DOCUMENTS, ms.Capability.POSITION_BIAS},
        constraints=(*ALGORITHM, two_chunks_for_each_rank, window_divides_ring, interval_is_inside),
        megatron_flags=(ms.MegatronFlag("cp_comm_type", switch="on", values=("p2p",), size="cp"),),
        numerics=ms.Numerics.reordered(reason="the softmax is summed block by block"),
        own_trainer='from mindspeed.nn import ContextParallelAttention  # algorithm="ring"',
    )

    ring_groups: Mapping[str, ProcessGroup] = MappingProxyType({})
    """Further communicators of the context-parallel ranks, by name."""

    @ms.hookimpl
    def communicators(self) -> Sequence[str]:
        return communicators_of_ring(self.world.cp, self.args.window, self.args.second_communicator)

    @ms.hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        from mindspeed.context_parallel.groups import make_ring_groups

        self.ring_groups = make_ring_groups(get_group("cp"), self.communicators())

    @ms.hookimpl
    def groups_destroyed(self) -> None:
        from mindspeed.context_parallel.groups import destroy

        self.ring_groups = destroy(self.ring_groups)

    def core_attention(self) -> type[CoreAttention]:
        from mindspeed.features.ring_attention.layers import RingCoreAttention

        return RingCoreAttention

    @ms.hookimpl
    def cost(self) -> ms.Cost:
        """Count the transfers of a ring, which blocks hide."""
        return cost(ring(attention_of(self.world), self.world.cp, self.args.keep, self.args.narrow_gradients), NOTHING, 0)

    def kept(self, tensors: SavedTensors, a: Attention) -> SavedTensors:
        received = blocks_of_ring(a, self.world.cp, self.args.keep)
        return with_blocks(tensors, a, given_inputs(a, self.world), received, self.args.interval)
