"""The fastest list of operations for given costs, with weight gradients apart and recomputation where it is hidden."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms
from mindspeed.features.zero_bubble.placement import V_PLACEMENT
from mindspeed.features.zero_bubble.settings import CONSTRAINTS, ZeroBubbleArgs, given_costs, planned
from mindspeed.pipeline.declarations import LISTED_RECOMPUTE, WAITING_WEIGHTS, full_recompute
from mindspeed.pipeline.feature import ScheduleFeature
from mindspeed.pipeline.operations import Costs, PipelineShape, Placement, Schedule


class ZeroBubble(ScheduleFeature[ZeroBubbleArgs]):
    """Simulate and run the fastest pipeline schedule.

    Weight gradients are deferred into pipeline bubbles. Before the run, a simulator compares schedules, given the durations
    of forward and backward passes and a memory limit. The job runs the fastest schedule.
    """

    spec = ms.FeatureSpec(
        name="zero-bubble",
        category=ms.Category.PARALLEL,
        slots={ms.Slot.PIPELINE_SCHEDULE, ms.Slot.LINEAR},
        constraints=CONSTRAINTS,
        numerics=ms.Numerics.reordered(
            reason="only with placement=v and dropout: ranks hold other layers than in Megatron, so dropout draws different "
            "random numbers. With placement=loop, results are bitwise identical to Megatron"
        ),
        state=ms.CheckpointState("resharded", "layers are saved under their number in the whole model"),
        verify_with=ms.VerifyWith(world={"pp": 2}),
    )

    def planned_schedule(self, shape: PipelineShape, costs: Costs) -> Schedule:
        return planned(self.args, shape, costs)

    def placement(self) -> Placement:
        return self.args.placement

    def costs(self) -> Costs:
        return given_costs(self.args)

    def engine_options(self) -> dict[str, Any]:
        return {"output_layer": self.args.output_layer, "measured": self.args.costs == "measured"}

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return (
            full_recompute(f"zero-bubble.recompute={self.args.recompute} recomputes whole layers, one by one")
            if self.args.recompute != "none"
            else []
        )

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        listed = [LISTED_RECOMPUTE] if self.args.recompute != "none" else []
        return [WAITING_WEIGHTS, *listed, *(V_PLACEMENT if self.args.placement == "v" else ())]
