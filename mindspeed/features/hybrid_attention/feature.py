"""Hybrid attention in Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.plugins import (
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    Numerics,
    Patch,
    Replace,
    Requires,
    Slot,
    hookimpl,
)

_LAYERS = "mindspeed.features.hybrid_attention.layers"
_REASON = "what a rank of the ring holds is spread over the neighbours that trade heads"


class HybridAttentionArgs(FeatureArgs):
    ulysses_degree: int = Field(2, ge=2, description="neighbouring ranks that trade tokens for heads")
    window: int = Field(1, ge=1, description="ranks of an inner ring among those of the ring; 1 is a single ring")


class HybridAttention(Feature[HybridAttentionArgs]):
    """Near ranks trade tokens for heads, far ones pass blocks of keys and values around a ring."""

    spec = FeatureSpec(
        name="hybrid-attention",
        summary="Context parallelism by heads among near ranks and by a ring among far ones",
        category=Category.CONTEXT_PARALLEL,
        slots={Slot.CONTEXT_PARALLEL},
        constraints=(
            Requires("context-parallel", reason="it owns the group and the rule of the loss"),
            Check(
                lambda args, world: world.cp % args.ulysses_degree == 0 and world.cp > args.ulysses_degree,
                "{args.ulysses_degree} neighbours and a ring of two or more do not make {world.cp} context-parallel ranks",
                fix="a --cp that is two or more times {args.ulysses_degree}, or ulysses-attention or ring-attention alone",
            ),
            Check(
                lambda args, world: world.num_attention_heads % (args.ulysses_degree * world.tp) == 0,
                "{world.num_attention_heads} attention heads do not divide among "
                "{args.ulysses_degree} x tp = {args.ulysses_degree} x {world.tp} ranks",
                fix="a smaller --set hybrid-attention.ulysses_degree",
            ),
            Check(
                lambda args, world: world.seq_length % (2 * world.cp) == 0,
                "sequence length {world.seq_length} is not a multiple of 2 x cp = 2 x {world.cp}",
                fix="use a --seq-length that is a multiple of 2 x {world.cp}",
            ),
            Check(
                lambda args, world: world.cp % (args.ulysses_degree * args.window) == 0,
                "window {args.window} does not divide the ring of {world.cp} / {args.ulysses_degree} ranks",
                fix="--set hybrid-attention.window=1",
            ),
        ),
        numerics=Numerics.reordered(reason="the softmax is summed block by block"),
    )

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Callable[[str], Any]) -> None:
        from mindspeed.features.hybrid_attention.layers import make_groups

        make_groups(get_group("cp"), self.args.ulysses_degree)

    @hookimpl
    def groups_destroyed(self) -> None:
        from mindspeed.features.hybrid_attention.layers import forget_groups

        forget_groups()

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.hybrid_attention.layers import with_hybrid_attention

        return with_hybrid_attention(spec, config, self.args)

    @hookimpl
    def patches(self) -> list[Patch]:
        embeddings = "megatron.core.models.common.embeddings"
        return [
            Replace("megatron.core.utils:get_batch_on_this_cp_rank", f"{_LAYERS}:share_of_batch", _REASON, optional=True),
            Replace(
                f"{embeddings}.rope_utils:get_pos_emb_on_this_cp_rank",
                f"{_LAYERS}:share_of_table",
                _REASON,
                optional=True,
                clears=(f"{embeddings}.rotary_pos_embedding:RotaryEmbedding.forward",),
            ),
        ]
