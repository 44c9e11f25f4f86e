"""RMSNorm as one operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspeed import plugins as ms
from mindspeed.plugins.saved_tensors import SavedTensors, resized
from mindspeed.plugins.shared_conditions import NO_TRANSFORMER_ENGINE_LAYERS

_NORMS = ("input norm", "pre-mlp norm", "final norm", "prediction norms")


class RmsNorm(ms.Feature[ms.FeatureArgs]):
    """Compute RMSNorm by one operator.

    All norms of the model call ``mindspeed::rms_norm``. For backward it saves its input and the reciprocal
    root mean square of each token.
    """

    spec = ms.FeatureSpec(
        name="rms-norm",
        category=ms.Category.COMPUTE,
        level=1,
        ops=("rms_norm",),
        constraints=(
            ms.Condition.equals("normalization", "RMSNorm", "normalization is {world.normalization}, not RMSNorm"),
            NO_TRANSFORMER_ENGINE_LAYERS,
        ),
        numerics=ms.Numerics.reordered(reason="the mean of squares is summed in a different order than in Megatron's norm"),
    )

    @ms.hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        return resized(tensors, {f"{norm}: copies": 0 for norm in _NORMS})

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        reason = "computes RMSNorm by the fused operator, also in the layers that transformer-engine-layers defines"
        operator_norm = "mindspeed.features.rms_norm.layers:operator_norm"
        return [ms.Replace("mindspeed.tensor_parallel.norms:rms_norm", operator_norm, reason, optional=True)]

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        if self.world.is_set("engine_over_local"):
            yield "Transformer Engine compatible layers compute the norm by the same operator"

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.rms_norm.layers import with_operator_norms

        return with_operator_norms(spec)
