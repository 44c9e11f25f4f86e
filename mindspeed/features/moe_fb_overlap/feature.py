"""Forward and backward passes of two micro-batches that take turns at expert all-to-alls."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed import plugins as ms
from mindspeed.moe.conditions import experts_are_spread, needs_dispatcher
from mindspeed.pipeline.conditions import NO_SHARDED_MODEL, REPLACES_SCHEDULE, ScheduleArgs
from mindspeed.pipeline.feature import ScheduleFeature
from mindspeed.pipeline.operations import Costs, PipelineShape, Schedule
from mindspeed.pipeline.paired_conditions import PAIRED_TRANSFERS, know_one_pass
from mindspeed.plugins.shared_conditions import has_experts

_REMOVE = ms.Fix.remove_feature()


class MoeFbOverlapArgs(ScheduleArgs):
    """Settings of moe-fb-overlap."""


@ms.condition(
    "{feature} pairs passes in Megatron's interleaved schedule, but pp is {world.pp} and vpp is {world.vpp}",
    fix=(ms.Fix.give_field("vpp", 2, or_more=True), _REMOVE),
)
def stages_have_chunks(args: MoeFbOverlapArgs, world: ms.World) -> bool:
    """Check that a pipeline is interleaved."""
    return bool(world.pp == 1 or world.vpp > 1)


def _has_stages(args: MoeFbOverlapArgs, world: ms.World) -> bool:
    """Return whether the model is on several pipeline stages."""
    return world.pp > 1


def _group(world: ms.World) -> int:
    """Return how many micro-batches pass a chunk one after the other."""
    return world.micro_batch_group or world.pp


def _least(args: MoeFbOverlapArgs, world: ms.World) -> Mapping[str, int]:
    """Return the fewest micro-batches, and the batch that has them."""
    least = 2 * _group(world) if world.pp > 1 else 2
    return {"least": least, "batch": least * world.micro_batch_size * world.dp}


@ms.condition(
    "the number of micro-batches per step is {world.num_micro_batches}, but {feature} needs at least {least}, because one of "
    "them runs ahead of the others",
    fix=(ms.Fix.give_field("global_batch_size", "{batch}", or_more=True), _REMOVE),
    when=_has_stages,
    values=_least,
)
def micro_batches_make_pairs(args: MoeFbOverlapArgs, world: ms.World) -> bool:
    """Check that a micro-batch can run ahead."""
    return world.num_micro_batches > _group(world)


def _has_no_stages(args: MoeFbOverlapArgs, world: ms.World) -> bool:
    """Return whether the model is on one pipeline stage."""
    return world.pp == 1


@ms.condition(
    "a step has one micro-batch, so {feature} has no other one to overlap its all-to-alls with",
    fix=(ms.Fix.give_field("global_batch_size", "{batch}", or_more=True), _REMOVE),
    when=_has_no_stages,
    otherwise="warn",
    values=_least,
)
def there_is_another_micro_batch(args: MoeFbOverlapArgs, world: ms.World) -> bool:
    """Check that a step has two micro-batches."""
    return world.num_micro_batches > 1


class MoeFbOverlap(ScheduleFeature[MoeFbOverlapArgs]):
    """Overlap all-to-alls with another micro-batch.

    While the tokens of one pass travel to experts and back, the other pass computes. The schedule is Megatron's, with one more
    forward pass ahead.
    """

    spec = ms.FeatureSpec(
        name="moe-fb-overlap",
        category=ms.Category.MOE,
        slots={ms.Slot.PIPELINE_SCHEDULE},
        constraints=(
            ms.Requires(
                "expert-parallel",
                reason="moe-fb-overlap overlaps the all-to-alls of the dispatcher that expert-parallel selects",
                settings={"dispatcher": "alltoall"},
            ),
            has_experts,
            experts_are_spread,
            needs_dispatcher("alltoall"),
            stages_have_chunks,
            micro_batches_make_pairs,
            there_is_another_micro_batch,
            *REPLACES_SCHEDULE,
            NO_SHARDED_MODEL,
            *know_one_pass("swap-attention", "adaptive-recompute", "recompute-in-advance", "recompute-in-bubble"),
        ),
        numerics=ms.Numerics.exact(),
        verify_with=ms.VerifyWith(world={"ep": 2}),
        own_trainer='from mindspeed.parallel import Pipeline  # schedule="paired"',
    )

    def planned_schedule(self, shape: PipelineShape, costs: Costs) -> Schedule:
        from mindspeed.pipeline.synthesis import paired

        return paired(shape)

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [*PAIRED_TRANSFERS]
