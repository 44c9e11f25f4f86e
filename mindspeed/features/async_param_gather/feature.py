"""Weight gathering behind the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Estimate,
    Feature,
    FeatureArgs,
    FeatureSpec,
    MegatronFlag,
    Numerics,
    Requires,
    hookimpl,
)


class AsyncParamGather(Feature[FeatureArgs]):
    """Overlap the all-gather of weights with forward.

    The weights of the next bucket are gathered while the forward pass computes with the current one.
    """

    spec = FeatureSpec(
        name="async-param-gather",
        category=Category.MEGATRON,
        level=0,
        constraints=(
            Requires("distributed-optimizer", reason="only a sharded optimizer has weights to gather after its step"),
            Requires(
                "async-ddp",
                reason="Megatron gathers weights bucket by bucket, and creates the buckets only with overlap_grad_reduce, "
                "which async-ddp switches on",
            ),
        ),
        megatron_flags=(MegatronFlag("overlap_param_gather", switch="on"),),
        numerics=Numerics.reordered(
            reason="distributed-optimizer, which this feature requires, reduces gradients by reduce-scatter instead of "
            "all-reduce"
        ),
    )

    @hookimpl
    def estimate(self) -> Estimate:
        return Estimate(overlap_weights=True)

    @hookimpl
    def variants(self) -> Sequence[Mapping[str, Any]]:
        return [{}]

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [
            ArgOverride(
                "overlap_param_gather",
                True,
                "gathers the updated weights of the next layers while forward computes the current one",
            )
        ]
