"""The parts between tensor-parallel regions on a share of the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed import plugins as ms


class SequenceParallel(ms.Feature[ms.FeatureArgs]):
    """Split norms and dropout along the sequence.

    Norms, dropout and residuals work on 1 / tp of the tokens. The all-reduce of a linear layer becomes a reduce-scatter
    and an all-gather.
    """

    spec = ms.FeatureSpec(
        name="sequence-parallel",
        category=ms.Category.MEGATRON,
        level=0,
        constraints=(
            ms.Requires("tensor-parallel", reason="sequence-parallel splits the sequence over tensor-parallel ranks"),
            ms.Condition.at_least(
                "tp", 2, "sequence-parallel splits the sequence over tensor-parallel ranks, but tp is {world.tp}"
            ),
            ms.Condition.divides(
                "seq_length",
                ("tp", "cp"),
                "sequence length {world.seq_length} is not divisible by tp x cp = {world.tp} x {world.cp}",
                fix=(ms.Fix.give_field("seq_length", note="a multiple of {world.tp} x {world.cp}"),),
            ),
        ),
        megatron_flags=(ms.MegatronFlag("sequence_parallel", switch="on", size="tp"),),
        numerics=ms.Numerics.reordered(
            reason="each rank sums the gradients of norm weights over its part of the sequence, and the sums are "
            "added over ranks"
        ),
        own_trainer="from mindspeed.nn import ColumnParallelLinear, RowParallelLinear  # sequence_parallel=True",
    )

    @ms.hookimpl
    def estimate(self) -> ms.Estimate:
        from mindspeed.job.arithmetic import BYTES

        world: Any = self.world
        share = world.micro_batch_size * world.seq_length * world.hidden_size * BYTES[world.dtype] / (world.cp * world.tp)
        # halves of all-reduces stand where these stood, and backward gathers twice more for the gradients of weights
        more = ms.Traffic("tp", "all_gather", share * (world.tp - 1), calls=2 * (world.tp > 1), forward=0)
        return ms.Estimate(traffic=(more,))

    @ms.hookimpl
    def variants(self) -> Sequence[Mapping[str, Any]]:
        return [{}]

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [
            ms.ArgOverride(
                "sequence_parallel", True, "splits the sequence over the tensor-parallel ranks outside of linear layers"
            )
        ]
