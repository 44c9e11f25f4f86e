"""Ulysses attention in Megatron."""

from __future__ import annotations

from typing import Any

from mindspeed.features._shared.context_parallel.costs import cost_of_ulysses
from mindspeed.features._shared.context_parallel.patches import NO_PREDICTION, SPARED_MASK, any_length, packed_in, sliced_by
from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Numerics,
    Patch,
    Requires,
    Slot,
    hookimpl,
)

_LAYERS = "mindspeed.features.ulysses_attention.layers"
_REASON = "each rank holds one stretch of the sequence, in order, not an early and a late one"


class UlyssesAttention(Feature[FeatureArgs]):
    """All-to-alls give every rank the whole sequence for some of the heads, and give the result back."""

    spec = FeatureSpec(
        name="ulysses-attention",
        summary="Context parallelism by trading tokens for heads before and after attention",
        category=Category.CONTEXT_PARALLEL,
        slots={Slot.CONTEXT_PARALLEL},
        cost=cost_of_ulysses,
        constraints=(
            Requires("context-parallel", reason="it owns the group and the rule of the loss"),
            NO_PREDICTION,
            Check(
                lambda args, world: world.num_attention_heads % (world.cp * world.tp) == 0,
                "{world.num_attention_heads} attention heads do not divide among cp x tp = {world.cp} x {world.tp} ranks",
                fix="a smaller --cp, or ring-attention, which needs nothing of the heads",
            ),
        ),
        numerics=Numerics.reordered(reason="gradients of weights are sums of shares of the sequence"),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [SPARED_MASK] if self.world.cp > 1 else []

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.ulysses_attention.layers import with_ulysses_attention

        return with_ulysses_attention(spec, config) if self.world.cp > 1 else spec

    @hookimpl
    def patches(self) -> list[Patch]:
        if self.world.cp == 1:
            return []
        return [
            *sliced_by(f"{_LAYERS}:stretch_of_batch", f"{_LAYERS}:stretch_of_table", _REASON),
            *packed_in(_LAYERS),
            any_length(),
        ]
