"""Linear position bias in Megatron."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms
from mindspeed.features.alibi.conditions import CONDITIONS, AlibiArgs, needs_operator, needs_scores


class Alibi(ms.Feature[AlibiArgs]):
    """Add an ALiBi position bias to attention scores.

    ``-slope * |i - j|`` is added to the score of a query at position i and a key at position j, with one slope per head.
    This replaces a position embedding. Works under context parallelism too.
    """

    spec = ms.FeatureSpec(
        name="alibi",
        category=ms.Category.SCENARIO,
        constraints=(
            ms.Requires("flash-attention", reason="the fused operator of flash-attention adds the bias", when=needs_operator),
            ms.Conflicts(
                "flash-attention",
                reason="with alibi.fused=false the bias is added to the scores of Megatron's core attention, which "
                "flash-attention replaces; use --without flash-attention",
                when=needs_scores,
            ),
            ms.RequiresCapability(
                ms.Slot.CONTEXT_PARALLEL,
                ms.Capability.POSITION_BIAS,
                reason="only ring-attention, ulysses-attention, hybrid-attention and kv-allgather-cp have it: they add the "
                "ALiBi bias to attention scores. Without the bias, the model has no position information",
            ),
            ms.After("flash-attention"),
            ms.After(ms.Slot.CONTEXT_PARALLEL),
            *CONDITIONS,
        ),
        numerics=ms.Numerics.reordered(
            reason="attention is computed block by block, so the softmax is summed in a different order"
        ),
        state=ms.CheckpointState(
            "none",
            "weights depend on the kind of position encoding that they were trained with",
            added="refused",
            removed="refused",
            changed="refused",
            settings={"fused": "safe", "fused_type": "convertible"},
        ),
        reference={"fused": False},
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [ms.ArgOverride("position_embedding_type", "none", "the ALiBi bias replaces position embeddings")]

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.alibi.layers import with_position_bias

        return with_position_bias(spec, config, self.args)
