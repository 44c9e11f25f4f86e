"""Context parallelism that gathers keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed import plugins as ms
from mindspeed.context_parallel.conditions import two_chunks_for_each_rank
from mindspeed.context_parallel.costs import Attention, attention_of, cost_of_waiting, gathered, given_inputs, with_blocks
from mindspeed.context_parallel.feature import ALGORITHM, AlgorithmFeature
from mindspeed.plugins.saved_tensors import SavedTensors

if TYPE_CHECKING:
    from mindspeed.context_parallel.core_attention import CoreAttention


class KvAllgatherCp(AlgorithmFeature[ms.FeatureArgs]):
    """Gather keys and values on every rank.

    Each rank computes attention for its local queries in one step, without merging partial results.
    """

    spec = ms.FeatureSpec(
        name="kv-allgather-cp",
        category=ms.Category.CONTEXT_PARALLEL,
        slots={ms.Slot.CONTEXT_PARALLEL},
        provides={ms.Capability.DOCUMENTS, ms.Capability.POSITION_BIAS},
        constraints=(*ALGORITHM, two_chunks_for_each_rank),
        megatron_flags=(ms.MegatronFlag("cp_comm_type", switch="on", values=("all_gather",), size="cp"),),
        numerics=ms.Numerics.reordered(reason="key and value gradients are summed over ranks"),
        own_trainer='from mindspeed.nn import ContextParallelAttention  # algorithm="kv-allgather"',
    )

    def core_attention(self) -> type[CoreAttention]:
        from mindspeed.features.kv_allgather_cp.layers import GatheredCoreAttention

        return GatheredCoreAttention

    @ms.hookimpl
    def cost(self) -> ms.Cost:
        return cost_of_waiting(gathered(attention_of(self.world), self.world.cp), self.world)

    def kept(self, tensors: SavedTensors, a: Attention) -> SavedTensors:
        return with_blocks(tensors, a, given_inputs(a, self.world))
