"""Recomputation of layers or modules while a stage waits for the gradient of its output."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mindspeed import plugins as ms
from mindspeed.memory.conditions import groups_fill_chunks, modules_have_experts
from mindspeed.pipeline.conditions import ScheduleArgs, full_recompute
from mindspeed.pipeline.operations import Schedule
from mindspeed.pipeline.recomputation import recompute_all
from mindspeed.pipeline.recompute_feature import CONSTRAINTS, RecomputeFeature


class RecomputeInAdvanceArgs(ScheduleArgs):
    granularity: Literal["full", "selective"] = ms.Field(
        "full", description="What to recompute: full (whole layers) or selective (only those in recompute-in-advance.modules)"
    )
    num_layers: int = ms.Field(
        1,
        ge=1,
        description="With full granularity: number of consecutive layers that are recomputed together; only the input of the "
        "first one is kept. In a HybridModel, each character of the pattern is a layer",
    )
    modules: tuple[Literal["core_attn", "moe", "shared_experts"], ...] = ms.Field(
        ("core_attn",), min_length=1, description="With selective granularity: the modules that are recomputed"
    )


def _groups_layers(args: RecomputeInAdvanceArgs, world: ms.World) -> bool:
    """Return whether several layers are recomputed as one group."""
    return args.granularity == "full" and args.num_layers > 1


def _takes_experts(args: RecomputeInAdvanceArgs, world: ms.World) -> bool:
    """Return whether experts are among the modules."""
    return args.granularity == "selective" and not {"moe", "shared_experts"}.isdisjoint(args.modules)


class RecomputeInAdvance(RecomputeFeature[RecomputeInAdvanceArgs]):
    """Recompute a stage before its gradient arrives.

    The forward pass of a stage is repeated before its gradient arrives, so that the pipeline does not wait for it.
    """

    spec = ms.FeatureSpec(
        name="recompute-in-advance",
        category=ms.Category.MEMORY,
        slots={ms.Slot.RECOMPUTE_POLICY},
        constraints=(
            ms.Requires(
                "pipeline-parallel", reason="recompute-in-advance recomputes while a pipeline stage waits for another one"
            ),
            *CONSTRAINTS,
            replace(groups_fill_chunks, when=_groups_layers),
            replace(modules_have_experts, when=_takes_experts),
        ),
        numerics=ms.Numerics.exact(),
        verify_with=ms.VerifyWith(features=("pipeline-parallel",), world={"pp": 2}),
        own_trainer="from mindspeed.parallel import Checkpoint",
    )

    def listed(self, base: Schedule) -> Schedule:
        return recompute_all(base)

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        reason = (
            f"makes Megatron recompute what recompute-in-advance.granularity={self.args.granularity} selects: all layers in "
            "groups of num_layers (full), or only the modules of recompute-in-advance.modules (selective)"
        )
        if self.args.granularity == "full":
            return full_recompute(reason, self.args.num_layers)
        return [
            ms.ArgOverride("recompute_granularity", "selective", reason),
            ms.ArgOverride("recompute_modules", self.args.modules, reason),
        ]
