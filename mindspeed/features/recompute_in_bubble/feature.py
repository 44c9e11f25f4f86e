"""As few recomputed activations as keep every rank within a limit, each recomputed before its gradient arrives."""

from __future__ import annotations

from mindspeed import plugins as ms
from mindspeed.pipeline.conditions import ScheduleArgs, full_recompute
from mindspeed.pipeline.operations import Schedule
from mindspeed.pipeline.recomputation import least_limit, recompute_least
from mindspeed.pipeline.recompute_feature import CONSTRAINTS, RecomputeFeature


class RecomputeInBubbleArgs(ScheduleArgs):
    limit: int | None = ms.Field(
        None,
        ge=1,
        description="Maximum number of forward passes whose activations a rank keeps (default: pp x vpp). One pass = one "
        "micro-batch in one model chunk. Smaller = less memory, more recomputation",
    )


class RecomputeInBubble(RecomputeFeature[RecomputeInBubbleArgs]):
    """Recompute activations in pipeline bubbles.

    Each rank keeps the activations of only a limited number of forward passes. Activations that backward needs last are
    freed, and their forward pass is repeated in a pipeline bubble.
    """

    spec = ms.FeatureSpec(
        name="recompute-in-bubble",
        category=ms.Category.MEMORY,
        slots={ms.Slot.RECOMPUTE_POLICY},
        constraints=(
            ms.Requires(
                "pipeline-parallel",
                reason="recompute-in-bubble recomputes in the pipeline bubbles, while a stage waits for another one",
            ),
            *CONSTRAINTS,
        ),
        numerics=ms.Numerics.exact(),
        verify_with=ms.VerifyWith(
            features=("pipeline-parallel",), settings={"recompute-in-bubble": {"limit": 1}}, world={"pp": 2}
        ),
        own_trainer="it moves recomputation into the bubbles of Megatron's pipeline",
    )

    def listed(self, base: Schedule) -> Schedule:
        return recompute_least(base, self.args.limit or max(base.shape.stages, least_limit(base)))

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return full_recompute("recompute-in-bubble recomputes whole layers, one by one")
