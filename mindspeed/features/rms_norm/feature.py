"""RMSNorm as one operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspeed import plugins as ms
from mindspeed.plugins.saved_tensors import SavedTensors, resized
from mindspeed.plugins.shared_conditions import NO_TRANSFORMER_ENGINE_LAYERS

_NORMS = ("input norm", "pre-mlp norm", "final norm", "prediction norms")


class RmsNormArgs(ms.FeatureArgs):
    weights_in_fp32: bool = ms.Field(
        False,
        description="Keep the weights of norms in fp32 in a model of 16 bits. The norm is then computed in fp32, and its "
        "output has the type of its input",
    )


class RmsNorm(ms.Feature[RmsNormArgs]):
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
        own_trainer="from mindspeed.nn import RMSNorm",
    )

    @ms.hookimpl
    def saved_tensors(self, tensors: SavedTensors) -> SavedTensors:
        copies = {tensor.name: tensor.bytes for tensor in tensors if tensor.name in {f"{norm}: copies" for norm in _NORMS}}
        keeps_fp32 = self.args.weights_in_fp32 and self.world.dtype != "fp32"
        return resized(tensors, {name: bytes // 2 if keeps_fp32 else 0 for name, bytes in copies.items()})

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
        from mindspeed.features.rms_norm.layers import with_full_precision_roles, with_operator_norms

        changed = with_operator_norms(spec, self.args.weights_in_fp32)
        has_roles = self.args.weights_in_fp32 and self.world.is_set("engine_over_local")
        return with_full_precision_roles(changed) if has_roles else changed
