"""Attention and experts pipelined over chunks of the sequence."""

from __future__ import annotations

from typing import Any, Final

from mindspeed import plugins as ms
from mindspeed.moe.conditions import DISPATCHER_CONDITIONS, NO_FORCED_BALANCING, experts_are_spread
from mindspeed.plugins.shared_conditions import (
    NO_CPU_OFFLOADING,
    NO_FINE_GRAINED_OFFLOADING,
    NO_TRANSFORMER_ENGINE_LAYERS,
    has_experts,
)

_REMOVE: Final = ms.Fix.remove_feature()


class AmpipeArgs(ms.FeatureArgs):
    parts: int = ms.Field(
        2,
        ge=2,
        description="Number of chunks of a sequence. Attention of one chunk overlaps with the all-to-all of the chunk "
        "before. More chunks = more overlap, but smaller operations",
    )
    overlap: bool = ms.Field(
        False,
        description="Also overlap the collectives of tensor-parallel ranks that share an expert (true), or only the "
        "all-to-alls (false)",
    )


def overlaps(args: AmpipeArgs, world: ms.World) -> bool:
    """Return whether transfers of tensor-parallel ranks are overlapped too."""
    return args.overlap


@ms.condition(
    "the number of groups in deepspeed-moe (its setting groups) is not a multiple of ampipe.parts x tp = {args.parts} x "
    "{world.tp}. A group of tokens that shares an expert capacity would span several chunks of the sequence or several ranks",
    fix=(ms.Fix.give_setting("deepspeed-moe.groups", note="a multiple of {args.parts} x {world.tp}"),),
    of="deepspeed-moe",
)
def parts_divide_groups(args: AmpipeArgs, world: ms.World, other: Any) -> bool:
    """Check that every chunk on every tensor-parallel rank has separate groups."""
    return bool((other.groups or 1) % (args.parts * world.tp) == 0)


@ms.condition(
    "selective recomputation expects modules that run once per layer, but {feature} runs them once per chunk",
    fix=(ms.Fix.give_setting("recompute.granularity", "full"), _REMOVE),
)
def modules_are_kept(args: AmpipeArgs, world: ms.World) -> bool:
    """Check that Megatron does not recompute modules of a layer."""
    return world.recompute_granularity != "selective"


@ms.condition(
    "the router balances experts by sinkhorn over all tokens, but {feature} routes tokens chunk by chunk",
    fix=(ms.Fix.give_field("router_balancing", "aux_loss"), _REMOVE),
)
def routing_is_by_token(args: AmpipeArgs, world: ms.World) -> bool:
    """Check that the router does not balance all tokens together."""
    return "sinkhorn" not in world.router_balancing


CONDITIONS: Final[tuple[ms.Condition, ...]] = (
    has_experts,
    experts_are_spread,
    ms.Condition.divides(
        "seq_length",
        ("args.parts", "tp"),
        "seq_length={world.seq_length} is not divisible by parts x tp = {args.parts} x {world.tp}, so chunks would "
        "have different lengths",
        fix=(ms.Fix.give_setting("parts", note="a divisor of {world.seq_length} / {world.tp}"),),
    ),
    parts_divide_groups,
    modules_are_kept,
    ms.Condition.at_least(
        "tp",
        2,
        "overlap=true overlaps transfers between tensor-parallel ranks, but tensor parallelism is off (tp={world.tp})",
        fix=(ms.Fix.give_field("tp", 2, or_more=True), ms.Fix.drop_setting("overlap")),
        when=overlaps,
    ),
    ms.Condition.equals(
        "cp", 1, "context parallelism splits keys over ranks (cp={world.cp}), but {feature} needs all keys on each rank"
    ),
    routing_is_by_token,
    ms.Condition.unset("multi_latent_attention", "attention is multi-latent, which {feature} does not support"),
    ms.Condition.unset(
        "windowed_attention", "attention has a sliding window, but {feature} supports only causal and full attention"
    ),
    ms.Condition.unset("gated_attention", "the attention output is gated, which {feature} does not support"),
    ms.Condition.unset(
        "expert_capacity_factor",
        "Megatron limits the tokens per expert (expert_capacity_factor={world.expert_capacity_factor}), which {feature} "
        "does not support",
    ),
    NO_FORCED_BALANCING,
    *DISPATCHER_CONDITIONS,
    NO_CPU_OFFLOADING,
    NO_FINE_GRAINED_OFFLOADING,
    NO_TRANSFORMER_ENGINE_LAYERS,
)


_MASKS = "ampipe computes only causal or full attention, but that feature passes a mask or document ends to attention"
_MODULES = "ampipe calls layers once per sequence chunk, but that feature expects one call per micro-batch"
_EXPERTS = "ampipe sends tokens to experts chunk by chunk, but that feature handles the tokens of a whole micro-batch"


class Ampipe(ms.Feature[AmpipeArgs]):
    """Overlap attention with expert all-to-alls.

    Sequences are split into chunks. While the tokens of one chunk are sent to their experts, attention of the next
    chunk is computed. Backward does the same in reverse order.
    """

    spec = ms.FeatureSpec(
        name="ampipe",
        category=ms.Category.DEEPSPEED_MOE,
        megatron=">=0.14,<0.17",
        constraints=(
            ms.RequiresAny(
                "deepspeed-moe",
                "moe-alltoall-overlap",
                reason="ampipe overlaps attention with all-to-alls that run in the background, and only these features start "
                "such all-to-alls",
            ),
            *CONDITIONS,
            ms.Conflicts(
                "moe-alltoall-overlap",
                reason="ampipe.overlap=true overlaps the tensor-parallel transfers of experts, which moe-alltoall-overlap also "
                "does (with ampipe.overlap=false both work together)",
                when=overlaps,
            ),
            ms.Conflicts(
                ms.Slot.PIPELINE_SCHEDULE,
                reason="features with a pipeline schedule defer weight gradients, but ampipe computes them chunk by chunk in "
                "backward",
            ),
            ms.Conflicts(
                ms.Slot.LINEAR,
                reason="features that replace linear layers (coc, mc2, tensor-parallel-2d and others) also replace the linear "
                "layer after attention, which ampipe computes chunk by chunk",
            ),
            *(ms.Conflicts(name, reason=_MASKS) for name in ("eod-reset", "shared-attention-mask")),
            *(
                ms.Conflicts(name, reason=_MODULES)
                for name in ("norm-recompute", "activation-recompute", "swap-attention", "adaptive-recompute")
            ),
            *(ms.Conflicts(name, reason=_EXPERTS) for name in ("moe-zero-memory", "moe-adaptive-recompute", "moe-load-report")),
            ms.ModelCondition(
                "mindspeed.features.ampipe.layers:unfit_layers",
                "layers have local core attention, no cross-attention, and experts with asynchronous transfers",
            ),
        ),
        numerics=ms.Numerics.reordered(
            reason="the sequence is processed in chunks, so gradients of weights, keys and values are sums over chunks. "
            "Dropout and gate noise draw other random numbers than without chunks"
        ),
        verify_with=ms.VerifyWith(
            algorithm=("mindspeed.features.ampipe.attention",),
            features=("deepspeed-moe",),
            settings={"deepspeed-moe": {"groups": 4}},
            world={"ep": 2},
        ),
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        reason = "Megatron's fused softmax needs equal numbers of queries and keys, but queries come in chunks"
        return [ms.ArgOverride("masked_softmax_fusion", False, reason)]

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.ampipe.layers import with_chunks

        return with_chunks(spec, self.args.parts, self.args.overlap)
