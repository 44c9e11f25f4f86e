"""Rotary position embedding as one operator."""

from __future__ import annotations

from mindspeed import plugins as ms
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors, resized

_TABLES = "attention: rotary tables"


@ms.condition("the model does not use rotary positions", fix=(ms.Fix.give_field("rotary", True), ms.Fix.remove_feature()))
def positions_are_rotary(args: ms.FeatureArgs, world: ms.World) -> bool:
    """Check that the positions of the model are rotary."""
    return bool(world.rotary)


class RotaryEmbedding(ms.Feature[ms.FeatureArgs]):
    """Apply rotary embedding by one operator.

    Attention calls ``mindspeed::npu_rotary_position_embedding``. All layers share its sine and cosine tables.
    """

    spec = ms.FeatureSpec(
        name="rotary-embedding",
        category=ms.Category.COMPUTE,
        level=1,
        ops=("npu_rotary_position_embedding",),
        constraints=(positions_are_rotary,),
        numerics=ms.Numerics.reordered(
            reason="the products with cosine and sine and their sum are rounded once, at the end, instead of three times"
        ),
        own_trainer="from mindspeed.nn import RotaryEmbedding",
    )

    @ms.hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        """Count one cosine and one sine of each angle, in place of those that each layer makes twice."""
        tables = [SavedTensor(_TABLES, t.bytes // 2, 1, once=True) for t in tensors if t.name == _TABLES]
        return (*resized(tensors, {_TABLES: 0}), *tables[:1])

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [
            ms.ArgOverride(
                "apply_rope_fusion",
                False,
                "makes Megatron call its unfused function, which this feature replaces by an operator",
            )
        ]

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Replace(
                "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
                "mindspeed.features.rotary_embedding.layers:apply_rotary",
                reason="applies rotary embedding to queries and keys by a fused operator, also in packed sequences and "
                "multi-latent attention",
            )
        ]
