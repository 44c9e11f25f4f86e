"""Megatron's schedule with the weight gradients of linear layers behind, where a rank would idle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed import plugins as ms
from mindspeed.pipeline.conditions import KEEPS_PASSES, WAITING_WEIGHTS, ScheduleArgs, planned_shape
from mindspeed.pipeline.feature import ScheduleFeature
from mindspeed.pipeline.operations import Costs, PipelineShape, Schedule
from mindspeed.pipeline.recomputation import least_limit


class NanoPipeArgs(ScheduleArgs):
    lag: float = ms.Field(
        1.0,
        ge=0,
        le=4,
        description="Delay of weight gradients: pipeline rank r computes them ceil(lag * r) backward passes after their "
        "input gradients. Larger = smaller bubbles, more memory",
    )
    output_layer: bool = ms.Field(
        False,
        description="Also defer the weight gradient of the output layer. The gradient of a micro-batch's logits is kept in "
        "memory until this weight gradient is computed",
    )
    swap: bool = ms.Field(
        False,
        description="Offload to host memory the tensors that deferred weight gradients need. The device keeps those of at "
        "most two backward passes",
    )


def _planned(args: NanoPipeArgs, shape: PipelineShape) -> Schedule:
    from mindspeed.pipeline.synthesis import delayed, lag_by_rank, megatron

    return delayed(megatron(shape), lag_by_rank(args.lag, shape.pp))


def _least_listed(args: NanoPipeArgs, world: ms.World) -> int:
    """Return the least limit of a feature that recomputes a part of the sets of this list."""
    return least_limit(_planned(args, planned_shape(world)))


def _least(args: NanoPipeArgs, world: ms.World) -> Mapping[str, int]:
    """Return the least limit, for the text."""
    return {"least": _least_listed(args, world)}


@ms.condition(
    "deferred weight gradients need the activations of {least} forward passes, but recompute-in-bubble keeps those of at "
    "most {other.limit} (its setting limit)",
    fix=(
        ms.Fix.give_setting("recompute-in-bubble.limit", "{least}"),
        ms.Fix.give_setting("lag", note="a shorter delay of weight gradients"),
    ),
    of="recompute-in-bubble",
    values=_least,
)
def limit_keeps_deferred_sets(args: NanoPipeArgs, world: ms.World, other: Any) -> bool:
    """Check that the limit of recompute-in-bubble leaves the sets that wait for weight gradients."""
    return other.limit is None or other.limit >= _least_listed(args, world)


class NanoPipe(ScheduleFeature[NanoPipeArgs]):
    """Fill pipeline bubbles with weight gradients.

    Input gradients are sent first, and weight gradients are computed in pipeline bubbles.
    Results are bitwise identical to Megatron's.
    """

    spec = ms.FeatureSpec(
        name="nano-pipe",
        category=ms.Category.PARALLEL,
        slots={ms.Slot.PIPELINE_SCHEDULE, ms.Slot.LINEAR},
        constraints=(
            ms.Requires("pipeline-parallel", reason="nano-pipe computes weight gradients in pipeline bubbles"),
            *KEEPS_PASSES,
            limit_keeps_deferred_sets,
            ms.Before("matmul-add"),
        ),
        numerics=ms.Numerics.exact(),
        verify_with=ms.VerifyWith(features=("pipeline-parallel",), world={"pp": 2}),
        own_trainer="it defers the weight gradients of Megatron's linear layers",
    )

    def planned_schedule(self, shape: PipelineShape, costs: Costs) -> Schedule:
        return _planned(self.args, shape)

    def engine_options(self) -> dict[str, Any]:
        from mindspeed.memory.on_host import HostBuffers

        return {"output_layer": self.args.output_layer, "host": HostBuffers() if self.args.swap else None}

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [WAITING_WEIGHTS]
