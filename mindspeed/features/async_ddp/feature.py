"""Gradient reduction behind the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mindspeed import plugins as ms


@contextmanager
def held_back_reduction(chunks: Sequence[Any]) -> Iterator[None]:
    """Fill in a missing ``config.no_sync_func`` of model chunks that reduce gradients behind backward, for one pass.

    Not earlier, because Megatron-LM fills it in itself and refuses one that is already there.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.utils import get_model_config

    config = get_model_config(chunks[0])
    if config.no_sync_func is not None or not all(isinstance(chunk, DistributedDataParallel) for chunk in chunks):
        yield
        return
    functions = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = functions if len(functions) > 1 else functions[0]
    try:
        yield
    finally:
        config.no_sync_func = None


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
        from mindspeed.features.async_ddp.feature import held_back_reduction

        return held_back_reduction(chunks)
