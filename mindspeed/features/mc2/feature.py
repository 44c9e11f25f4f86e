"""Linear layers of tensor parallelism whose products are one call with their collectives."""

from __future__ import annotations

from typing import Any

from mindspeed.plugins import (
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    GiveField,
    Numerics,
    RemoveFeature,
    Requires,
    Slot,
    VerifyWith,
    hookimpl,
)
from mindspeed.tensor_parallel.variants import describe_fused_products


class Mc2(Feature[FeatureArgs]):
    """Linear layers call the operators of `lcal_coc`: all-gather and product, product and reduce-scatter."""

    spec = FeatureSpec(
        name="mc2",
        summary="Linear layers whose products are one call with the all-gather or reduce-scatter of sequence parallelism",
        category=Category.COMMUNICATION,
        slots={Slot.LINEAR},
        ops=("lcal_coc",),
        constraints=(
            Requires("sequence-parallel", reason="it fuses the all-gather and the reduce-scatter of sequence parallelism"),
            Check(
                lambda args, world: world.tp > 1,
                "linear layers have no collectives to fuse at tensor-parallel size {world.tp}",
                fix=(GiveField("tp", 2, or_more=True), RemoveFeature()),
            ),
        ),
        applies=lambda args, world: world.tp > 1,
        notes=lambda args, world: describe_fused_products(world),
        numerics=Numerics.reordered(reason="tensor parallelism splits sums, and the operators round after the sum over ranks"),
        verify_with=VerifyWith(world={"tp": 2}),
    )

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.mc2.layers import Mc2ColumnParallelLinear, Mc2RowParallelLinear
        from mindspeed.tensor_parallel.layers import with_linear_layers

        return with_linear_layers(spec, config, self, Mc2ColumnParallelLinear, Mc2RowParallelLinear)
