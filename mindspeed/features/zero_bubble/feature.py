"""The fastest list of operations for given costs, with weight gradients apart and recomputation where it is hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from pydantic import field_validator

from mindspeed import plugins as ms
from mindspeed.memory.conditions import MAIN_WEIGHTS
from mindspeed.pipeline.conditions import (
    KEEPS_PASSES,
    LISTED_RECOMPUTE,
    STEP_REPEATED,
    WAITING_WEIGHTS,
    ScheduleArgs,
    full_recompute,
    planned_shape,
)
from mindspeed.pipeline.feature import ScheduleFeature
from mindspeed.pipeline.messages import VALIDATION
from mindspeed.pipeline.operations import Costs, PipelineShape, Placement, Schedule
from mindspeed.pipeline.recomputation import least_limit
from mindspeed.pipeline.v_conditions import V_PLACEMENT, v_conditions
from mindspeed.plugins.constraints import Constraint
from mindspeed.plugins.saved_tensors import SavedTensor, SavedTensors
from mindspeed.plugins.shared_conditions import NO_FSDP


class ZeroBubbleArgs(ScheduleArgs):
    placement: Placement = ms.Field(
        "loop",
        description="Placement of model chunks on pipeline ranks. loop = as in Megatron; v = two chunks per rank, the second "
        "in reverse rank order (ZB-V), with the activation memory of 1F1B",
    )
    costs: tuple[float, float, float, float] | Literal["measured"] = ms.Field(
        (1.0, 1.0, 1.0, 1.0),
        description="Durations of forward, input gradient, weight gradient and recomputation of a model chunk, for the "
        "simulator. Four numbers in the same unit of your choice, or the word measured. measured = training steps 2 and 3 "
        "measure the durations",
    )
    hop: float = ms.Field(
        0.0,
        ge=0,
        description="Duration of a message between two pipeline ranks for the simulator, in the same unit as costs (ms if "
        "costs=measured)",
    )
    recompute: Literal["none", "all", "least"] = ms.Field(
        "none",
        description="Forward passes that are recomputed before backward: none, all or least. least = as few passes as "
        "needed, so that a rank keeps the activations of at most zero-bubble.limit passes",
    )
    limit: int | None = ms.Field(
        None,
        ge=1,
        description="Maximum number of forward passes whose activations a rank keeps. One pass = one micro-batch in one model "
        "chunk. Default: pp x vpp with zero-bubble.recompute=least, otherwise no limit",
    )
    output_layer: bool = ms.Field(False, description="Also defer the weight gradient of the output layer")
    post_validation: bool = ms.Field(
        False,
        description="The optimizer step does not wait for the gradient norm of other stages. The norm is checked after the "
        "first forward passes of the next step. If the step clips gradients or is skipped, it is repeated with these passes",
    )

    @field_validator("costs")
    @classmethod
    def _costs_are_positive(cls, costs: tuple[float, ...] | str) -> tuple[float, ...] | str:
        if costs != "measured" and min(map(float, costs)) <= 0:
            raise ms.SettingsError("every duration must be greater than 0", ms.Fix.give_setting("costs", "measured"))
        return costs


def given_costs(args: ZeroBubbleArgs) -> Costs:
    """Return the costs of the settings; all equal until they are measured."""
    return Costs(hop=args.hop) if args.costs == "measured" else Costs(*args.costs, hop=args.hop)


def planned(args: ZeroBubbleArgs, shape: PipelineShape, costs: Costs) -> Schedule:
    """Return the fastest list for the costs. Raises ValueError where none keeps the limit."""
    from mindspeed.pipeline.search import fastest

    return fastest(shape, costs, args.recompute, args.limit, args.post_validation)[0]


def _least(args: ZeroBubbleArgs, world: ms.World) -> int:
    """Return the least limit that a schedule keeps: the limit itself where the placement is refused for vpp."""
    from mindspeed.pipeline.search import least_kept

    if args.placement == "v" and world.vpp != 2:
        return args.limit or 0
    return least_kept(planned_shape(world, args.placement)) if args.recompute == "none" else 1


def _least_listed(args: ZeroBubbleArgs, world: ms.World) -> int:
    """Return the least limit of a feature that recomputes a part of the sets of this list."""
    if args.placement == "v" and world.vpp != 2:
        return 0
    return least_limit(planned(args, planned_shape(world, args.placement), given_costs(args)))


def _is_v(args: ZeroBubbleArgs, world: ms.World) -> bool:
    """Return whether stages are placed as a V."""
    return args.placement == "v"


def _recomputes(args: ZeroBubbleArgs, world: ms.World) -> bool:
    """Return whether the schedule recomputes layers."""
    return args.recompute != "none"


def _has_limit(args: ZeroBubbleArgs, world: ms.World) -> bool:
    """Return whether activation sets are limited."""
    return args.limit is not None


def _least_kept(args: ZeroBubbleArgs, world: ms.World) -> Mapping[str, int]:
    """Return the least limit, for the text."""
    return {"least": _least(args, world)}


@ms.condition(
    "with {feature}.recompute={args.recompute}, every schedule keeps the activations of at least {least} forward passes, but "
    "{feature}.limit is {args.limit}",
    fix=(
        ms.Fix.give_setting("limit", "{least}"),
        ms.Fix.give_setting("recompute", "least", "recomputes the passes that exceed the limit"),
    ),
    when=_has_limit,
    values=_least_kept,
)
def limit_can_be_kept(args: ZeroBubbleArgs, world: ms.World) -> bool:
    """Check that a schedule keeps within the limit."""
    return args.limit is None or args.limit >= _least(args, world)


def _keeps_all_sets(args: ZeroBubbleArgs, world: ms.World) -> bool:
    """Return whether the schedule neither recomputes nor limits activation sets."""
    return args.recompute == "none" and args.limit is None


def _least_deferred(args: ZeroBubbleArgs, world: ms.World) -> Mapping[str, int]:
    """Return the least limit of recompute-in-bubble, for the text."""
    return {"least": _least_listed(args, world)}


@ms.condition(
    "deferred weight gradients need the activations of {least} forward passes, but recompute-in-bubble keeps those of at "
    "most {other.limit} (its setting limit)",
    fix=(ms.Fix.give_setting("recompute-in-bubble.limit", "{least}"),),
    of="recompute-in-bubble",
    when=_keeps_all_sets,
    values=_least_deferred,
)
def limit_keeps_deferred_sets(args: ZeroBubbleArgs, world: ms.World, other: Any) -> bool:
    """Check that the limit of recompute-in-bubble leaves the sets that wait for weight gradients."""
    return other.limit is None or other.limit >= _least_listed(args, world)


def _validates_later(args: ZeroBubbleArgs, world: ms.World) -> bool:
    """Return whether optimizer steps are validated after the warm-up of the next step."""
    return args.post_validation


_SYNCHRONIZE: Final = ms.Fix.give_setting("post_validation", False)


@ms.condition(
    "post_validation supports Megatron 0.14 to 0.17, but the version is {world.megatron}",
    fix=(_SYNCHRONIZE,),
    when=_validates_later,
)
def megatron_has_one_norm(args: ZeroBubbleArgs, world: ms.World) -> bool:
    """Check that a step of this release depends on one gradient norm; since 0.18 it has further limits and norms."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet("<0.18").contains(world.megatron, prereleases=True)


