"""Replicas of the model that reduce their gradients."""

from __future__ import annotations

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    MegatronFlag,
    Numerics,
    World,
    condition,
    hookimpl,
)


class DataParallelArgs(FeatureArgs):
    reduce_in_fp32: bool = Field(
        False, description="Accumulate and reduce gradients in fp32 (true), or in the data type of the model (false)"
    )


@condition(
    "global batch size {world.global_batch_size} is not divisible by "
    "micro batch size x dp = {world.micro_batch_size} x {world.dp}",
    fix=(GiveField("global_batch_size", note="a multiple of {world.micro_batch_size} x {world.dp}"),),
)
def batch_divides(args: DataParallelArgs, world: World) -> bool:
    """Check that replicas have equal numbers of micro-batches."""
    return bool(world.global_batch_size % (world.micro_batch_size * world.dp) == 0)


class DataParallel(Feature[DataParallelArgs]):
    """Replicate the model and reduce gradients.

    Each replica processes a share of the batch. The number of replicas is world size / (tp * pp * cp).
    """

    spec = FeatureSpec(
        name="data-parallel",
        category=Category.MEGATRON,
        level=0,
        sizes={"dp": None},
        constraints=(batch_divides,),
        megatron_flags=(MegatronFlag("accumulate_allreduce_grads_in_fp32", "reduce_in_fp32"),),
        numerics=Numerics.reordered(
            reason="each replica sums gradients over its samples, and the sums are added over replicas. One process sums "
            "over all samples at once"
        ),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        if not self.args.reduce_in_fp32:
            return []
        return [ArgOverride("grad_reduce_in_fp32", True, "data-parallel.reduce_in_fp32=true sums gradients over ranks in fp32")]
