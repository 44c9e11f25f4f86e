"""The merge of attention blocks as one operator."""

from __future__ import annotations

from mindspeed.plugins import (
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    GiveField,
    Numerics,
    Patch,
    RemoveFeature,
    Replace,
    VerifyWith,
    hookimpl,
)


class RingAttentionUpdate(Feature[FeatureArgs]):
    """A ring of attention blocks merges each into its result by the operator ``mindspeed::npu_ring_attention_update``."""

    spec = FeatureSpec(
        name="ring-attention-update",
        summary="The merge of attention blocks as one operator",
        category=Category.COMPUTE,
        level=1,
        ops=("npu_ring_attention_update",),
        applies=lambda args, world: world.cp > 1,
        constraints=(
            Check(
                lambda args, world: world.cp > 1,
                "the context-parallel size is {world.cp}, so attention has one block and nothing to merge",
                fix=(GiveField("cp", 2, "with a context-parallel algorithm that merges blocks"), RemoveFeature()),
            ),
        ),
        numerics=Numerics.reordered(reason="the weights of both sides are computed in another order"),
        verify_with=VerifyWith(features=("ring-attention",), world={"cp": 2}),
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Replace(
                "mindspeed.context_parallel.blocks:merge",
                "mindspeed.features.ring_attention_update.layers:merge",
                reason="each block of keys is merged into what was seen before",
            )
        ]
