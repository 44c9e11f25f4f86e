"""Ulysses attention in Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mindspeed.context_parallel.costs import cost_of_ulysses
from mindspeed.context_parallel.feature import NEEDS_GROUP, AlgorithmFeature
from mindspeed.context_parallel.patches import NO_PREDICTION, any_length, packed_in, sliced_by
from mindspeed.context_parallel.rules import interval_checks
from mindspeed.plugins import (
    Advice,
    Capability,
    Category,
    Check,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    MegatronFlag,
    Numerics,
    Patch,
    Slot,
)

if TYPE_CHECKING:
    from mindspeed.context_parallel.core_attention import CoreAttention

_LAYERS = "mindspeed.features.ulysses_attention.layers"
_REASON = "each rank holds one contiguous part of the sequence, not an early and a late one"


class UlyssesAttentionArgs(FeatureArgs):
    keep: Literal["none", "half", "full"] = Field(
        "none",
        description="what backward keeps as before the all-to-all, and exchanges again: nothing, keys, keys and values",
    )
    interval: int = Field(0, ge=0, description="layers between two that do so; 0: every layer")
    kv_allgather: bool = Field(False, description="gather keys and values of a single key head instead of a copy for each rank")


class UlyssesAttention(AlgorithmFeature[UlyssesAttentionArgs]):
    """All-to-alls give every rank the whole sequence for some of the heads, and give the result back."""

    spec = FeatureSpec(
        name="ulysses-attention",
        summary="Context parallelism by trading tokens for heads before and after attention",
        category=Category.CONTEXT_PARALLEL,
        slots={Slot.CONTEXT_PARALLEL},
        provides={Capability.DOCUMENTS, Capability.POSITION_BIAS},
        cost=cost_of_ulysses,
        constraints=(
            NEEDS_GROUP,
            NO_PREDICTION,
            Check(
                lambda args, world: world.num_attention_heads % (world.cp * world.tp) == 0,
                "{world.num_attention_heads} attention heads do not divide among cp x tp = {world.cp} x {world.tp} ranks",
                fix=(GiveField("cp", note="a smaller one"), Advice("use ring-attention, which needs nothing of the heads")),
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

    def core_attention(self) -> type[CoreAttention]:
        from mindspeed.features.ulysses_attention.layers import UlyssesCoreAttention

        return UlyssesCoreAttention

    def slicing(self) -> list[Patch]:
        return [
            *sliced_by(f"{_LAYERS}:share_of_batch", f"{_LAYERS}:share_of_table", _REASON),
            *packed_in(_LAYERS),
            any_length(),
        ]
