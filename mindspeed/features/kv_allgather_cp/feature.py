"""Context parallelism that gathers keys and values."""

from __future__ import annotations

from typing import Any

from mindspeed.context_parallel.costs import cost_of_gathering
from mindspeed.context_parallel.patches import NO_DATALOADER_MASK, packed_in
from mindspeed.context_parallel.rules import TWO_PIECES
from mindspeed.plugins import (
    ArgOverride,
    Capability,
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    MegatronFlag,
    Numerics,
    Patch,
    Requires,
    Slot,
    hookimpl,
)


class KvAllgatherCp(Feature[FeatureArgs]):
    """Every rank gathers the keys and values of all, and computes its queries at once; nothing is merged."""

    spec = FeatureSpec(
        name="kv-allgather-cp",
        summary="Context parallelism by gathering keys and values on every rank",
        category=Category.CONTEXT_PARALLEL,
        slots={Slot.CONTEXT_PARALLEL},
        provides={Capability.DOCUMENTS, Capability.POSITION_BIAS},
        cost=cost_of_gathering,
        constraints=(
            Requires("context-parallel", reason="it owns the group and the per-token loss scaling"),
            TWO_PIECES,
        ),
        megatron_flags=(MegatronFlag("cp_comm_type", switch="on", values=("all_gather",), size="cp"),),
        numerics=Numerics.reordered(reason="gradients of keys are sums over ranks"),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [NO_DATALOADER_MASK] if self.world.cp > 1 else []

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if self.world.cp == 1:
            return spec
        from mindspeed.context_parallel.core_attention import with_core_attention
        from mindspeed.features.kv_allgather_cp.layers import GatheredCoreAttention

        return with_core_attention(spec, config, GatheredCoreAttention, self)

    @hookimpl
    def patches(self) -> list[Patch]:
        return packed_in() if self.world.cp > 1 else []
