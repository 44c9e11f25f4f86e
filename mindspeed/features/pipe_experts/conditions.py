"""Settings and conditions of experts that are computed one after another. Light."""

from __future__ import annotations

from mindspeed import plugins as ms
from mindspeed.moe.conditions import is_sparse


class PipeExpertsArgs(ms.FeatureArgs):
    parts: int = ms.Field(
        1,
        ge=1,
        description="Number of slices into which the tokens of each expert are split. The all-to-all of one slice overlaps "
        "with the computation of another slice. 1 = only all-to-alls and computations of different experts of a rank overlap",
    )
    streams: bool = ms.Field(
        False,
        description="Run transfers of the expert-parallel and of the expert-tensor-parallel group one after the other (true) "
        "or at the same time (false). Use true if both groups share one link",
    )


def _has_slices(args: PipeExpertsArgs, world: ms.World) -> bool:
    """Return whether the inputs of an expert are sliced."""
    return args.parts > 1


def _has_streams(args: PipeExpertsArgs, world: ms.World) -> bool:
    """Return whether transfers of two groups are kept apart."""
    return args.streams


@ms.condition(
    "every expert is on one rank (ep x tp = {world.ep} x {world.tp}), so {feature} has no transfer to overlap",
    fix=(ms.GiveField("ep", 2, or_more=True), ms.RemoveFeature()),
)
def ranks_exchange_rows(args: PipeExpertsArgs, world: ms.World) -> bool:
    """Check that rows travel between ranks."""
    return world.ep * world.tp > 1


@ms.condition(
    "each rank has one expert ({world.num_experts} experts / ep={world.ep}), whose tokens are in one slice "
    "(parts={args.parts}). So the rank has no other slice to compute during the all-to-all of this slice",
    fix=(ms.GiveSetting("parts", 2), ms.GiveField("ep", note="smaller than {world.num_experts}")),
    when=is_sparse,
)
def ranks_have_units(args: PipeExpertsArgs, world: ms.World) -> bool:
    """Check that a rank computes more than one unit."""
    return bool(args.parts * world.num_experts > world.ep)


@ms.condition(
    "parts={args.parts} is greater than the {world.seq_length} x {world.micro_batch_size} tokens of a micro-batch, the "
    "maximum that an expert can receive",
    fix=(ms.GiveSetting("parts", note="smaller than {args.parts}"),),
    when=_has_slices,
)
def slices_have_tokens(args: PipeExpertsArgs, world: ms.World) -> bool:
    """Check that there are as many tokens as slices."""
    return bool(args.parts <= world.seq_length * world.micro_batch_size)


@ms.condition(
    "streams=true separates expert-parallel from expert-tensor-parallel transfers, but experts are not split over "
    "tensor-parallel ranks, so only expert-parallel transfers exist",
    fix=(ms.DropSetting("streams"), ms.GiveField("tp", 2, or_more=True)),
    when=_has_streams,
)
def ranks_share_experts(args: PipeExpertsArgs, world: ms.World) -> bool:
    """Check that several tensor-parallel ranks share an expert."""
    return bool((world.expert_tensor_size if world.knows("expert_tensor_size") else world.tp) > 1)
