"""Linear layers of tensor parallelism whose products are one call with their collectives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspeed import plugins as ms
from mindspeed.tensor_parallel.conditions import LINEAR_LAYERS, describe_fused_products


class Mc2(ms.Feature[ms.FeatureArgs]):
    """Fuse linear layers with their collectives.

    With sequence parallelism, one operator computes the all-gather and the matrix product after it. Another one
    computes a matrix product and its reduce-scatter. Both are in `mindspeed.ops.lcal_coc`.
    """

    spec = ms.FeatureSpec(
        name="mc2",
        category=ms.Category.COMMUNICATION,
        slots={ms.Slot.LINEAR},
        ops=("lcal_coc",),
        constraints=(
            ms.Requires(
                "sequence-parallel",
                reason="mc2 fuses the all-gather and reduce-scatter of sequence parallelism with matrix products",
            ),
            *LINEAR_LAYERS,
        ),
        numerics=ms.Numerics.reordered(
            reason="Megatron rounds the partial product of each rank before it sums over ranks. The fused operators of mc2 sum "
            "first and round once. Tensor parallelism, which mc2 requires, splits these sums over ranks"
        ),
        verify_with=ms.VerifyWith(world={"tp": 2}),
        own_trainer="from mindspeed.ops import lcal_coc",
    )

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        return describe_fused_products(self.world)

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.mc2.layers import Mc2ColumnParallelLinear, Mc2RowParallelLinear
        from mindspeed.tensor_parallel.layers import with_linear_layers

        return with_linear_layers(spec, Mc2ColumnParallelLinear, Mc2RowParallelLinear)
