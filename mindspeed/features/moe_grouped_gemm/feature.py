"""Experts of a MoE layer as one grouped product."""

from __future__ import annotations

from typing import Any

from mindspeed.moe.conditions import NO_LATENT_EXPERTS, NO_LINEAR_BIAS, experts_are_grouped
from mindspeed.plugins import (
    Category,
    CheckpointState,
    Conflicts,
    Feature,
    FeatureArgs,
    FeatureSpec,
    GiveField,
    ModelCondition,
    Numerics,
    RemoveFeature,
    World,
    condition,
    hookimpl,
    unset,
)
from mindspeed.plugins.shared_conditions import NO_LOW_PRECISION, NO_TRANSFORMER_ENGINE_LAYERS, has_experts

_REMOVE = RemoveFeature()


@condition(
    "probabilities weigh the input of experts, which {feature} supports only with router_topk=1, not {world.router_topk}",
    fix=(GiveField("probabilities_on_input", False), GiveField("router_topk", 1), _REMOVE),
)
def weighed_inputs_have_one_expert(args: FeatureArgs, world: World) -> bool:
    """Check that inputs are weighed by probabilities only where a token has one expert."""
    return not world.is_set("probabilities_on_input") or bool(world.router_topk == 1)


def _layers_may_be_local(args: FeatureArgs, world: World) -> bool:
    """Return whether the layers are not said to be Transformer Engine's, which is refused by itself."""
    return not world.is_set("transformer_engine_layers")


@condition(
    "experts are Transformer Engine's grouped ones, and {feature} works on Megatron's local ones",
    fix=(GiveField("transformer_engine_experts", False), _REMOVE),
    when=_layers_may_be_local,
)
def experts_are_local(args: FeatureArgs, world: World) -> bool:
    """Check that experts are not those of Transformer Engine."""
    return not world.is_set("transformer_engine_experts") or world.is_set("engine_over_local")


class MoeGroupedGemm(Feature[FeatureArgs]):
    """Compute local experts by one grouped product.

    It is available on every platform and in every type.
    """

    spec = FeatureSpec(
        name="moe-grouped-gemm",
        category=Category.MOE,
        level=1,
        ops=("npu_gmm",),
        constraints=(
            has_experts,
            NO_LINEAR_BIAS,
            NO_LOW_PRECISION,
            NO_LATENT_EXPERTS,
            NO_TRANSFORMER_ENGINE_LAYERS,
            experts_are_local,
            unset("clamped_activation", "the input of the activation function is clamped, which {feature} does not support"),
            unset("shifted_gate", "an offset is added to the linear part of gated units, which {feature} does not support"),
            weighed_inputs_have_one_expert,
            Conflicts(
                "activation-recompute",
                reason="grouped experts compute their activation themselves; recompute.modules=[moe_act] recomputes it",
            ),
            experts_are_grouped,
            ModelCondition(
                "mindspeed.features.moe_grouped_gemm.layers:foreign_experts",
                "the layer specification has Megatron's local experts",
                subject="spec",
            ),
        ),
        numerics=Numerics.reordered(reason="a grouped product may sum in another order than a product per expert"),
        state=CheckpointState(
            "resharded",
            "weights of grouped and single experts are the same, the state of their optimizer is not",
            added="refused",
            removed="refused",
        ),
    )

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.moe_grouped_gemm.layers import with_grouped_experts

        return with_grouped_experts(spec, self.world.is_set("engine_over_local"))
