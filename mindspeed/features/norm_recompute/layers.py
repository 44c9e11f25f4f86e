"""Megatron's checkpoint of a norm as a region."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed import plugins as ms
from mindspeed.memory.model_layers import chosen_layers
from mindspeed.memory.region_checkpoint import RegionCheckpoint, norms_of


def fused_norms(feature: ms.Feature[Any], chunks: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for each layer with a norm inside a fused linear layer."""
    for layer in chosen_layers(chunks, getattr(feature.args, "num_layers", None)):
        if not norms_of(layer):
            yield f"layer {layer.layer_number} has a norm fused into a linear layer"


class RecomputedNorm(RegionCheckpoint):
    """Mixin of ``CheckpointWithoutOutput``: Megatron's own calls around a norm keep the graph of the first forward pass."""
