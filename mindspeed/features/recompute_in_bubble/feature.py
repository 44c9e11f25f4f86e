"""As few recomputed activations as keep every rank within a limit, each recomputed before its gradient arrives."""

from __future__ import annotations

from mindspeed.pipeline.declarations import ScheduleArgs, full_recompute, keeps_an_order, needs_stages
from mindspeed.pipeline.operations import Schedule
from mindspeed.pipeline.recomputation import least_limit, recompute_least
from mindspeed.pipeline.recompute_feature import RecomputeFeature
from mindspeed.pipeline.refusals import RECOMPUTE_ARGUMENTS
from mindspeed.plugins import (
    ArgOverride,
    Category,
    FeatureSpec,
    Field,
    Numerics,
    Requires,
    Slot,
    VerifyWith,
    hookimpl,
)


class RecomputeInBubbleArgs(ScheduleArgs):
    limit: int | None = Field(
        None, ge=1, description="activation sets of a chunk and a micro-batch that a rank keeps; pp x vpp if not given"
    )


class RecomputeInBubble(RecomputeFeature[RecomputeInBubbleArgs]):
    """Keep activations up to a limit, drop those that are needed last, and repeat their forward pass while a stage waits."""

    spec = FeatureSpec(
        name="recompute-in-bubble",
        summary="Activations kept up to a limit; the others are recomputed while a pipeline stage waits",
        category=Category.MEMORY,
        slots={Slot.RECOMPUTE_POLICY},
        constraints=(
            Requires("pipeline-parallel", reason="it recomputes while a stage waits for another one"),
            needs_stages("recompute-in-bubble"),
            *keeps_an_order("recompute-in-bubble"),
        ),
        megatron_refusals=RECOMPUTE_ARGUMENTS,
        numerics=Numerics.exact(),
        verify_with=VerifyWith(
            features=("pipeline-parallel",), settings={"recompute-in-bubble": {"limit": 1}}, world={"pp": 2}
        ),
    )

    def listed(self, base: Schedule) -> Schedule:
        return recompute_least(base, self.args.limit or max(base.shape.stages, least_limit(base)))

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return full_recompute("recompute-in-bubble is active")
