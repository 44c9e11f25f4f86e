"""Activation functions of MLPs that are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mindspeed import plugins as ms
from mindspeed.memory.conditions import LOCAL_LAYERS, PARTS_OF_LAYERS, chunks_have_num_layers
from mindspeed.memory.feature import ACTIVATIONS, LayersArgs, PartRecompute

_LAYERS = "mindspeed.features.activation_recompute.layers"


@ms.condition(
    "recompute_modules contains mlp, which already recomputes the activation function",
    fix=(ms.Fix.give_field("recompute_modules", note="N = your list of modules, without mlp"), ms.Fix.remove_feature()),
)
def mlp_is_not_recomputed(args: Any, world: ms.World) -> bool:
    """Check that selective recomputation does not take the whole MLP."""
    return not (world.recompute_granularity == "selective" and "mlp" in world.recompute_modules)


def _has_grouped_experts(args: Any, world: ms.World) -> bool:
    """Return whether a product of all experts of a rank computes their activation."""
    return world.is_set("num_experts") and world.is_set("grouped_experts")


def _recomputes_shared_experts(world: ms.World) -> bool:
    """Return whether there are shared experts that run as one, and not in steps between transfers."""
    return world.is_set("shared_expert_hidden_size") and not world.is_set("shared_expert_overlap")


@ms.condition(
    "grouped experts compute their activation inside the grouped product, and the model has no other MLP, so {feature} has "
    "nothing to do",
    when=_has_grouped_experts,
    otherwise="idle",
)
def mlps_are_not_all_grouped(args: Any, world: ms.World) -> bool:
    """Check that a model with grouped experts has dense layers or shared experts."""
    has_dense_layers = world.is_set("moe_layers") and world.moe_layers < world.num_layers
    return has_dense_layers or _recomputes_shared_experts(world)


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
            mlps_are_not_all_grouped,
            ms.ModelCondition(
                "mindspeed.features.activation_recompute.layers:fused_activations",
                "the activation function of every layer is a separate call that can be recomputed",
                fix=LOCAL_LAYERS,
            ),
            ms.After(ms.Slot.MOE_DISPATCHER),
        ),
        numerics=ms.Numerics.exact(),
        own_trainer="from mindspeed.parallel import Region",
    )

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        if _has_grouped_experts(self.args, self.world) and mlps_are_not_all_grouped.holds(self.args, self.world):
            yield "grouped experts keep their activation; only dense layers and shared experts recompute it"

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

    def recomputed_tensors(self) -> Sequence[str]:
        owners = ["mlp"]
        owners += ["shared experts"] if _recomputes_shared_experts(self.world) else []
        owners += [] if _has_grouped_experts(self.args, self.world) else ["experts"]
        return [name for owner in owners for name in ACTIVATIONS[owner]]

    def recompute(self, layer: Any) -> None:
        from mindspeed.memory.activations import recompute_activations

        recompute_activations(layer, self.spec.name)
