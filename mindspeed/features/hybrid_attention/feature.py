"""Hybrid attention in Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mindspeed.context_parallel.costs import cost_of_hybrid
from mindspeed.context_parallel.feature import NEEDS_GROUP, TwoLevelFeature
from mindspeed.context_parallel.patches import NO_PREDICTION, packed_in, sliced_by
from mindspeed.context_parallel.rules import TWO_PIECES, interval_checks
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
    VerifyWith,
    World,
)

if TYPE_CHECKING:
    from mindspeed.context_parallel.core_attention import CoreAttention

_LAYERS = "mindspeed.features.hybrid_attention.layers"
_REASON = "the share of a rank of the ring is spread over the ranks of a head all-to-all"


class HybridAttentionArgs(FeatureArgs):
    ulysses_degree: int | None = Field(
        None, ge=2, description="neighbouring ranks that exchange tokens for heads, at best those of a node"
    )
    window: int = Field(1, ge=1, description="ranks of an inner ring among those of the ring; 1 is a single ring")
    keep: Literal["none", "half", "full"] = Field(
        "none", description="blocks of the ring kept for backward instead of sent again: none, their keys, keys and values"
    )
    interval: int = Field(0, ge=0, description="layers between two that keep blocks; 0: every layer")


def _is_hybrid(args: HybridAttentionArgs, world: World) -> bool:
    return args.ulysses_degree is not None and world.cp > 1


class HybridAttention(TwoLevelFeature[HybridAttentionArgs]):
    """Exchange tokens for heads among near ranks, and pass blocks of keys and values around a ring of far ones."""

    spec = FeatureSpec(
        name="hybrid-attention",
        summary="Context parallelism by heads among near ranks and by a ring among far ones",
        category=Category.CONTEXT_PARALLEL,
        slots={Slot.CONTEXT_PARALLEL},
        provides={Capability.DOCUMENTS, Capability.POSITION_BIAS},
        cost=lambda args, world: cost_of_hybrid(args.ulysses_degree, world),
        constraints=(
            NEEDS_GROUP,
            NO_PREDICTION,
            Check(
                lambda args, world: args.ulysses_degree is not None,
                "ulysses_degree, the number of ranks that exchange tokens for heads, is not set",
                fix="--set hybrid-attention.ulysses_degree=2, or more, at best the ranks of a node",
                when=lambda args, world: world.cp > 1,
            ),
            Check(
                lambda args, world: world.cp % args.ulysses_degree == 0 and world.cp > args.ulysses_degree,
                "{args.ulysses_degree} neighbours and a ring of two or more do not make {world.cp} context-parallel ranks",
                fix=(
                    GiveField("cp", note="two or more times {args.ulysses_degree}"),
                    Advice("use ulysses-attention or ring-attention alone"),
                ),
                when=_is_hybrid,
            ),
            Check(
                lambda args, world: world.num_attention_heads % (args.ulysses_degree * world.tp) == 0,
                "{world.num_attention_heads} attention heads do not divide among "
                "{args.ulysses_degree} x tp = {args.ulysses_degree} x {world.tp} ranks",
                fix="a smaller --set hybrid-attention.ulysses_degree",
                when=_is_hybrid,
            ),
            TWO_PIECES,
            Check(
                lambda args, world: world.cp % (degree := args.ulysses_degree * args.window) == 0 and degree < world.cp,
                "window {args.window} is not a part of the ring of {world.cp} / {args.ulysses_degree} ranks",
                fix="--set hybrid-attention.window=1, or another divisor of the ring that is smaller than it",
                when=lambda args, world: _is_hybrid(args, world) and args.window > 1,
            ),
            *interval_checks("hybrid-attention"),
        ),
        megatron_flags=(
            MegatronFlag("cp_comm_type", switch="on", values=("a2a+p2p",), size="cp"),
            MegatronFlag("hierarchical_context_parallel_sizes", "ulysses_degree", convert=lambda sizes: sizes[0]),
        ),
        numerics=Numerics.reordered(reason="the softmax is summed block by block"),
        verify_with=VerifyWith(settings={"hybrid-attention": {"ulysses_degree": 2}}, world={"cp": 4}),
    )

    def core_attention(self) -> type[CoreAttention]:
        from mindspeed.features.hybrid_attention.layers import HybridCoreAttention

        return HybridCoreAttention

    def slicing(self) -> list[Patch]:
        return [*sliced_by(f"{_LAYERS}:share_of_batch", f"{_LAYERS}:share_of_table", _REASON), *packed_in(_LAYERS)]
