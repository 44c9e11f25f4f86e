"""The layers that num_layers counts. Light."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from mindspeed import plugins as ms
from mindspeed.job.hybrid_pattern import EXPERTS


def counted_layers(world: ms.World) -> list[list[int]]:
    """Return the numbers, from 1 on, of the layers of each model chunk; of a hybrid model those with experts."""
    sizes, pattern = world.layers_per_chunk, world.pattern.layers
    chunks = [range(end - size + 1, end + 1) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return [[number for number in chunk if not pattern or pattern[number - 1] in EXPERTS] for chunk in chunks]


def layers_of_stage(args: Any, world: ms.World) -> dict[str, Any]:
    """Return the most layers of a stage that num_layers counts, as a number and in words."""
    chunks = counted_layers(world)
    most = max(sum(map(len, chunks[stage :: world.pp])) for stage in range(world.pp))
    return {"most": most, "layers": f"{most} layers with experts" if world.is_hybrid else f"{most} layers"}
