"""SwiGLU as one operator."""

from __future__ import annotations

from typing import Final

from mindspeed import plugins as ms
from mindspeed.plugins.saved_tensors import SavedTensors, resized
from mindspeed.plugins.shared_conditions import NO_CPU_OFFLOADING

_FUSIONS = "megatron.core.fusions.fused_bias_swiglu"
_LAYERS = "mindspeed.features.swiglu.layers"


@ms.condition(
    "the MLP is not SwiGLU: activation={world.activation}, gated_linear_unit={world.gated_linear_unit}",
    fix=(
        ms.Fix.together((ms.Fix.give_field("activation", "silu"), ms.Fix.give_field("gated_linear_unit", True))),
        ms.Fix.remove_feature(),
    ),
)
def mlp_is_swiglu(args: ms.FeatureArgs, world: ms.World) -> bool:
    """Check that the MLP is SwiGLU."""
    return bool(world.gated_linear_unit) and world.activation == "silu"


_OTHER_ACTIVATIONS: Final = tuple(
    ms.Condition.unset(field, text)
    for field, text in (
        (
            "clamped_activation",
            "the input of the activation function is clamped, which the operator of swiglu does not support",
        ),
        (
            "shifted_gate",
            "an offset is added to the linear part of gated units (glu_linear_offset), which the operator of swiglu does not "
            "support",
        ),
        (
            "low_precision_activation_input",
            "the input of the activation function is stored in fp8 (activation_func_fp8_input_store), but the operator of "
            "swiglu stores it unquantized",
        ),
        (
            "transformer_engine_activation",
            "Transformer Engine computes the activation function (use_te_activation_func), but swiglu replaces only Megatron's "
            "function",
        ),
    )
)


class Swiglu(ms.Feature[ms.FeatureArgs]):
    """Compute SwiGLU by one operator.

    MLPs and experts call ``mindspeed::swiglu`` instead of Megatron's fused activation. Only its input is saved for backward.
    """

    spec = ms.FeatureSpec(
        name="swiglu",
        category=ms.Category.COMPUTE,
        level=1,
        ops=("swiglu",),
        megatron_flags=(ms.MegatronFlag("bias_swiglu_fusion", switch="off", values=(False,)),),
        constraints=(mlp_is_swiglu, *_OTHER_ACTIVATIONS, NO_CPU_OFFLOADING),
        numerics=ms.Numerics.reordered(
            reason="SwiGLU is silu(gate) * up. The operator rounds only this product, but Megatron also rounds silu(gate)"
        ),
        own_trainer="from mindspeed.nn import SwiGLU",
    )

    @ms.hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        return resized(tensors, {f"{owner}: activation inner": 0 for owner in ("mlp", "shared experts", "experts")})

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        reason = "makes Megatron compute SwiGLU in one function, which this feature replaces by an operator"
        return [ms.ArgOverride("bias_activation_fusion", True, reason, only=f"{_LAYERS}:fits")]

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Wrap(
                f"{_FUSIONS}:bias_swiglu_impl",
                f"{_LAYERS}:with_operator",
                reason="computes SwiGLU of an MLP by the operator mindspeed::swiglu",
                optional=True,
            ),
            ms.Wrap(
                f"{_FUSIONS}:weighted_bias_swiglu_impl",
                f"{_LAYERS}:with_weighted_operator",
                reason="computes SwiGLU of an expert by the operator mindspeed::swiglu, and multiplies it by the routing "
                "probability of each token",
                optional=True,
            ),
        ]
