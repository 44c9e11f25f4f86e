"""The condition that a model has attention that can be offloaded. Light."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms
from mindspeed.job.hybrid_pattern import ATTENTION


@ms.condition(
    "no attention layer can be offloaded: the last one keeps its activations on the device, and the model has no other",
    fix=(ms.RemoveFeature(),),
)
def offloads_attention(args: Any, world: ms.World) -> bool:
    """Check that there is an attention layer besides the last one of the last model chunk."""
    if not world.is_hybrid:
        return bool(world.num_layers > 1)
    last = world.pattern_per_chunk[-1]
    return world.pattern.count(ATTENTION) > any(layer in ATTENTION for layer in last)
