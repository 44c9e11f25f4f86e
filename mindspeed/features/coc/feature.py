"""Linear layers in parts, with the collective of one part behind the product of another."""

from __future__ import annotations

from typing import Any, Literal

from mindspeed.plugins import (
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    Numerics,
    RemoveFeature,
    Requires,
    Slot,
    VerifyWith,
    hookimpl,
)
from mindspeed.tensor_parallel.pipeline import parts_that_fit
from mindspeed.tensor_parallel.variants import describe_fused_products


class CocArgs(FeatureArgs):
    parts: Literal[1, 2, 4, 8] = Field(4, description="parts of a product; more hide more, and start more collectives")
    mode: Literal[-1, 0, 1, 2] = Field(
        -1, description="0 is Megatron's layers, 1 those of this feature in one part, 2 in parts, -1 is 0 for one part, else 2"
    )
    fused: bool = Field(False, description="one operator for a product and its collective, in place of parts")


class Coc(Feature[CocArgs]):
    """Multiply linear layers in parts of their rows: a part is gathered, or summed over ranks, while another is multiplied."""

    spec = FeatureSpec(
        name="coc",
        summary="Linear layers in parts, the collective of one part behind the product of another",
        category=Category.COMMUNICATION,
        slots={Slot.LINEAR},
        constraints=(
            Requires("tensor-parallel", reason="its collectives are those of tensor-parallel linear layers"),
            Check(
                lambda args, world: world.tp > 1,
                "linear layers have no collectives to hide at tensor-parallel size {world.tp}",
                fix=(GiveField("tp", 2, or_more=True), RemoveFeature()),
            ),
            Check(
                lambda args, world: not args.fused or world.platform == "npu",
                "the operator of fused products has no variant on {world.platform}",
                fix="--set coc.fused=false",
            ),
        ),
        applies=lambda args, world: world.tp > 1,
        notes=lambda args, world: describe_fused_products(world) if args.fused else [],
        numerics=Numerics.reordered(reason="tensor parallelism splits sums; parts of rows change no sum"),
        verify_with=VerifyWith(
            algorithm=("mindspeed.features.coc.products", "mindspeed.tensor_parallel.fused"),
            features=("sequence-parallel",),
            world={"tp": 2, "seq_length": 32, "num_layers": 2, "global_batch_size": 4},
        ),
    )

    def parts_of(self, rows: int) -> int:
        """The number of parts for ``rows`` rows of a rank's share, the next smaller that fits where `parts` does not."""
        asked = 1 if self.args.mode == 1 else self.args.parts
        return parts_that_fit("coc", asked, rows, fix="--set coc.parts={parts}")

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if self.args.mode == 0 or (self.args.mode == -1 and self.args.parts == 1 and not self.args.fused):
            return spec
        from mindspeed.features.coc.layers import CocColumnParallelLinear, CocRowParallelLinear
        from mindspeed.tensor_parallel.layers import with_linear_layers

        return with_linear_layers(spec, config, self, CocColumnParallelLinear, CocRowParallelLinear)
