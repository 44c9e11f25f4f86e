"""Optimizer state sharded over the data-parallel replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed import plugins as ms


class DistributedOptimizer(ms.Feature[ms.FeatureArgs]):
    """Shard optimizer state over data-parallel ranks.

    Gradients are reduce-scattered, each replica updates its shard, and weights are all-gathered.
    """

    spec = ms.FeatureSpec(
        name="distributed-optimizer",
        category=ms.Category.MEGATRON,
        level=0,
        constraints=(
            ms.Requires("data-parallel", reason="distributed-optimizer shards the optimizer state over data-parallel replicas"),
        ),
        megatron_flags=(ms.MegatronFlag("use_distributed_optimizer", switch="on"),),
        numerics=ms.Numerics.reordered(reason="gradients are reduced by reduce-scatter instead of all-reduce"),
        state=ms.CheckpointState(
            "resharded",
            "Megatron saves sharded and replicated optimizers in formats that cannot load each other",
            added="refused",
            removed="refused",
        ),
    )

    @ms.hookimpl
    def estimate(self) -> ms.Estimate:
        return ms.Estimate(gathers_weights=True)

    @ms.hookimpl
    def variants(self) -> Sequence[Mapping[str, Any]]:
        return [{}]

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [ms.ArgOverride("use_distributed_optimizer", True, "shards optimizer states over the data-parallel ranks")]
