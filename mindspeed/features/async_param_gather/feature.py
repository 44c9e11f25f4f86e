"""Weight gathering behind the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed import plugins as ms


class AsyncParamGather(ms.Feature[ms.FeatureArgs]):
    """Overlap the all-gather of weights with forward.

    The weights of the next bucket are gathered while the forward pass computes with the current one.
    """

    spec = ms.FeatureSpec(
        name="async-param-gather",
        category=ms.Category.MEGATRON,
        level=0,
        constraints=(
            ms.Requires("distributed-optimizer", reason="only a sharded optimizer has weights to gather after its step"),
            ms.Requires(
                "async-ddp",
                reason="Megatron gathers weights bucket by bucket, and creates the buckets only with overlap_grad_reduce, "
                "which async-ddp switches on",
            ),
        ),
        megatron_flags=(ms.MegatronFlag("overlap_param_gather", switch="on"),),
        numerics=ms.Numerics.reordered(
            reason="distributed-optimizer, which this feature requires, reduces gradients by reduce-scatter instead of "
            "all-reduce"
        ),
    )

    @ms.hookimpl
    def estimate(self) -> ms.Estimate:
        return ms.Estimate(overlap_weights=True)

    @ms.hookimpl
    def variants(self) -> Sequence[Mapping[str, Any]]:
        return [{}]

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [
            ms.ArgOverride(
                "overlap_param_gather",
                True,
                "gathers the updated weights of the next layers while forward computes the current one",
            )
        ]