def _with_fix(condition: Any) -> Any:
    """The same condition of steps that are validated later; another fix is to synchronize them."""
    if isinstance(condition, ms.ModelCondition):
        return replace(condition, when=_validates_later)
    return replace(condition, fix=(_SYNCHRONIZE, *condition.fix), when=_validates_later)


def _apart(name: str, reason: str) -> ms.Conflicts:
    return ms.Conflicts(name, reason=reason, when=_validates_later, fix=(_SYNCHRONIZE,))


STEPS_CAN_BE_REPEATED: Final = (
    megatron_has_one_norm,
    *(_with_fix(condition) for condition in MAIN_WEIGHTS if condition is not NO_FSDP),
    ms.Condition.unset(
        "precision_aware_optimizer",
        "the precision-aware optimizer of Transformer Engine stores main weights itself, so post_validation cannot copy them",
        fix=(_SYNCHRONIZE,),
        when=_validates_later,
    ),
    ms.ModelCondition(
        "mindspeed.pipeline.post_validation:late_gathers", "weights are gathered before a step ends", when=_validates_later
    ),
    _apart(
        "async-param-gather", "post_validation gathers weights at the end of a step, but async-param-gather does in forward"
    ),
    *(
        _apart(name, f"post_validation copies main weights and optimizer states before a step, but {name} stores them itself")
        for name in ("swap-optimizer", "reuse-fp32-param", "bf16-moments")
    ),
    _apart("moe-load-report", "post_validation may repeat forward passes, whose tokens moe-load-report would count twice"),
)
"""Constraints of optimizer steps that are undone and repeated."""

