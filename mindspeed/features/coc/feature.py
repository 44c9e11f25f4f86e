"""Linear layers in parts, with the collective of one part behind the product of another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from mindspeed import plugins as ms
from mindspeed.tensor_parallel.conditions import LINEAR_LAYERS, describe_fused_products
from mindspeed.tensor_parallel.pipeline import parts_that_fit


class CocArgs(ms.FeatureArgs):
    parts: Literal[1, 2, 4, 8] = ms.Field(
        4,
        description="Number of row chunks of a matrix product. More chunks overlap more, but start more and smaller "
        "collectives",
    )
    mode: Literal[-1, 0, 1, 2] = ms.Field(
        -1,
        description="Implementation of linear layers. 0 = Megatron's, without overlap. 1 = coc's with one chunk, without "
        "overlap, for comparison. 2 = coc's with coc.parts chunks. -1 = automatic: 0 if coc.parts is 1 and coc.fused is false, "
        "otherwise 2",
    )
    fused: bool = ms.Field(
        False,
        description="Run a matrix product and its collective as one fused operator (true), or overlap them chunk by chunk "
        "(false)",
    )


@ms.condition(
    "the operator for fused products has no variant on {world.platform}",
    fix=(ms.Fix.give_setting("fused", False),),
)
def fused_products_have_an_operator(args: CocArgs, world: ms.World) -> bool:
    """Check that GPUs run no fused products, because the reference there would lose the overlap."""
    return not args.fused or world.platform != "cuda"


class Coc(ms.Feature[CocArgs]):
    """Overlap linear layers with their collectives.

    Tensor-parallel matrix products are split into chunks of rows. While one chunk is gathered or reduced over ranks,
    the next one is computed.
    """

    spec = ms.FeatureSpec(
        name="coc",
        category=ms.Category.COMMUNICATION,
        slots={ms.Slot.LINEAR},
        constraints=(
            ms.Requires("tensor-parallel", reason="coc overlaps the collectives of tensor-parallel linear layers"),
            *LINEAR_LAYERS,
            fused_products_have_an_operator,
        ),
        numerics=ms.Numerics.reordered(
            reason="only because coc requires tensor-parallel, which splits sums over ranks. coc itself splits only rows, "
            "which changes no sum"
        ),
        verify_with=ms.VerifyWith(
            algorithm=("mindspeed.features.coc.products", "mindspeed.tensor_parallel.fused"),
            features=("sequence-parallel",),
            world={"tp": 2, "seq_length": 32, "global_batch_size": 4},
        ),
        own_trainer="from mindspeed.nn import ColumnParallelLinear, RowParallelLinear  # chunks=2",
    )

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        return describe_fused_products(self.world) if self.args.fused else []

    def parts_of(self, rows: int) -> int:
        """The number of parts for ``rows`` rows of a rank's share, the next smaller that fits where `parts` does not."""
        asked = 1 if self.args.mode == 1 else self.args.parts
        return parts_that_fit("coc", asked, rows, fix="--set coc.parts={parts}")

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if self.args.mode == 0 or (self.args.mode == -1 and self.args.parts == 1 and not self.args.fused):
            return spec
        from mindspeed.features.coc.layers import CocColumnParallelLinear, CocRowParallelLinear
        from mindspeed.tensor_parallel.layers import with_linear_layers

        return with_linear_layers(spec, CocColumnParallelLinear, CocRowParallelLinear)
