"""The schedule of DeepSeek-V3, cut in half: stages as a V, and pairs of forward and backward passes."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed import plugins as ms
from mindspeed.pipeline.conditions import NO_SHARDED_MODEL, REPLACES_SCHEDULE, WAITING_WEIGHTS, ScheduleArgs, has_stages
from mindspeed.pipeline.feature import ScheduleFeature
from mindspeed.pipeline.operations import Costs, PipelineShape, Placement, Schedule
from mindspeed.pipeline.paired_conditions import PAIRED_TRANSFERS, know_one_pass
from mindspeed.pipeline.v_conditions import V_PLACEMENT, v_conditions

_REMOVE = ms.Fix.remove_feature()


class DualPipeVArgs(ScheduleArgs):
    split_weights: bool = ms.Field(
        False,
        description="Compute weight gradients of linear layers apart from input gradients in the warm-up and cool-down phases, "
        "which makes the bubbles smaller",
    )


def _least(args: DualPipeVArgs, world: ms.World) -> Mapping[str, int]:
    """Return the fewest micro-batches, and the batch that has them."""
    least = 2 * world.pp - 1
    return {"least": least, "batch": least * world.micro_batch_size * world.dp}


@ms.condition(
    "the number of micro-batches per step is {world.num_micro_batches}, but {feature} needs at least 2 pp - 1 = {least}",
    fix=(ms.Fix.give_field("global_batch_size", "{batch}", or_more=True), _REMOVE),
    values=_least,
)
def micro_batches_fill_the_v(args: DualPipeVArgs, world: ms.World) -> bool:
    """Check that the V has a steady phase."""
    return world.num_micro_batches >= 2 * world.pp - 1


def _splits(args: DualPipeVArgs, world: ms.World) -> bool:
    """Return whether weight gradients are apart."""
    return args.split_weights


@ms.condition(
    "split_weights is set, but the linear layers of Transformer Engine compute both gradients at once",
    fix=(ms.Fix.drop_setting("split_weights"), ms.Fix.give_field("transformer_engine_layers", False)),
    when=_splits,
)
def linear_layers_are_split(args: DualPipeVArgs, world: ms.World) -> bool:
    """Check that linear layers are Megatron's local ones, or classes over them."""
    return not world.is_set("transformer_engine_layers") or world.is_set("engine_over_local")


class DualPipeV(ScheduleFeature[DualPipeVArgs]):
    """Pair passes of two chunks on a V of stages.

    Each pipeline rank has two model chunks, the second in reverse order of ranks. The forward pass of one chunk runs together
    with the backward pass of the other one. While the tokens of one pass travel to experts, the other pass computes.
    """

    spec = ms.FeatureSpec(
        name="dualpipev",
        category=ms.Category.PARALLEL,
        slots={ms.Slot.PIPELINE_SCHEDULE},
        constraints=(
            ms.Requires(
                "virtual-pipeline", reason="dualpipev has two model chunks on each pipeline rank", settings={"size": 2}
            ),
            has_stages,
            *REPLACES_SCHEDULE,
            NO_SHARDED_MODEL,
            linear_layers_are_split,
            ms.Conflicts(
                ms.Slot.LINEAR,
                reason="dualpipev.split_weights computes the weight gradients of linear layers itself",
                when=_splits,
            ),
            *v_conditions("dualpipev", _REMOVE),
            micro_batches_fill_the_v,
            *know_one_pass("swap-attention", "adaptive-recompute", "recompute-in-advance", "recompute-in-bubble"),
            ms.Before("matmul-add"),
        ),
        numerics=ms.Numerics.reordered(
            reason="ranks hold other layers than in Megatron, so initial weights and dropout of a layer have different random "
            "numbers. With equal weights and without dropout, results are bitwise identical to Megatron"
        ),
        state=ms.CheckpointState("resharded", "layers are saved under their number in the whole model"),
        verify_with=ms.VerifyWith(world={"pp": 2}),
        own_trainer='a V of your own modules is schedule="zb-v" of mindspeed.parallel.Pipeline, without pairs',
    )

    def planned_schedule(self, shape: PipelineShape, costs: Costs) -> Schedule:
        from mindspeed.pipeline.synthesis import dual_pipe_v

        return dual_pipe_v(shape, self.args.split_weights)

    def placement(self) -> Placement:
        return "v"

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        listed: list[ms.Patch] = [WAITING_WEIGHTS] if self.args.split_weights else []
        return [*listed, *PAIRED_TRANSFERS, *V_PLACEMENT]
