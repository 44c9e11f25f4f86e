"""The layer with a capacity, whose experts are computed in units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import Module

from mindspeed import plugins as ms
from mindspeed.moe.capacity import CapacityOptions, with_options


def with_units(spec: Any, args: Any) -> Any:
    """Copy a spec whose experts are computed in units of one expert and one slice of its places."""
    return with_options(spec, parts=args.parts, streams=args.streams)


def missing_places(feature: Any, chunks: Sequence[Module]) -> list[str]:
    """Return a sentence where an expert of a model has fewer places in training than slices."""
    modules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
    layers = [module for module in modules if isinstance(getattr(module, "options", None), CapacityOptions)]
    counts = {places(layer.options, layer.config, feature.world) for layer in layers}
    parts = feature.args.parts
    fewer = sorted(count for count in counts if count is not None and count < parts)
    return [f"parts={parts} is greater than the capacity of an expert, {count}" for count in fewer]


def places(options: CapacityOptions, config: Any, world: ms.World) -> int | None:
    """Count the places of an expert for a group in training; None where they follow the load, or tokens are not known."""
    if options.dropless or not (world.knows("seq_length") and world.knows("micro_batch_size")):
        return None
    tokens = world.seq_length * world.micro_batch_size // (options.groups or world.tp * world.cp)
    return options.capacity(tokens, config.num_moe_experts, config.moe_router_topk, training=True)
