"""Linear layers of tensor parallelism whose products are one call with their collectives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspeed.plugins import (
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Numerics,
    Requires,
    Slot,
    VerifyWith,
    hookimpl,
)
from mindspeed.tensor_parallel.conditions import LINEAR_LAYERS
from mindspeed.tensor_parallel.variants import describe_fused_products


class Mc2(Feature[FeatureArgs]):
    """Fuse linear layers with their collectives.

    The collectives are those of sequence parallelism. Linear layers call the operators of `lcal_coc`: all-gather and
    product, product and reduce-scatter.
    """

    spec = FeatureSpec(
        name="mc2",
        category=Category.COMMUNICATION,
        slots={Slot.LINEAR},
        ops=("lcal_coc",),
        constraints=(
            Requires(
                "sequence-parallel",
                reason="mc2 fuses the all-gather and reduce-scatter of sequence parallelism with the products",
            ),
            *LINEAR_LAYERS,
        ),
        numerics=Numerics.reordered(
            reason="tensor parallelism splits sums over ranks, and the operators round after the sum over ranks"
        ),
        verify_with=VerifyWith(world={"tp": 2}),
    )

    @hookimpl
    def notes(self) -> Iterable[str]:
        return describe_fused_products(self.world)

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.mc2.layers import Mc2ColumnParallelLinear, Mc2RowParallelLinear
        from mindspeed.tensor_parallel.layers import with_linear_layers

        return with_linear_layers(spec, Mc2ColumnParallelLinear, Mc2RowParallelLinear)
