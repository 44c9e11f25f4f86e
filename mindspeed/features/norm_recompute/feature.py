"""Norms whose outputs and saved tensors are recomputed in the backward pass."""

from __future__ import annotations

from typing import Any

from mindspeed.memory.feature import NORMS, PartRecompute, has_layers
from mindspeed.plugins import Category, FeatureSpec, Mixin, Numerics, Patch, hookimpl, leave

_LAYERS = "mindspeed.features.norm_recompute.layers"


class NormRecompute(PartRecompute):
    """Free what the two norms of a layer save and return, and refill it from the norm's input when backward gets there."""

    spec = FeatureSpec(
        name="norm-recompute",
        summary="Outputs of norms recomputed in the backward pass instead of kept",
        category=Category.MEMORY,
        constraints=(has_layers("norm-recompute"),),
        numerics=Numerics.exact(),
        saved=lambda args, world, tensors: leave(tensors, NORMS, "recomputed", "norm-recompute", args.num_layers),
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Mixin(
                "megatron.core.tensor_parallel.random:CheckpointWithoutOutput",
                f"{_LAYERS}:RecomputedNorm",
                reason="Megatron's own calls around a norm keep the graph of the first forward pass",
            )
        ]

    def recompute(self, layer: Any) -> str | None:
        from mindspeed.memory.norms import recompute_norms

        if recompute_norms(layer, self.spec.name):
            return None
        return f"layer {layer.layer_number} has a norm inside a fused linear layer"
