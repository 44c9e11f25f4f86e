"""Experts of a MoE layer as one grouped product."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms
from mindspeed.moe.conditions import NO_LATENT_EXPERTS, NO_LINEAR_BIAS, experts_are_grouped
from mindspeed.plugins.shared_conditions import NO_LOW_PRECISION, NO_TRANSFORMER_ENGINE_LAYERS, has_experts

_REMOVE = ms.Fix.remove_feature()


@ms.condition(
    "routing probabilities scale the input of experts, which {feature} supports only with router_topk=1, but router_topk "
    "is {world.router_topk}",
    fix=(ms.Fix.give_field("probabilities_on_input", False), ms.Fix.give_field("router_topk", 1), _REMOVE),
)
def weighed_inputs_have_one_expert(args: ms.FeatureArgs, world: ms.World) -> bool:
    """Check that inputs are weighed by probabilities only where a token has one expert."""
    return not world.is_set("probabilities_on_input") or bool(world.router_topk == 1)


def _layers_may_be_local(args: ms.FeatureArgs, world: ms.World) -> bool:
    """Return whether the job does not use Transformer Engine's layers."""
    return not world.is_set("transformer_engine_layers")


@ms.condition(
    "experts are Transformer Engine's grouped experts, but {feature} needs Megatron's local experts",
    fix=(ms.Fix.give_field("transformer_engine_experts", False), _REMOVE),
    when=_layers_may_be_local,
)
def experts_are_local(args: ms.FeatureArgs, world: ms.World) -> bool:
    """Check that experts are not those of Transformer Engine."""
    return not world.is_set("transformer_engine_experts") or world.is_set("engine_over_local")


class MoeGroupedGemm(ms.Feature[ms.FeatureArgs]):
    """Compute local experts by one grouped matmul.

    All local experts of a layer are computed together, instead of one expert after the other. Works on every platform and
    with every data type.
    """

    spec = ms.FeatureSpec(
        name="moe-grouped-gemm",
        category=ms.Category.MOE,
        level=1,
        slots={ms.Slot.GROUPED_EXPERTS},
        ops=("npu_gmm",),
        constraints=(
            has_experts,
            NO_LINEAR_BIAS,
            NO_LOW_PRECISION,
            NO_LATENT_EXPERTS,
            NO_TRANSFORMER_ENGINE_LAYERS,
            experts_are_local,
            ms.Condition.unset(
                "clamped_activation", "the input of the activation function is clamped, which {feature} does not support"
            ),
            ms.Condition.unset(
                "shifted_gate",
                "an offset is added to the linear part of gated units (glu_linear_offset), which {feature} does not support",
            ),
            weighed_inputs_have_one_expert,
            experts_are_grouped,
            ms.ModelCondition(
                "mindspeed.features.moe_grouped_gemm.layers:foreign_experts",
                "the layer specification uses Megatron's local experts",
                subject="spec",
            ),
        ),
        numerics=ms.Numerics.reordered(reason="a grouped product may sum in a different order than one product per expert"),
        state=ms.CheckpointState(
            "resharded",
            "weights are saved in the same format as without this feature, but optimizer states are not",
            added="refused",
            removed="refused",
        ),
        own_trainer="from mindspeed.nn import MoE",
    )

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.moe_grouped_gemm.layers import with_grouped_experts

        return with_grouped_experts(spec, self.world.is_set("engine_over_local"))
