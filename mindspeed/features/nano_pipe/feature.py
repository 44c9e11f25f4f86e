"""Megatron's schedule with the weight gradients of linear layers behind, where a rank would idle."""

from __future__ import annotations

from typing import Any

from mindspeed.pipeline.declarations import WAITING_WEIGHTS, ScheduleArgs, keeps_an_order, needs_stages
from mindspeed.pipeline.feature import ScheduleFeature
from mindspeed.pipeline.operations import Costs, PipelineShape, Schedule
from mindspeed.pipeline.recomputation import least_limit
from mindspeed.pipeline.refusals import ARGUMENTS
from mindspeed.pipeline.synthesis import delayed, lag_by_rank, megatron
from mindspeed.plugins import (
    Before,
    Category,
    Check,
    FeatureSpec,
    Field,
    Numerics,
    Patch,
    Requires,
    Slot,
    VerifyWith,
    World,
    hookimpl,
)


class NanoPipeArgs(ScheduleArgs):
    lag: float = Field(
        1.0, ge=0, le=4, description="weight gradients of rank r run this many times r chunk-steps behind, rounded up"
    )
    output_layer: bool = Field(
        False, description="the output layer waits too; its queue keeps a gradient of the logits per step"
    )
    swap: bool = Field(False, description="what waits is on the host, but for two model chunks of a micro-batch")


def _planned(args: NanoPipeArgs, shape: PipelineShape) -> Schedule:
    return delayed(megatron(shape), lag_by_rank(args.lag, shape.pp))


def _least_listed(args: NanoPipeArgs, world: World) -> int:
    """Return the least limit of a feature that recomputes a part of the sets of this list."""
    return least_limit(_planned(args, PipelineShape(world.pp, world.vpp, max(1, world.num_micro_batches))))


class NanoPipe(ScheduleFeature[NanoPipeArgs]):
    """Send the gradient of a stage's input first, and compute the gradients of its weights while the rank would idle."""

    spec = FeatureSpec(
        name="nano-pipe",
        summary="Weight gradients computed in the idle time of the pipeline, with Megatron's own results",
        category=Category.PARALLEL,
        slots={Slot.PIPELINE_SCHEDULE, Slot.LINEAR},
        constraints=(
            Requires("pipeline-parallel", reason="weight gradients wait for the idle time of its stages"),
            needs_stages("nano-pipe"),
            *keeps_an_order("nano-pipe"),
            Check(
                lambda args, world, other: other.limit is None or other.limit >= _least_listed(args, world),
                "{least} activation sets wait for weight gradients at once, and recompute-in-bubble.limit is {other.limit}",
                fix="--set recompute-in-bubble.limit={least}, or a smaller nano-pipe.lag",
                of="recompute-in-bubble",
                values=lambda args, world: {"least": _least_listed(args, world)},
            ),
            Before("matmul-add"),
        ),
        megatron_refusals=ARGUMENTS,
        numerics=Numerics.exact(),
        verify_with=VerifyWith(features=("pipeline-parallel",), world={"pp": 2}),
    )

    def planned_schedule(self, shape: PipelineShape, costs: Costs) -> Schedule:
        return _planned(self.args, shape)

    def engine_options(self) -> dict[str, Any]:
        from mindspeed.memory.on_host import HostBuffers

        return {"output_layer": self.args.output_layer, "host": HostBuffers() if self.args.swap else None}

    @hookimpl
    def patches(self) -> list[Patch]:
        return [WAITING_WEIGHTS]
