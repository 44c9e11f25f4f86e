"""All-to-alls overlapped with shared experts, weight gradients and expert chunks."""

from __future__ import annotations

from mindspeed import plugins as ms
from mindspeed.moe.conditions import OverlapFeature, experts_are_spread, keeps_modules_whole, shared_experts_are_kept


class MoeAlltoallOverlapArgs(ms.FeatureArgs):
    parts: int = ms.Field(
        1,
        ge=1,
        description="Number of groups into which the experts of a rank are split. With 2 or more, the all-to-all of one group "
        "overlaps with the computation of another. 1 = all-to-alls overlap only with shared experts and weight gradients",
    )


def _has_parts(args: MoeAlltoallOverlapArgs, world: ms.World) -> bool:
    """Return whether local experts are split into chunks."""
    return args.parts > 1


@ms.condition(
    "the number of experts of a rank ({world.num_experts} experts / ep={world.ep}) is not divisible by parts={args.parts}",
    fix=(ms.Fix.give_setting("parts", 1),),
    when=_has_parts,
)
def parts_divide_experts(args: MoeAlltoallOverlapArgs, world: ms.World) -> bool:
    """Check that every chunk has equally many experts."""
    return bool(world.num_experts // world.ep % args.parts == 0)


class MoeAlltoallOverlap(OverlapFeature[MoeAlltoallOverlapArgs]):
    """Overlap expert all-to-alls with computation.

    While tokens are sent to their experts and back, shared experts and weight gradients are computed. With ``parts`` greater
    than 1, the experts of a rank are split into groups. The all-to-all of one group overlaps with the computation of another.
    """

    spec = ms.FeatureSpec(
        name="moe-alltoall-overlap",
        category=ms.Category.MOE,
        slots={ms.Slot.MOE_DISPATCHER},
        constraints=(
            ms.After("moe-shared-experts"),  # it knows their size
            ms.Requires("moe-alltoall-dispatcher", reason="moe-alltoall-overlap overlaps the all-to-alls of that dispatcher"),
            ms.Requires(
                "moe-grouped-gemm",
                reason="only the experts of moe-grouped-gemm are written for the overlap: they start before all tokens have "
                "arrived, and defer their weight gradients",
            ),
            experts_are_spread,
            shared_experts_are_kept,
            keeps_modules_whole("adaptive-recompute"),
            parts_divide_experts,
        ),
        numerics=ms.Numerics.reordered(
            reason="gradients of a layer's input are summed in a different order than in Megatron. With the setting parts > 1, "
            "outputs are also summed in a different order"
        ),
        own_trainer="from mindspeed.nn import MoE  # chunks=2",
    )

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Mixin(
                "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
                "mindspeed.features.moe_alltoall_overlap.layers:OverlappedDispatch",
                reason="starts the all-to-alls of the MoE layer asynchronously, and waits for them only when their results "
                "are needed",
            )
        ]
