"""Activation functions of MLPs that are recomputed in the backward pass."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms
from mindspeed.memory.conditions import LOCAL_LAYERS, NO_SHARED_EXPERT_OVERLAP, PARTS_OF_LAYERS, chunks_have_num_layers
from mindspeed.memory.feature import ACTIVATIONS, LayersArgs, PartRecompute

_LAYERS = "mindspeed.features.activation_recompute.layers"


@ms.condition(
    "recompute_modules contains mlp, which already recomputes the activation function",
    fix=(ms.Fix.give_field("recompute_modules", note="N = your list of modules, without mlp"), ms.Fix.remove_feature()),
)
def mlp_is_not_recomputed(args: Any, world: ms.World) -> bool:
    """Check that selective recomputation does not take the whole MLP."""
    return not (world.recompute_granularity == "selective" and "mlp" in world.recompute_modules)


class ActivationRecomputeArgs(LayersArgs):
    part = "mlp"


class ActivationRecompute(PartRecompute[ActivationRecomputeArgs]):
    """Recompute activation functions in backward.

    The input of an MLP's second linear layer is freed in forward, and recomputed from the output of the first one.
    """

    spec = ms.FeatureSpec(
        name="activation-recompute",
        category=ms.Category.MEMORY,
        constraints=(
            *PARTS_OF_LAYERS,
            chunks_have_num_layers,
            mlp_is_not_recomputed,
            NO_SHARED_EXPERT_OVERLAP,
            ms.ModelCondition(
                "mindspeed.features.activation_recompute.layers:fused_activations",
                "the activation function of every layer is a separate call that can be recomputed",
                fix=LOCAL_LAYERS,
            ),
            ms.After(ms.Slot.MOE_DISPATCHER),
        ),
        numerics=ms.Numerics.exact(),
    )
    recomputed_tensors = ACTIVATIONS

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Wrap(
                "megatron.core.transformer.mlp:MLP.forward",
                "mindspeed.memory.activations:with_region",
                reason="recomputes in backward the output of the activation function between the two linear layers of an MLP",
            ),
            ms.Mixin(
                "megatron.core.tensor_parallel.random:CheckpointWithoutOutput",
                f"{_LAYERS}:RecomputedActivation",
                reason="reuses the autograd graph of the forward pass when activations of grouped experts are recomputed, so "
                "gradients are bitwise equal to those without recomputation. Megatron's class builds a second graph in "
                "backward, which may sum gradients in a different order",
            ),
        ]

    def recompute(self, layer: Any) -> None:
        from mindspeed.memory.activations import recompute_activations

        recompute_activations(layer, self.spec.name)
