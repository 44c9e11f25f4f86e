"""Optimizer state sharded over the data-parallel replicas."""

from __future__ import annotations

from mindspeed.plugins import (
    ArgOverride,
    Category,
    CheckpointState,
    Feature,
    FeatureArgs,
    FeatureSpec,
    MegatronFlag,
    Numerics,
    Requires,
    hookimpl,
)


class DistributedOptimizer(Feature[FeatureArgs]):
    """Reduce-scatter the gradients, step on this replica's shard of the state, all-gather the weights."""

    spec = FeatureSpec(
        name="distributed-optimizer",
        summary="Optimizer state and step sharded over the data-parallel replicas",
        category=Category.MEGATRON,
        level=0,
        constraints=(Requires("data-parallel", reason="it shards the optimizer over the replicas"),),
        megatron_flags=(MegatronFlag("use_distributed_optimizer", switch="on"),),
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
