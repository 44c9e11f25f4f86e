"""Settings of zero-bubble, and which of them fit which job. Light."""

from __future__ import annotations

from typing import Final, Literal

from mindspeed.pipeline.declarations import ScheduleArgs, keeps_an_order, needs_stages
from mindspeed.pipeline.operations import Costs, PipelineShape, Placement, Schedule
from mindspeed.pipeline.recomputation import LimitTooSmallError, least_limit
from mindspeed.pipeline.refusals import ARGUMENTS, TIED, UNTIE, can_place_v, v_arguments
from mindspeed.pipeline.synthesis import fastest
from mindspeed.plugins import Advice, Before, Check, Conflicts, Constraint, Field, GiveField, Requires, Slot, World


class ZeroBubbleArgs(ScheduleArgs):
    placement: Placement = Field(
        "loop", description="stages on ranks: loop as Megatron has them; v, two on each rank, with the activations of 1F1B"
    )
    costs: tuple[float, float, float, float] | Literal["measured"] = Field(
        (1.0, 1.0, 1.0, 1.0),
        description="durations of forward, input gradient, weight gradient and recompute of a model chunk; measured: in the "
        "second and third step",
    )
    hop: float = Field(0.0, ge=0, description="duration of a message between two ranks, in the unit of costs, measured: in ms")
    recompute: Literal["none", "all", "least"] = Field(
        "none", description="whole layers: none, every one ahead of its gradient, or as few as the limit allows"
    )
    limit: int | None = Field(
        None,
        ge=1,
        description="activation sets of a chunk and a micro-batch that a rank may keep; with least pp x vpp if not given",
    )
    output_layer: bool = Field(False, description="the weight gradient of the output layer waits too")


def given_costs(args: ZeroBubbleArgs) -> Costs:
    """Return the costs of the settings; all equal until they are measured."""
    return Costs(hop=args.hop) if args.costs == "measured" else Costs(*args.costs, hop=args.hop)


def planned(args: ZeroBubbleArgs, shape: PipelineShape, costs: Costs) -> Schedule:
    """Return the fastest list for the costs. Raises ValueError where none keeps the limit."""
    limit = shape.stages if args.limit is None and args.recompute == "least" else args.limit
    return fastest(shape, costs, args.recompute, limit)[0]


def _shape(args: ZeroBubbleArgs, world: World) -> PipelineShape:
    return PipelineShape(world.pp, world.vpp, max(1, world.num_micro_batches), args.placement)


def _least(args: ZeroBubbleArgs, world: World) -> int:
    """Return the least limit that a list keeps: the limit itself where one does, or the placement is refused for vpp."""
    if args.placement == "v" and world.vpp != 2:
        return args.limit or 0
    try:
        planned(args, _shape(args, world), given_costs(args))
    except LimitTooSmallError as error:
        return error.least
    return args.limit or 0


def _least_listed(args: ZeroBubbleArgs, world: World) -> int:
    """Return the least limit of a feature that recomputes a part of the sets of this list."""
    if args.placement == "v" and world.vpp != 2:
        return 0
    return least_limit(planned(args, _shape(args, world), given_costs(args)))


def _is_v(args: ZeroBubbleArgs, world: World) -> bool:
    return args.placement == "v"


REFUSALS: Final = (*ARGUMENTS, *v_arguments(_is_v))
_LOOP: Final = "--set zero-bubble.placement=loop"
CONSTRAINTS: Final[tuple[Constraint, ...]] = (
    Requires("pipeline-parallel", reason="it fills the idle time of its stages"),
    needs_stages("zero-bubble"),
    *keeps_an_order("zero-bubble"),
    Conflicts(
        Slot.RECOMPUTE_POLICY,
        reason="zero-bubble.recompute recomputes itself",
        when=lambda args, world: args.recompute != "none",
    ),
    Check(
        lambda args, world: min(args.costs) > 0,
        "a duration of {args.costs} is not above 0",
        fix="--set zero-bubble.costs=[1,1,1,1]",
        when=lambda args, world: args.costs != "measured",
    ),
    Check(
        lambda args, world: args.limit >= _least(args, world),
        "no list of operations keeps {args.limit} activation sets, and the least possible is {least}",
        fix="--set zero-bubble.limit={least}, or a smaller one with --set zero-bubble.recompute=least",
        when=lambda args, world: args.limit is not None,
        values=lambda args, world: {"least": _least(args, world)},
    ),
    Check(
        lambda args, world, other: other.limit is None or other.limit >= _least_listed(args, world),
        "{least} activation sets wait for weight gradients at once, and recompute-in-bubble.limit is {other.limit}",
        fix="--set recompute-in-bubble.limit={least}",
        of="recompute-in-bubble",
        when=lambda args, world: args.recompute == "none" and args.limit is None,
        values=lambda args, world: {"least": _least_listed(args, world)},
    ),
    Check(
        lambda args, world: world.vpp == 2,
        "a V has two model chunks on each rank, and vpp is {world.vpp}",
        fix=(GiveField("vpp", 2), Advice(_LOOP)),
        when=_is_v,
    ),
    Check(
        lambda args, world: not world.tied_embeddings,
        TIED,
        fix=UNTIE,
        when=_is_v,
    ),
    Check(
        lambda args, world: world.mtp_num_layers == 0,
        "placement v has no place for the {world.mtp_num_layers} layers of multi-token prediction",
        fix=f"--mtp-num-layers 0, or {_LOOP}",
        when=_is_v,
    ),
    Check(
        lambda args, world: not world.layer_split,
        "placement v has equal stages, and another feature deals out {world.layer_split} layers",
        fix=f"remove that feature, or {_LOOP}",
        when=_is_v,
    ),
    Check(
        lambda args, world: can_place_v(world.megatron),
        "placement v is for Megatron 0.14 to 0.18, and this is {world.megatron}",
        fix=_LOOP,
        when=_is_v,
    ),
    Before("matmul-add"),
)
