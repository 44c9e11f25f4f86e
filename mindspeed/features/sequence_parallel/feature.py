"""The parts between tensor-parallel regions on a share of the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Estimate,
    Feature,
    FeatureArgs,
    FeatureSpec,
    GiveField,
    MegatronFlag,
    Numerics,
    RemoveFeature,
    Requires,
    Traffic,
    World,
    condition,
    hookimpl,
)


@condition(
    "sequence-parallel splits the sequence over tensor-parallel ranks, but tp is {world.tp}",
    fix=(GiveField("tp", 2, or_more=True), RemoveFeature()),
)
def ranks_share_the_sequence(args: FeatureArgs, world: World) -> bool:
    """Check that there are several tensor-parallel ranks."""
    return bool(world.tp > 1)


@condition(
    "sequence length {world.seq_length} is not divisible by tp x cp = {world.tp} x {world.cp}",
    fix=(GiveField("seq_length", note="a multiple of {world.tp} x {world.cp}"),),
)
def sequence_divides(args: FeatureArgs, world: World) -> bool:
    """Check that each rank gets as many tokens."""
    return bool(world.seq_length % (world.tp * world.cp) == 0)


class SequenceParallel(Feature[FeatureArgs]):
    """Split norms and dropout along the sequence.

    Norms, dropout and residuals work on 1 / tp of the tokens. The all-reduce of a linear layer becomes a reduce-scatter
    and an all-gather.
    """

    spec = FeatureSpec(
        name="sequence-parallel",
        category=Category.MEGATRON,
        level=0,
        constraints=(
            Requires("tensor-parallel", reason="sequence-parallel splits the sequence over tensor-parallel ranks"),
            ranks_share_the_sequence,
            sequence_divides,
        ),
        megatron_flags=(MegatronFlag("sequence_parallel", switch="on", size="tp"),),
        numerics=Numerics.reordered(
            reason="each rank sums the gradients of norm weights over its part of the sequence, and the sums are "
            "added over ranks"
        ),
    )

    @hookimpl
    def estimate(self) -> Estimate:
        from mindspeed.job.arithmetic import BYTES

        world: Any = self.world
        share = world.micro_batch_size * world.seq_length * world.hidden_size * BYTES[world.dtype] / (world.cp * world.tp)
        # halves of all-reduces stand where these stood, and backward gathers twice more for the gradients of weights
        more = Traffic("tp", "all_gather", share * (world.tp - 1), calls=2 * (world.tp > 1), forward=0)
        return Estimate(traffic=(more,))

    @hookimpl
    def variants(self) -> Sequence[Mapping[str, Any]]:
        return [{}]

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [
            ArgOverride(
                "sequence_parallel", True, "splits the sequence over the tensor-parallel ranks outside of linear layers"
            )
        ]