CONSTRAINTS: Final[tuple[Constraint, ...]] = (
    ms.Requires("pipeline-parallel", reason="zero-bubble fills pipeline bubbles"),
    *KEEPS_PASSES,
    ms.Conflicts(
        ms.Slot.RECOMPUTE_POLICY,
        reason="zero-bubble.recompute already decides which activations are recomputed. adaptive-recompute, "
        "recompute-in-advance, recompute-in-bubble and recompute with granularity=full decide this too",
        when=_recomputes,
        fix=(ms.Fix.give_setting("recompute", "none"),),
    ),
    limit_can_be_kept,
    limit_keeps_deferred_sets,
    *v_conditions("placement=v", ms.Fix.give_setting("placement", "loop"), _is_v),
    ms.Before("matmul-add"),
    *STEPS_CAN_BE_REPEATED,
)


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
            reason="only with placement=v: ranks hold other layers than in Megatron, so initial weights and dropout of a layer "
            "have different random numbers. With placement=loop, results are bitwise identical to Megatron"
        ),
        state=ms.CheckpointState("resharded", "layers are saved under their number in the whole model"),
        verify_with=ms.VerifyWith(world={"pp": 2}),
        own_trainer='from mindspeed.parallel import Pipeline  # schedule="zb-h1"',
    )

    def planned_schedule(self, shape: PipelineShape, costs: Costs) -> Schedule:
        return planned(self.args, shape, costs)

    def placement(self) -> Placement:
        return self.args.placement

    def costs(self) -> Costs:
        return given_costs(self.args)

    def with_copies(self, tensors: SavedTensors) -> SavedTensors:
        """Add a copy of each weight in fp32 and of its states, which are twice as large."""
        if not self.args.post_validation:
            return tensors
        states = sum(tensor.bytes for tensor in tensors if tensor.name == "states")
        return (*tensors, SavedTensor("copies", states * 3 // 2, 1, by=self.spec.name))

    def engine_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"output_layer": self.args.output_layer, "measured": self.args.costs == "measured"}
        if self.args.post_validation:
            from mindspeed.pipeline.post_validation import open_validation

            options["validation"] = open_validation()
        return options

    @ms.hookimpl
    def communicators(self) -> Sequence[str]:
        return [*super().communicators(), *([VALIDATION] if self.args.post_validation else [])]

    @ms.hookimpl
    def optimizer_built(self, optimizer: Any) -> None:
        if self.engine is not None and self.engine.validation is not None:
            self.engine.validation.attach(optimizer)

    @ms.hookimpl
    def deactivated(self) -> None:
        if self.engine is not None and self.engine.validation is not None:
            self.engine.validation.detach()

    @ms.hookimpl
    def around_save(self) -> None:
        if self.engine is not None and self.engine.validation is not None:
            self.engine.validation.validate()

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
        later = STEP_REPEATED if self.args.post_validation else []
        return [WAITING_WEIGHTS, *listed, *later, *(V_PLACEMENT if self.args.placement == "v" else ())]
