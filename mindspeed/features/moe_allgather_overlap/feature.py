"""Gathers and scatters of tokens behind shared experts and weight gradients."""

from __future__ import annotations

from typing import Any

from mindspeed.plugins import (
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Mixin,
    Numerics,
    Patch,
    Requires,
    Slot,
    hookimpl,
)


class MoeAllgatherOverlap(Feature[FeatureArgs]):
    """The transfers of the all-gather dispatcher run under shared experts, and under weight gradients in backward."""

    spec = FeatureSpec(
        name="moe-allgather-overlap",
        summary="Gathers and scatters of tokens hidden behind shared experts and weight gradients",
        category=Category.MOE,
        slots={Slot.MOE_DISPATCHER},
        constraints=(
            Requires("moe-allgather-dispatcher", reason="it overlaps the transfers of that dispatcher"),
            Requires("moe-grouped-gemm", reason="the experts wait for their rows, and defer the gradients of their weights"),
            Check(
                lambda args, world: world.ep > 1,
                "experts are on one rank, and there is no gather to hide",
                fix="--ep 2 or more, or remove moe-allgather-overlap",
            ),
        ),
        numerics=Numerics.reordered(reason="gradients of a layer's input are added in another order"),
    )

    @hookimpl
    def config_ready(self, config: Any) -> None:
        if config.num_moe_experts and config.moe_shared_expert_intermediate_size:
            config.moe_shared_expert_overlap = True  # Megatron's own check lets only the all-to-all dispatcher have it

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.moe.limits import has_other_experts

        if config.num_moe_experts and has_other_experts(spec):
            self.decline("the layer spec has experts that are not grouped by moe-grouped-gemm, such as Transformer Engine's")
        return spec

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Mixin(
                "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher",
                "mindspeed.moe.dispatchers:OverlappedAllGather",
                reason="its experts wait for their rows themselves",
            )
        ]
