"""The layer with a capacity, told to compute its experts in units."""

from __future__ import annotations

from typing import Any

from mindspeed.moe.capacity import CapacityOptions, options_of, with_options
from mindspeed.plugins import World


def with_units(spec: Any, args: Any) -> Any:
    """Copy a spec whose experts are computed in units of one expert and one slice of its places."""
    return with_options(spec, parts=args.parts, streams=args.streams)


def places(spec: Any, config: Any, world: World) -> int | None:
    """The places of an expert for a group in training; None where they follow the load, or the tokens are not known."""
    options: CapacityOptions | None = options_of(spec)
    if options is None or options.dropless or not (world.knows("seq_length") and world.knows("micro_batch_size")):
        return None
    tokens = world.seq_length * world.micro_batch_size // (options.groups or world.tp * world.cp)
    return options.capacity(tokens, config.num_moe_experts, config.moe_router_topk, training=True)
