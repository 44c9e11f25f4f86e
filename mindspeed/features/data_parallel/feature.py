"""Replicas of the model that reduce their gradients."""

from __future__ import annotations

from mindspeed import plugins as ms


class DataParallelArgs(ms.FeatureArgs):
    reduce_in_fp32: bool = ms.Field(
        False, description="Accumulate and reduce gradients in fp32 (true), or in the data type of the model (false)"
    )


class DataParallel(ms.Feature[DataParallelArgs]):
    """Replicate the model and reduce gradients.

    Each replica processes a share of the batch. The number of replicas is world size / (tp * pp * cp).
    """

    spec = ms.FeatureSpec(
        name="data-parallel",
        category=ms.Category.MEGATRON,
        level=0,
        sizes={"dp": None},
        constraints=(
            ms.Condition.divides(
                "global_batch_size",
                ("micro_batch_size", "dp"),
                "global batch size {world.global_batch_size} is not divisible by "
                "micro batch size x dp = {world.micro_batch_size} x {world.dp}",
                fix=(ms.Fix.give_field("global_batch_size", note="a multiple of {world.micro_batch_size} x {world.dp}"),),
            ),
        ),
        megatron_flags=(ms.MegatronFlag("accumulate_allreduce_grads_in_fp32", "reduce_in_fp32"),),
        numerics=ms.Numerics.reordered(
            reason="each replica sums gradients over its samples, and the sums are added over replicas. One process sums "
            "over all samples at once"
        ),
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        if not self.args.reduce_in_fp32:
            return []
        return [
            ms.ArgOverride("grad_reduce_in_fp32", True, "data-parallel.reduce_in_fp32=true sums gradients over ranks in fp32")
        ]
