"""The merge of attention blocks as one operator."""

from __future__ import annotations

from mindspeed import plugins as ms

_ONE_BLOCK = "{} gives each rank all keys of its queries, so attention has only one block and there is nothing to merge"


@ms.condition(_ONE_BLOCK.format("kv-allgather-cp"), fix=(ms.Fix.remove_feature(),), of="kv-allgather-cp", otherwise="idle")
def keys_are_not_gathered(args: ms.FeatureArgs, world: ms.World, other: ms.FeatureArgs) -> bool:
    """Fail wherever kv-allgather-cp is active."""
    return False


@ms.condition(_ONE_BLOCK.format("ulysses-attention"), fix=(ms.Fix.remove_feature(),), of="ulysses-attention", otherwise="idle")
def heads_are_not_exchanged(args: ms.FeatureArgs, world: ms.World, other: ms.FeatureArgs) -> bool:
    """Fail wherever ulysses-attention is active."""
    return False


class RingAttentionUpdate(ms.Feature[ms.FeatureArgs]):
    """Merge attention blocks by one operator.

    Context-parallel attention computes one block of keys after the other. The operator
    ``mindspeed::npu_ring_attention_update`` merges the output of each block into the previous result.
    """

    spec = ms.FeatureSpec(
        name="ring-attention-update",
        category=ms.Category.COMPUTE,
        level=1,
        ops=("npu_ring_attention_update",),
        constraints=(
            ms.Condition.at_least(
                "cp",
                2,
                "cp is {world.cp}, so attention has only one block and there is nothing to merge",
                fix=(
                    ms.Fix.give_field("cp", 2, "together with a context-parallel algorithm that merges blocks"),
                    ms.Fix.remove_feature(),
                ),
            ),
            keys_are_not_gathered,
            heads_are_not_exchanged,
        ),
        numerics=ms.Numerics.reordered(
            reason="the operator and the default merge compute the weights of two merged blocks by different formulas, so "
            "they round differently"
        ),
        verify_with=ms.VerifyWith(features=("ring-attention",), world={"cp": 2}),
        own_trainer="from mindspeed.ops import npu_ring_attention_update",
    )

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Replace(
                "mindspeed.context_parallel.blocks:merge",
                "mindspeed.features.ring_attention_update.layers:merge",
                reason="merges the attention output of each block of keys into the result of the previous blocks by one "
                "fused operator",
            )
        ]
