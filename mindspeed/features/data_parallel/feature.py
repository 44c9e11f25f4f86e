"""Replicas of the model that reduce their gradients."""

from __future__ import annotations

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    MegatronFlag,
    Numerics,
    hookimpl,
)


class DataParallelArgs(FeatureArgs):
    reduce_in_fp32: bool = Field(False, description="accumulate and reduce gradients in fp32, also for a bf16 or fp16 model")


class DataParallel(Feature[DataParallelArgs]):
    """Each replica takes a share of the global batch; gradients are summed over the replicas.

    The number of replicas is what the other sizes leave: world size / (tp * pp * cp).
    """

    spec = FeatureSpec(
        name="data-parallel",
        summary="Replicas of the model, each with a share of the batch, that reduce their gradients",
        category=Category.MEGATRON,
        level=0,
        sizes={"dp": None},
        constraints=(
            Check(
                lambda args, world: world.global_batch_size % (world.micro_batch_size * world.dp) == 0,
                "global batch size {world.global_batch_size} is not a multiple of "
                "micro batch size x dp = {world.micro_batch_size} x {world.dp}",
                fix="use a --global-batch-size that is a multiple of {world.micro_batch_size} x {world.dp}",
            ),
        ),
        megatron_flags=(MegatronFlag("accumulate_allreduce_grads_in_fp32", "reduce_in_fp32"),),
        numerics=Numerics.reordered(reason="the gradient is a sum over replicas instead of over one larger batch"),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        if not self.args.reduce_in_fp32:
            return []
        return [ArgOverride("grad_reduce_in_fp32", True, "data-parallel.reduce_in_fp32 is set")]
