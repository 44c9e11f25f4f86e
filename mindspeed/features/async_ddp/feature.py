"""Gradient reduction behind the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mindspeed import plugins as ms


class AsyncDdpArgs(ms.FeatureArgs):
    bucket_size: int | None = ms.Field(
        None,
        ge=1,
        description="Number of parameters whose gradients are reduced together (default: Megatron's choice). Smaller = "
        "reduction starts earlier, but more messages",
    )


class AsyncDdp(ms.Feature[AsyncDdpArgs]):
    """Overlap gradient reduction with backward.

    A bucket of gradients is reduced as soon as the backward pass of the last micro-batch has computed all gradients in
    it.
    """

    spec = ms.FeatureSpec(
        name="async-ddp",
        category=ms.Category.MEGATRON,
        level=0,
        constraints=(
            ms.Requires("data-parallel", reason="async-ddp overlaps the gradient reduction over data-parallel replicas"),
        ),
        megatron_flags=(
            ms.MegatronFlag("overlap_grad_reduce", switch="on"),
            ms.MegatronFlag("ddp_bucket_size", "bucket_size"),
        ),
        numerics=ms.Numerics.reordered(
            reason="each replica sums gradients over its samples, and the sums are added over replicas. One process sums "
            "over all samples at once"
        ),
    )

    @ms.hookimpl
    def estimate(self) -> ms.Estimate:
        return ms.Estimate(overlap_gradients=True, bucket_size=self.args.bucket_size)

    @ms.hookimpl
    def variants(self) -> Sequence[Mapping[str, Any]]:
        return [{}]

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        overrides = [
            ms.ArgOverride(
                "overlap_grad_reduce", True, "reduces a bucket of gradients as soon as it is complete, while backward goes on"
            )
        ]
        if self.args.bucket_size is not None:
            overrides.append(
                ms.ArgOverride(
                    "bucket_size", self.args.bucket_size, "async-ddp.bucket_size sets the number of parameters in a bucket"
                )
            )
        return overrides

    @ms.hookimpl
    def around_schedule(self, chunks: Sequence[Any]) -> AbstractContextManager[None]:
        from mindspeed.features.async_ddp.schedule import held_back_reduction

        return held_back_reduction(chunks)
