"""Ulysses attention in Megatron."""

from __future__ import annotations

from typing import Any, Literal

from mindspeed.context_parallel.costs import cost_of_ulysses
from mindspeed.context_parallel.patches import NO_DATALOADER_MASK, NO_PREDICTION, any_length, packed_in, sliced_by
from mindspeed.context_parallel.rules import interval_checks
from mindspeed.plugins import (
    ArgOverride,
    Capability,
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    MegatronFlag,
    Numerics,
    Patch,
    Requires,
    Slot,
    hookimpl,
)

_LAYERS = "mindspeed.features.ulysses_attention.layers"
_REASON = "each rank holds one contiguous part of the sequence, not an early and a late one"


class UlyssesAttentionArgs(FeatureArgs):
    keep: Literal["none", "half", "full"] = Field(
        "none",
        description="what backward keeps as before the all-to-all, and exchanges again: nothing, keys, keys and values",
    )
    interval: int = Field(0, ge=0, description="layers between two that do so; 0: every layer")
    kv_allgather: bool = Field(False, description="gather keys and values of a single key head instead of a copy for each rank")


class UlyssesAttention(Feature[UlyssesAttentionArgs]):
    """All-to-alls give every rank the whole sequence for some of the heads, and give the result back."""

    spec = FeatureSpec(
        name="ulysses-attention",
        summary="Context parallelism by trading tokens for heads before and after attention",
        category=Category.CONTEXT_PARALLEL,
        slots={Slot.CONTEXT_PARALLEL},
        provides={Capability.DOCUMENTS, Capability.POSITION_BIAS},
        cost=cost_of_ulysses,
        constraints=(
            Requires("context-parallel", reason="it owns the group and the per-token loss scaling"),
            NO_PREDICTION,
            Check(
                lambda args, world: world.num_attention_heads % (world.cp * world.tp) == 0,
                "{world.num_attention_heads} attention heads do not divide among cp x tp = {world.cp} x {world.tp} ranks",
                fix="a smaller --cp, or ring-attention, which needs nothing of the heads",
            ),
            Check(
                lambda args, world: world.num_query_groups // world.tp % world.cp != 0,
                "keep {args.keep} saves nothing: the {world.num_query_groups} key heads are a multiple of "
                "cp x tp = {world.cp} x {world.tp} ranks, so none is sent twice",
                fix="--set ulysses-attention.keep=none",
                when=lambda args, world: args.keep != "none" and world.cp > 1,
            ),
            *interval_checks("ulysses-attention"),
            Check(
                lambda args, world: world.num_query_groups <= world.tp,
                "{world.num_query_groups} key heads give each of tp = {world.tp} ranks more than the one that can be gathered",
                fix="--set ulysses-attention.kv_allgather=false, or kv-allgather-cp, which gathers any number",
                when=lambda args, world: args.kv_allgather and world.cp > 1,
            ),
        ),
        megatron_flags=(MegatronFlag("cp_comm_type", switch="on", values=("a2a",), size="cp"),),
        numerics=Numerics.reordered(reason="gradients of weights are sums of shares of the sequence"),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [NO_DATALOADER_MASK] if self.world.cp > 1 else []

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if self.world.cp == 1:
            return spec
        from mindspeed.context_parallel.core_attention import with_core_attention
        from mindspeed.features.ulysses_attention.layers import UlyssesCoreAttention

        return with_core_attention(spec, config, UlyssesCoreAttention, self)

    @hookimpl
    def patches(self) -> list[Patch]:
        if self.world.cp == 1:
            return []
        return [
            *sliced_by(f"{_LAYERS}:share_of_batch", f"{_LAYERS}:share_of_table", _REASON),
            *packed_in(_LAYERS),
            any_length(),
        ]
