"""Optimizer state sharded over the data-parallel replicas."""

from __future__ import annotations

from typing import Any

from mindspeed.plugins import (
    ArgOverride,
    Category,
    CheckpointState,
    Estimate,
    Feature,
    FeatureArgs,
    FeatureSpec,
    MegatronFlag,
    Numerics,
    Requires,
    hookimpl,
)


def _estimate(args: FeatureArgs, world: Any) -> Estimate:
    from mindspeed.job.arithmetic import optimizer_bytes, rank_parameters

    dense, experts = rank_parameters(world)
    replicas = world.dp * world.cp
    saved = dense * (1 - 1 / replicas) + experts * (1 - world.ep / replicas)
    return Estimate(optimizer=-saved * optimizer_bytes(world), gathers_weights=True)


class DistributedOptimizer(Feature[FeatureArgs]):
    """Reduce-scatter the gradients, step on this replica's shard of the state, all-gather the weights."""

    spec = FeatureSpec(
        name="distributed-optimizer",
        summary="Optimizer state and step sharded over the data-parallel replicas",
        category=Category.MEGATRON,
        level=0,
        constraints=(Requires("data-parallel", reason="it shards the optimizer over the replicas"),),
        megatron_flags=(MegatronFlag("use_distributed_optimizer", switch="on"),),
        estimate=_estimate,
        variants=lambda world: [{}],
        numerics=Numerics.reordered(reason="gradients are reduced by another collective"),
        state=CheckpointState(
            "resharded",
            "Megatron saves a sharded and a replicated optimizer in formats that do not load each other",
            added="refused",
            removed="refused",
        ),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [ArgOverride("use_distributed_optimizer", True, "distributed-optimizer is active")]
