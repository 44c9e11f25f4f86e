"""Recomputation of layers or modules while a stage waits for the gradient of its output."""

from __future__ import annotations

from typing import Literal

from mindspeed.pipeline.declarations import ScheduleArgs, full_recompute, keeps_an_order, needs_stages
from mindspeed.pipeline.operations import Schedule
from mindspeed.pipeline.recomputation import recompute_all
from mindspeed.pipeline.recompute_feature import RecomputeFeature
from mindspeed.pipeline.refusals import RECOMPUTE_ARGUMENTS
from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    FeatureSpec,
    Field,
    Numerics,
    Requires,
    Slot,
    VerifyWith,
    hookimpl,
)


class RecomputeInAdvanceArgs(ScheduleArgs):
    granularity: Literal["full", "selective"] = Field("full", description="whole layers, or chosen modules")
    num_layers: int = Field(1, ge=1, description="full: layers that are recomputed as one group")
    modules: tuple[Literal["core_attn", "moe", "shared_experts"], ...] = Field(
        ("core_attn",), min_length=1, description="selective: the modules"
    )


class RecomputeInAdvance(RecomputeFeature[RecomputeInAdvanceArgs]):
    """Repeat the forward pass of a stage before its gradient arrives, so that the pipeline does not wait for it."""

    spec = FeatureSpec(
        name="recompute-in-advance",
        summary="Activations recomputed while the gradient is on its way from the next pipeline stage",
        category=Category.MEMORY,
        slots={Slot.RECOMPUTE_POLICY},
        constraints=(
            Requires("pipeline-parallel", reason="it recomputes while a stage waits for another one"),
            needs_stages("recompute-in-advance"),
            *keeps_an_order("recompute-in-advance"),
            Check(
                lambda args, world: all(layers % args.num_layers == 0 for layers in world.layers_per_chunk),
                "groups of {args.num_layers} layers do not fill every model chunk: they have {world.layers_per_chunk} layers",
                fix="--set recompute-in-advance.num_layers=1, or another common divisor",
                when=lambda args, world: args.granularity == "full" and args.num_layers > 1,
            ),
            Check(
                lambda args, world: world.num_experts > 0,
                "moe and shared_experts are modules of a MoE model, and this one is dense",
                fix="remove moe and shared_experts from recompute-in-advance.modules",
                when=lambda args, world: (
                    args.granularity == "selective" and not {"moe", "shared_experts"}.isdisjoint(args.modules)
                ),
            ),
        ),
        megatron_refusals=RECOMPUTE_ARGUMENTS,
        numerics=Numerics.exact(),
        verify_with=VerifyWith(features=("pipeline-parallel",), world={"pp": 2}),
    )

    def listed(self, base: Schedule) -> Schedule:
        return recompute_all(base)

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        reason = f"recompute-in-advance.granularity={self.args.granularity}"
        if self.args.granularity == "full":
            return full_recompute(reason, self.args.num_layers)
        return [
            ArgOverride("recompute_granularity", "selective", reason),
            ArgOverride("recompute_modules", self.args.modules, reason),
        ]
