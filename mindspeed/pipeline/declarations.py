"""Patches, arguments and settings that features of pipelines share. Light."""

from __future__ import annotations

from typing import Final

from mindspeed import plugins as ms

WAITING_WEIGHTS: Final = ms.Wrap(
    "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
    "mindspeed.pipeline.linear:with_queue",
    reason="computes only the input gradient in the backward pass of a linear layer, and queues the weight gradient for a "
    "later time in the schedule",
)
"""The patch of a schedule with operations W."""

LISTED_RECOMPUTE: Final = ms.Wrap(
    "megatron.core.tensor_parallel.random:checkpoint",
    "mindspeed.pipeline.checkpoints:with_early_restore",
    reason="repeats the forward pass of recomputed layers at a separate step of the pipeline schedule, before their gradient "
    "arrives",
)
"""The patch of a schedule with operations R."""


def full_recompute(reason: str, num_layers: int = 1) -> list[ms.ArgOverride]:
    """Return the arguments with which Megatron passes every layer through its checkpoint."""
    values: dict[str, str | int] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": num_layers,
    }
    return [ms.ArgOverride(name, value, reason) for name, value in values.items()]


class ScheduleArgs(ms.FeatureArgs):
    """Settings of every feature that provides a pipeline schedule."""

    trace: str | None = ms.Field(
        None,
        description="If set: folder to which every rank writes the times of its forward and backward passes. Draw them with "
        "mindspeed schedule show --trace",
    )
