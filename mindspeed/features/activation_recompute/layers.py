"""Megatron's checkpoint of an activation as a region."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed import plugins as ms
from mindspeed.memory.activations import has_own_activation
from mindspeed.memory.model_layers import chosen_layers
from mindspeed.memory.region_checkpoint import RegionCheckpoint


def fused_activations(feature: ms.Feature[Any], chunks: Sequence[Any]) -> Iterator[str]:
    """Yield a sentence for each layer, but those with experts, whose activation is a part of another function."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for layer in chosen_layers(chunks, getattr(feature.args, "num_layers", None), "mlp"):
        if not isinstance(layer.mlp, MoELayer) and not has_own_activation(layer):
            yield f"the activation of layer {layer.layer_number} ({type(layer.mlp).__name__}) is fused into another function"


class RecomputedActivation(RegionCheckpoint):
    """Mixin of ``CheckpointWithoutOutput``: grouped experts keep the graph of the first forward pass."""
