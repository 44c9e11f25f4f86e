"""Gradient reduction behind the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Estimate,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    MegatronFlag,
    Numerics,
    Requires,
    hookimpl,
)


class AsyncDdpArgs(FeatureArgs):
    bucket_size: int | None = Field(
        None,
        ge=1,
        description="Number of parameters whose gradients are reduced together (default: Megatron's choice). Smaller = "
        "reduction starts earlier, but more messages",
    )


class AsyncDdp(Feature[AsyncDdpArgs]):
    """Overlap gradient reduction with backward.

    A bucket of gradients is reduced as soon as the backward pass of the last micro-batch has computed all gradients in
    it.
    """

    spec = FeatureSpec(
        name="async-ddp",
        category=Category.MEGATRON,
        level=0,
        constraints=(
            Requires("data-parallel", reason="async-ddp overlaps the gradient reduction over data-parallel replicas"),
        ),
        megatron_flags=(
            MegatronFlag("overlap_grad_reduce", switch="on"),
            MegatronFlag("ddp_bucket_size", "bucket_size"),
        ),
        numerics=Numerics.reordered(
            reason="each replica sums gradients over its samples, and the sums are added over replicas. One process sums "
            "over all samples at once"
        ),
    )

    @hookimpl
    def estimate(self) -> Estimate:
        return Estimate(overlap_gradients=True, bucket_size=self.args.bucket_size)

    @hookimpl
    def variants(self) -> Sequence[Mapping[str, Any]]:
        return [{}]

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        overrides = [
            ArgOverride(
                "overlap_grad_reduce", True, "reduces a bucket of gradients as soon as it is complete, while backward goes on"
            )
        ]
        if self.args.bucket_size is not None:
            overrides.append(
                ArgOverride(
                    "bucket_size", self.args.bucket_size, "async-ddp.bucket_size sets the number of parameters in a bucket"
                )
            )
        return overrides

    @hookimpl
    def around_schedule(self, chunks: Sequence[Any]) -> AbstractContextManager[None]:
        from mindspeed.features.async_ddp.schedule import held_back_reduction

        return held_back_reduction(chunks)
