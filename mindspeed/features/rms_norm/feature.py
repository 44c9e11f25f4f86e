"""RMSNorm as one operator."""

from __future__ import annotations

from typing import Any

from mindspeed.plugins import Category, Check, Feature, FeatureArgs, FeatureSpec, Numerics, hookimpl, resized

_NORMS = ("input norm", "pre-mlp norm", "final norm")


class RmsNorm(Feature[FeatureArgs]):
    """The norms of all layers, and the final one, call the operator ``mindspeed::rms_norm``."""

    spec = FeatureSpec(
        name="rms-norm",
        summary="RMSNorm as one operator that saves its input and one number per token",
        category=Category.COMPUTE,
        level=1,
        ops=("rms_norm",),
        applies=lambda args, world: world.normalization == "RMSNorm",
        constraints=(
            Check(
                lambda args, world: world.normalization == "RMSNorm",
                "the model normalizes with {world.normalization}, not RMSNorm",
                fix="--normalization RMSNorm, or remove rms-norm",
            ),
        ),
        numerics=Numerics.reordered(reason="the mean of squares is summed in another order"),
        saved=lambda args, world, tensors: resized(tensors, {f"{norm}: copies": 0 for norm in _NORMS}),
    )

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if config.normalization != "RMSNorm":
            self.decline(f"a model that is being built normalizes with {config.normalization}, not RMSNorm")
            return spec
        from mindspeed.features.rms_norm.layers import with_operator_norms

        return with_operator_norms(spec)
