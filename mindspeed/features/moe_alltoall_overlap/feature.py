"""All-to-alls behind shared experts, weight gradients and one another."""

from __future__ import annotations

from mindspeed.moe.feature import OverlapFeature, unserved
from mindspeed.plugins import (
    After,
    Category,
    Check,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    Mixin,
    Numerics,
    Patch,
    RemoveFeature,
    Requires,
    Slot,
    hookimpl,
)

_LAYERS = "mindspeed.features.moe_alltoall_overlap.layers"


class MoeAlltoallOverlapArgs(FeatureArgs):
    parts: int = Field(1, ge=1, description="parts of a rank's experts whose dispatch, products and return overlap")


class MoeAlltoallOverlap(OverlapFeature[MoeAlltoallOverlapArgs]):
    """Every all-to-all of a MoE layer is posted early and waited for late, in forward and in backward."""

    spec = FeatureSpec(
        name="moe-alltoall-overlap",
        summary="All-to-alls of experts hidden behind shared experts, weight gradients and parts of the experts",
        category=Category.MOE,
        slots={Slot.MOE_DISPATCHER},
        constraints=(
            After("moe-shared-experts"),  # it knows their size
            Requires("moe-alltoall-dispatcher", reason="it overlaps the transfers of that dispatcher"),
            Requires("moe-grouped-gemm", reason="the experts wait for their rows, and defer the gradients of their weights"),
            Check(
                lambda args, world: world.ep > 1,
                "experts are on one rank, and there is no all-to-all to hide",
                fix=(GiveField("ep", 2, or_more=True), RemoveFeature()),
            ),
            *unserved("moe-alltoall-overlap", "transformer_engine_experts"),
            Check(
                lambda args, world: world.num_experts // world.ep % args.parts == 0,
                "the experts of a rank, {world.num_experts} / {world.ep}, cannot be cut into {args.parts} equal parts",
                fix="use a divisor for moe-alltoall-overlap.parts",
                when=lambda args, world: args.parts > 1,
            ),
        ),
        numerics=Numerics.reordered(
            reason="gradients of a layer's input are added in another order, with parts the answers too"
        ),
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Mixin(
                "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
                f"{_LAYERS}:OverlappedDispatch",
                reason="its transfers are posted and waited for at two places",
            )
        ]
