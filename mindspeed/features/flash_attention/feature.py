"""Core attention without the score matrix."""

from __future__ import annotations

from typing import Any, Literal

from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Field, Numerics, hookimpl, resized


class FlashAttentionArgs(FeatureArgs):
    sparse_mode: Literal[0, 1, 2, 3, 4, 7, 8] | None = Field(
        None,
        description="which keys a query sees: 0 what the mask and the window let it, 1 what the mask lets it, 2 and 3 those "
        "before it, 4 those in the window, 7 and 8 packed sequences with one window; if not given, what mask and layer say",
    )
    pre_tokens: int = Field(65536, description="keys before a query that the window of modes 0, 4, 7 and 8 has")
    next_tokens: int = Field(0, description="keys after a query that the window of modes 0, 4, 7 and 8 has")


def _saved(args: Any, world: Any, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Queries, keys and values without copies for each group, and two numbers of each row of scores."""
    tokens, heads = world.seq_length * world.micro_batch_size // world.cp, world.num_attention_heads
    width = world.hidden_size // heads * (heads + 2 * world.num_query_groups) // world.tp
    sizes = {
        "attention: queries, keys, values": tokens * width * (4 if world.dtype == "fp32" else 2),
        "attention: softmax": 8 * heads // world.tp * tokens,
    }
    return resized(tensors, sizes | {"attention: softmax dropout": 0, "attention: score buffer": 0})


class FlashAttention(Feature[FlashAttentionArgs]):
    """Core attention calls the operator ``mindspeed::fusion_attention``, and no scores, mask or dropout of S x S are kept.

    Under context parallelism the core attention belongs to the algorithm, which calls the same operator for its blocks.
    """

    spec = FeatureSpec(
        name="flash-attention",
        summary="Attention without the score matrix, with every sparse mode",
        category=Category.COMPUTE,
        level=1,
        ops=("fusion_attention",),
        applies=lambda args, world: world.cp == 1,
        numerics=Numerics.reordered(
            reason="the softmax is summed block by block; with attention dropout other elements are dropped"
        ),
        saved=_saved,
    )

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if self.world.cp > 1:
            return spec
        from mindspeed.features.flash_attention.layers import misfits, with_flash_attention

        if wrong := misfits(config):
            self.decline(f"{' and '.join(wrong)} in a model that is being built")
            return spec
        return with_flash_attention(spec, self.args)
