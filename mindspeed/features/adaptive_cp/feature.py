"""Adaptive context parallelism in Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mindspeed.context_parallel.feature import NEEDS_GROUP, TwoLevelFeature
from mindspeed.context_parallel.patches import NO_PREDICTION, any_length, sliced_by
from mindspeed.plugins import (
    AddFeature,
    ArgOverride,
    Capability,
    Category,
    Check,
    Conflicts,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    GiveSetting,
    Numerics,
    Patch,
    Requires,
    Slot,
    Together,
    hookimpl,
)

if TYPE_CHECKING:
    from mindspeed.context_parallel.core_attention import CoreAttention
    from mindspeed.features.adaptive_cp.plans import Plans

_LAYERS = "mindspeed.features.adaptive_cp.layers"
_REASON = "ranks hold the tokens that see one another"


class AdaptiveCpArgs(FeatureArgs):
    only_reschedule: bool = Field(False, description="leave the tokens in order, and only choose who computes which block")
    coarse: int = Field(1024, ge=1, description="pieces that the mask is at most cut into when a better order is looked for")
    without_coarse: bool = Field(False, description="look for a better order of single tokens")
    dynamic_mask: bool = Field(
        False, description="the mask comes with each batch and is planned anew when it changes; tokens stay in order"
    )
    ulysses_degree: int = Field(1, ge=1, description="neighbouring ranks that exchange tokens for heads; 1 is none")
    own_masks: bool = Field(False, description="not taken: a mask of your own is a function that you name")


class AdaptiveCp(TwoLevelFeature[AdaptiveCpArgs]):
    """Any mask is cut into blocks of ranks; those in which something is seen travel and are computed, and no others."""

    spec = FeatureSpec(
        name="adaptive-cp",
        summary="Context parallelism for any mask, with only the blocks that it needs, in a balanced order",
        category=Category.CONTEXT_PARALLEL,
        slots={Slot.CONTEXT_PARALLEL},
        provides={Capability.SHARED_MASK},
        constraints=(
            NEEDS_GROUP,
            NO_PREDICTION,
            Requires(
                "shared-attention-mask",
                reason="all ranks know one mask before the first batch; else --set adaptive-cp.dynamic_mask=true",
                when=lambda args, world: not args.dynamic_mask,
            ),
            Conflicts(
                "shared-attention-mask",
                reason="the mask comes with each batch; --set adaptive-cp.dynamic_mask=false takes the shared one",
                when=lambda args, world: args.dynamic_mask,
            ),
            Check(
                lambda args, world: not args.own_masks,
                "a list of blocks is not taken from functions that are edited in place",
                fix="--set shared-attention-mask.kind=package.module:function, which gives the mask",
            ),
            Check(
                lambda args, world: world.pp <= 2,
                "a mask that comes with each batch does not reach the middle of {world.pp} pipeline stages",
                fix=(
                    GiveField("pp", 2, "or less"),
                    Together((AddFeature("shared-attention-mask"), GiveSetting("dynamic_mask", False))),
                ),
                when=lambda args, world: args.dynamic_mask,
            ),
            Check(
                lambda args, world: world.cp % args.ulysses_degree == 0 and world.cp > args.ulysses_degree,
                "two or more groups of {args.ulysses_degree} neighbours do not make {world.cp} context-parallel ranks",
                fix=(GiveField("cp", note="two or more times {args.ulysses_degree}"), GiveSetting("ulysses_degree", 1)),
                when=lambda args, world: args.ulysses_degree > 1 and world.cp > 1,
            ),
            Check(
                lambda args, world: world.num_attention_heads % (args.ulysses_degree * world.tp) == 0,
                "{world.num_attention_heads} attention heads do not divide among "
                "{args.ulysses_degree} x tp = {args.ulysses_degree} x {world.tp} ranks",
                fix="a smaller --set adaptive-cp.ulysses_degree",
                when=lambda args, world: args.ulysses_degree > 1 and world.cp > 1,
            ),
        ),
        numerics=Numerics.reordered(reason="the softmax is summed block by block"),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        mask = ArgOverride("create_attention_mask_in_dataloader", True, "the mask comes with each batch")
        return [mask] if self.args.dynamic_mask else []

    plans: Plans
    """Plans of masks that came with batches: a plan follows from its mask alone, so any micro-batch finds its own."""

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        from mindspeed.features.adaptive_cp.plans import Plans

        super().groups_created(sizes, get_group)
        self.plans = Plans()

    @hookimpl
    def groups_destroyed(self) -> None:
        from mindspeed.features.adaptive_cp.layers import plan_of_rule

        super().groups_destroyed()
        plan_of_rule.cache_clear()
        self.plans.clear()

    def core_attention(self) -> type[CoreAttention]:
        from mindspeed.features.adaptive_cp.layers import AdaptiveCoreAttention

        return AdaptiveCoreAttention

    def slicing(self) -> list[Patch]:
        return [*sliced_by(f"{_LAYERS}:share_of_batch", f"{_LAYERS}:share_of_table", _REASON), any_length()]
