"""Rotary position embedding as one operator."""

from __future__ import annotations

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Numerics,
    Patch,
    Replace,
    SavedTensor,
    SavedTensors,
    World,
    hookimpl,
    resized,
)

_TABLES = "attention: rotary tables"


def _is_rotary(args: FeatureArgs, world: World) -> bool:
    return bool(world.rotary)


def _saved(args: FeatureArgs, world: World, tensors: SavedTensors) -> SavedTensors:
    """Count one cosine and one sine of each angle, in place of those that each layer makes twice."""
    tables = [SavedTensor(_TABLES, t.bytes // 2, 1, once=True) for t in tensors if t.name == _TABLES]
    return (*resized(tensors, {_TABLES: 0}), *tables[:1])


class RotaryEmbedding(Feature[FeatureArgs]):
    """Queries and keys call the operator ``mindspeed::npu_rotary_position_embedding``; layers share its tables."""

    spec = FeatureSpec(
        name="rotary-embedding",
        summary="Rotary position embedding as one operator whose tables all layers share",
        category=Category.COMPUTE,
        level=1,
        ops=("npu_rotary_position_embedding",),
        applies=_is_rotary,
        constraints=(
            Check(
                _is_rotary,
                "the positions of the model are not rotary",
                fix="--rotary (Megatron-LM: --position-embedding-type rope), or remove rotary-embedding",
            ),
        ),
        numerics=Numerics.reordered(reason="both products and their sum are rounded once instead of three times"),
        saved=_saved,
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [ArgOverride("apply_rope_fusion", False, "Megatron then calls the function that the operator stands in for")]

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Replace(
                "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
                "mindspeed.features.rotary_embedding.layers:apply_rotary",
                reason="the rotary embedding of queries and keys, also of packed sequences and of latent attention",
            )
        ]
