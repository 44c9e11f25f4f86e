"""Activation functions of MLPs that are recomputed in the backward pass."""

from __future__ import annotations

from typing import Any

from mindspeed.memory.feature import ACTIVATIONS, PartRecompute, has_layers
from mindspeed.plugins import After, Category, FeatureSpec, Mixin, Numerics, Patch, Slot, Wrap, hookimpl, leave

_LAYERS = "mindspeed.features.activation_recompute.layers"


class ActivationRecompute(PartRecompute):
    """Free the input of an MLP's second linear layer, and refill it from the output of the first in the backward pass."""

    spec = FeatureSpec(
        name="activation-recompute",
        summary="Outputs of activation functions recomputed in the backward pass instead of kept",
        category=Category.MEMORY,
        constraints=(has_layers("activation-recompute"), After(Slot.MOE_DISPATCHER)),
        numerics=Numerics.exact(),
        saved=lambda args, world, tensors: leave(tensors, ACTIVATIONS, "recomputed", "activation-recompute", args.num_layers),
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Wrap(
                "megatron.core.transformer.mlp:MLP.forward",
                "mindspeed.memory.activations:with_region",
                reason="the activation between the two linear layers is a region",
            ),
            Mixin(
                "megatron.core.tensor_parallel.random:CheckpointWithoutOutput",
                f"{_LAYERS}:RecomputedActivation",
                reason="Megatron's own calls in grouped experts keep the graph of the first forward pass",
            ),
        ]

    def refusals(self, config: Any) -> list[str]:
        wrong = super().refusals(config)
        if config.recompute_granularity == "selective" and "mlp" in (config.recompute_modules or ()):
            wrong.append("recompute.modules has mlp, whose activation is recomputed already")
        if config.moe_shared_expert_overlap:
            wrong.append("moe_shared_expert_overlap runs shared experts in parts")
        return wrong

    def recompute(self, layer: Any) -> str | None:
        from mindspeed.memory.activations import recompute_activations

        if recompute_activations(layer, self.spec.name):
            return None
        return f"the activation of layer {layer.layer_number} ({type(layer.mlp).__name__}) is part of another function"
