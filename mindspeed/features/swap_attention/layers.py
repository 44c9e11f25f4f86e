"""The MLPs that are recomputed while attention is offloaded: by Megatron's own checkpoints around them."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer

from mindspeed.memory.model_layers import chosen_layers


def recompute_mlps(chunk: Any, count: int) -> None:
    """Let the first ``count`` layers of a model chunk recompute their MLP, or their layer of experts, in backward."""
    for layer in chosen_layers([chunk], count, "mlp"):
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.moe_layer_recompute = True
        else:
            layer.recompute_mlp = True
