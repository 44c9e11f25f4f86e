"""SwiGLU as one operator."""

from __future__ import annotations

from typing import Any

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    GiveField,
    MegatronFlag,
    Numerics,
    Patch,
    RemoveFeature,
    Together,
    World,
    Wrap,
    hookimpl,
    resized,
)

_FUSIONS = "megatron.core.fusions.fused_bias_swiglu"
_LAYERS = "mindspeed.features.swiglu.layers"


def _is_swiglu(args: FeatureArgs, world: World) -> bool:
    return bool(world.gated_linear_unit) and world.activation == "silu"


class Swiglu(Feature[FeatureArgs]):
    """MLPs and experts call the operator ``mindspeed::swiglu`` where Megatron calls its fused activation."""

    spec = FeatureSpec(
        name="swiglu",
        summary="SwiGLU as one operator that saves only its input",
        category=Category.COMPUTE,
        level=1,
        ops=("swiglu",),
        megatron_flags=(MegatronFlag("bias_swiglu_fusion", switch="off", values=(False,)),),
        applies=_is_swiglu,
        constraints=(
            Check(
                _is_swiglu,
                "the MLP is not SwiGLU: activation {world.activation}, gated {world.gated_linear_unit}",
                fix=(Together((GiveField("activation", "silu"), GiveField("gated_linear_unit", True))), RemoveFeature()),
            ),
        ),
        numerics=Numerics.reordered(reason="the product is rounded once instead of twice"),
        saved=lambda args, world, tensors: resized(tensors, {"mlp: activation inner": 0}),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        reason = "Megatron then calls one function for the whole activation"
        return [ArgOverride("bias_activation_fusion", True, reason, only=f"{_LAYERS}:fits")]

    @hookimpl
    def config_ready(self, config: Any) -> None:
        from mindspeed.features.swiglu.layers import misfits

        if wrong := misfits(config):
            self.decline(f"{' and '.join(wrong)} in a model that is being built")

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Wrap(
                f"{_FUSIONS}:bias_swiglu_impl",
                f"{_LAYERS}:with_operator",
                reason="the activation of an MLP",
                optional=True,
            ),
            Wrap(
                f"{_FUSIONS}:weighted_bias_swiglu_impl",
                f"{_LAYERS}:with_weighted_operator",
                reason="the activation of an expert, times the routing probability of each token",
                optional=True,
            ),
        ]
