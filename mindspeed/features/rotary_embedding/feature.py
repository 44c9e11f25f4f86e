"""Rotary position embedding as one operator."""

from __future__ import annotations

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    GiveField,
    Numerics,
    Patch,
    RemoveFeature,
    Replace,
    SavedTensor,
    SavedTensors,
    World,
    condition,
    hookimpl,
    resized,
)

_TABLES = "attention: rotary tables"


@condition("the model does not use rotary positions", fix=(GiveField("rotary", True), RemoveFeature()))
def positions_are_rotary(args: FeatureArgs, world: World) -> bool:
    """Check that the positions of the model are rotary."""
    return bool(world.rotary)


class RotaryEmbedding(Feature[FeatureArgs]):
    """Apply rotary embedding by one operator.

    Attention calls ``mindspeed::npu_rotary_position_embedding``. All layers share its sine and cosine tables.
    """

    spec = FeatureSpec(
        name="rotary-embedding",
        category=Category.COMPUTE,
        level=1,
        ops=("npu_rotary_position_embedding",),
        constraints=(positions_are_rotary,),
        numerics=Numerics.reordered(
            reason="the products with cosine and sine and their sum are rounded once, at the end, instead of three times"
        ),
    )

    @hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        """Count one cosine and one sine of each angle, in place of those that each layer makes twice."""
        tables = [SavedTensor(_TABLES, t.bytes // 2, 1, once=True) for t in tensors if t.name == _TABLES]
        return (*resized(tensors, {_TABLES: 0}), *tables[:1])

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [
            ArgOverride(
                "apply_rope_fusion",
                False,
                "makes Megatron call its unfused function, which this feature replaces by an operator",
            )
        ]

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Replace(
                "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
                "mindspeed.features.rotary_embedding.layers:apply_rotary",
                reason="applies rotary embedding to queries and keys by a fused operator, also in packed sequences and "
                "multi-latent attention",
            )
        ]
