"""Context parallelism that gathers keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed.context_parallel.costs import cost_of_gathering
from mindspeed.context_parallel.feature import NEEDS_GROUP, AlgorithmFeature
from mindspeed.context_parallel.rules import TWO_PIECES
from mindspeed.plugins import (
    Capability,
    Category,
    FeatureArgs,
    FeatureSpec,
    MegatronFlag,
    Numerics,
    Slot,
)

if TYPE_CHECKING:
    from mindspeed.context_parallel.core_attention import CoreAttention


class KvAllgatherCp(AlgorithmFeature[FeatureArgs]):
    """Every rank gathers the keys and values of all, and computes its queries at once; nothing is merged."""

    spec = FeatureSpec(
        name="kv-allgather-cp",
        summary="Context parallelism by gathering keys and values on every rank",
        category=Category.CONTEXT_PARALLEL,
        slots={Slot.CONTEXT_PARALLEL},
        provides={Capability.DOCUMENTS, Capability.POSITION_BIAS},
        cost=cost_of_gathering,
        constraints=(
            NEEDS_GROUP,
            TWO_PIECES,
        ),
        megatron_flags=(MegatronFlag("cp_comm_type", switch="on", values=("all_gather",), size="cp"),),
        numerics=Numerics.reordered(reason="gradients of keys are sums over ranks"),
    )

    def core_attention(self) -> type[CoreAttention]:
        from mindspeed.features.kv_allgather_cp.layers import GatheredCoreAttention

        return GatheredCoreAttention
