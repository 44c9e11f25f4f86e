"""Gradient reduction behind the backward pass."""

from __future__ import annotations

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    MegatronFlag,
    Numerics,
    Patch,
    Requires,
    Wrap,
    hookimpl,
)


class AsyncDdpArgs(FeatureArgs):
    bucket_size: int | None = Field(None, ge=1, description="parameters per bucket; Megatron's choice if not given")


class AsyncDdp(Feature[AsyncDdpArgs]):
    """A bucket of gradients is reduced as soon as the last micro-batch has filled it, while backward goes on."""

    spec = FeatureSpec(
        name="async-ddp",
        summary="Gradients are reduced in buckets while the backward pass goes on",
        category=Category.MEGATRON,
        level=0,
        constraints=(Requires("data-parallel", reason="it overlaps the reduction over the replicas"),),
        megatron_flags=(
            MegatronFlag("overlap_grad_reduce", switch="on"),
            MegatronFlag("ddp_bucket_size", "bucket_size"),
        ),
        numerics=Numerics.reordered(reason="as data-parallel"),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        overrides = [ArgOverride("overlap_grad_reduce", True, "async-ddp is active")]
        if self.args.bucket_size is not None:
            overrides.append(ArgOverride("bucket_size", self.args.bucket_size, "async-ddp.bucket_size"))
        return overrides

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Wrap(
                "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
                "mindspeed.features.async_ddp.schedule:with_no_sync",
                reason="only the last micro-batch may start a reduction, which a script without overlap need not arrange",
            )
        ]
