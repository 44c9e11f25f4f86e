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

    Scores get ``-slope * |query - key|``, with a slope for each head, in place of a position embedding, also under
    context parallelism.
    """

    spec = FeatureSpec(
        name="alibi",
        category=Category.SCENARIO,
        constraints=(
            Requires("flash-attention", reason="its operator takes the bias", when=needs_operator),
            Conflicts(
                "flash-attention",
                reason="with alibi.fused=false Megatron's own core attention has the scores; --without flash-attention",
                when=needs_scores,
            ),
            RequiresCapability(Slot.CONTEXT_PARALLEL, Capability.POSITION_BIAS, reason="the model has no other positions"),
            After("flash-attention"),
            After(Slot.CONTEXT_PARALLEL),
            *CONDITIONS,
        ),
        numerics=Numerics.reordered(reason="the bias is added block by block, in the operator"),
        state=CheckpointState(
            "none",
            "weights fit the positions that they were trained with",
            added="refused",
            removed="refused",
            changed="refused",
            settings={"fused": "safe", "fused_type": "convertible"},
        ),
        reference={"fused": False},
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [ArgOverride("position_embedding_type", "none", "the bias says where a token is")]

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.alibi.layers import with_position_bias

        return with_position_bias(spec, config, self.args)
