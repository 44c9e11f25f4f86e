"""Gathers and scatters of tokens overlapped with shared experts and weight gradients."""

from __future__ import annotations

from mindspeed import plugins as ms
from mindspeed.moe.conditions import REORDERED, OverlapFeature, experts_are_spread, keeps_modules_whole, shared_experts_are_kept


class MoeAllgatherOverlap(OverlapFeature[ms.FeatureArgs]):
    """Overlap token gathers with shared experts.

    While tokens are gathered from other ranks and scattered back, shared experts and weight gradients are computed.
    """

    spec = ms.FeatureSpec(
        name="moe-allgather-overlap",
        category=ms.Category.MOE,
        slots={ms.Slot.MOE_DISPATCHER},
        constraints=(
            ms.After("moe-shared-experts"),  # it knows their size
            ms.Requires(
                "moe-allgather-dispatcher", reason="moe-allgather-overlap overlaps the gathers and scatters of that dispatcher"
            ),
            ms.Requires(
                "moe-grouped-gemm",
                reason="only the experts of moe-grouped-gemm are written for the overlap: they start before the gather has "
                "finished, and defer their weight gradients",
            ),
            experts_are_spread,
            shared_experts_are_kept,
            keeps_modules_whole("adaptive-recompute"),
        ),
        numerics=REORDERED,
        own_trainer='from mindspeed.nn import MoE  # dispatcher="allgather"',
    )

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Mixin(
                "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher",
                "mindspeed.features.moe_allgather_overlap.layers:OverlappedAllGather",
                reason="starts the gather of tokens and waits for it only just before the experts need them, so that shared "
                "experts compute during the gather",
            )
        ]
