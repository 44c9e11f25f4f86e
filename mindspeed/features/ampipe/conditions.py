"""Settings and conditions of layers that run in chunks of the sequence. Light."""

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

_REMOVE: Final = ms.RemoveFeature()


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
    "seq_length={world.seq_length} is not divisible by parts x tp = {args.parts} x {world.tp}, so chunks would have different "
    "lengths",
    fix=(ms.GiveSetting("parts", note="a divisor of {world.seq_length} / {world.tp}"),),
)
def parts_divide_sequence(args: AmpipeArgs, world: ms.World) -> bool:
    """Check that chunks are of equal size on every tensor-parallel rank."""
    return bool(world.seq_length % (args.parts * world.tp) == 0)


@ms.condition(
    "deepspeed-moe.groups={other.groups} is not a multiple of ampipe.parts x tp = {args.parts} x {world.tp}. A group of "
    "tokens that shares an expert capacity would span several chunks of the sequence or several ranks",
    fix=(ms.GiveSetting("deepspeed-moe.groups", note="a multiple of {args.parts} x {world.tp}"),),
    of="deepspeed-moe",
)
def parts_divide_groups(args: AmpipeArgs, world: ms.World, other: Any) -> bool:
    """Check that every chunk on every tensor-parallel rank has separate groups."""
    return bool((other.groups or 1) % (args.parts * world.tp) == 0)


@ms.condition(
    "selective recomputation expects modules that run once per layer, but {feature} runs them once per chunk",
    fix=(ms.GiveSetting("recompute.granularity", "full"), _REMOVE),
)
def modules_are_kept(args: AmpipeArgs, world: ms.World) -> bool:
    """Check that Megatron does not recompute modules of a layer."""
    return world.recompute_granularity != "selective"


@ms.condition(
    "overlap=true overlaps transfers between tensor-parallel ranks, but tensor parallelism is off (tp={world.tp})",
    fix=(ms.GiveField("tp", 2, or_more=True), ms.DropSetting("overlap")),
    when=overlaps,
)
def tensor_ranks_share_experts(args: AmpipeArgs, world: ms.World) -> bool:
    """Check that there are several tensor-parallel ranks."""
    return world.tp > 1


@ms.condition(
    "context parallelism splits keys over ranks (cp={world.cp}), but {feature} needs all keys on each rank",
    fix=(ms.GiveField("cp", 1), _REMOVE),
)
def ranks_have_all_keys(args: AmpipeArgs, world: ms.World) -> bool:
    """Check that context parallelism is off."""
    return world.cp == 1


@ms.condition(
    "the router balances experts by sinkhorn over all tokens, but {feature} routes tokens chunk by chunk",
    fix=(ms.GiveField("router_balancing", "aux_loss"), _REMOVE),
)
def routing_is_by_token(args: AmpipeArgs, world: ms.World) -> bool:
    """Check that the router does not balance all tokens together."""
    return "sinkhorn" not in world.router_balancing


CONDITIONS: Final[tuple[ms.Condition, ...]] = (
    has_experts,
    experts_are_spread,
    parts_divide_sequence,
    parts_divide_groups,
    modules_are_kept,
    tensor_ranks_share_experts,
    ranks_have_all_keys,
    routing_is_by_token,
    ms.unset("multi_latent_attention", "attention is multi-latent, which {feature} does not support"),
    ms.unset("windowed_attention", "attention has a sliding window, but {feature} supports only causal and full attention"),
    ms.unset("gated_attention", "the attention output is gated, which {feature} does not support"),
    ms.unset(
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
