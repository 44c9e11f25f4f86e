"""Linear position bias in Megatron."""

from __future__ import annotations

from typing import Any

from mindspeed.features.alibi.conditions import CONDITIONS, AlibiArgs, needs_operator, needs_scores
from mindspeed.plugins import (
    After,
    ArgOverride,
    Capability,
    Category,
    CheckpointState,
    Conflicts,
    Feature,
    FeatureSpec,
    Numerics,
    Requires,
    RequiresCapability,
    Slot,
    hookimpl,
)


class Alibi(Feature[AlibiArgs]):
    """Add an ALiBi position bias to attention scores.

    ``-slope * |i - j|`` is added to the score of a query at position i and a key at position j, with one slope per head.
    This replaces a position embedding. Works under context parallelism too.
    """

    spec = FeatureSpec(
        name="alibi",
        category=Category.SCENARIO,
        constraints=(
            Requires("flash-attention", reason="the fused operator of flash-attention adds the bias", when=needs_operator),
            Conflicts(
                "flash-attention",
                reason="with alibi.fused=false the bias is added to the scores of Megatron's core attention, which "
                "flash-attention replaces; use --without flash-attention",
                when=needs_scores,
            ),
            RequiresCapability(
                Slot.CONTEXT_PARALLEL,
                Capability.POSITION_BIAS,
                reason="only ring-attention, ulysses-attention, hybrid-attention and kv-allgather-cp have it: they add the "
                "ALiBi bias to attention scores. Without the bias, the model has no position information",
            ),
            After("flash-attention"),
            After(Slot.CONTEXT_PARALLEL),
            *CONDITIONS,
        ),
        numerics=Numerics.reordered(
            reason="attention is computed block by block, so the softmax is summed in a different order"
        ),
        state=CheckpointState(
            "none",
            "weights depend on the kind of position encoding that they were trained with",
            added="refused",
            removed="refused",
            changed="refused",
            settings={"fused": "safe", "fused_type": "convertible"},
        ),
        reference={"fused": False},
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [ArgOverride("position_embedding_type", "none", "the ALiBi bias replaces position embeddings")]

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.alibi.layers import with_position_bias

        return with_position_bias(spec, config, self.args)
