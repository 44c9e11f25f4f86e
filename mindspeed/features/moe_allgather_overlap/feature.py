"""Gathers and scatters of tokens behind shared experts and weight gradients."""

from __future__ import annotations

from mindspeed.moe.feature import OverlapFeature, unserved
from mindspeed.plugins import (
    After,
    Category,
    Check,
    FeatureArgs,
    FeatureSpec,
    GiveField,
    Mixin,
    Numerics,
    Patch,
    RemoveFeature,
    Requires,
    Slot,
    hookimpl,
)


class MoeAllgatherOverlap(OverlapFeature[FeatureArgs]):
    """The transfers of the all-gather dispatcher run under shared experts, and under weight gradients in backward."""

    spec = FeatureSpec(
        name="moe-allgather-overlap",
        summary="Gathers and scatters of tokens hidden behind shared experts and weight gradients",
        category=Category.MOE,
        slots={Slot.MOE_DISPATCHER},
        constraints=(
            After("moe-shared-experts"),  # it knows their size
            Requires("moe-allgather-dispatcher", reason="it overlaps the transfers of that dispatcher"),
            Requires("moe-grouped-gemm", reason="the experts wait for their rows, and defer the gradients of their weights"),
            Check(
                lambda args, world: world.ep > 1,
                "experts are on one rank, and there is no gather to hide",
                fix=(GiveField("ep", 2, or_more=True), RemoveFeature()),
            ),
            *unserved("moe-allgather-overlap", "transformer_engine_experts"),
        ),
        numerics=Numerics.reordered(reason="gradients of a layer's input are added in another order"),
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Mixin(
                "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher",
                "mindspeed.moe.dispatchers:OverlappedAllGather",
                reason="its experts wait for their rows themselves",
            )
        ]
