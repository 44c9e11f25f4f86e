"""The parts between tensor-parallel regions on a share of the sequence."""

from __future__ import annotations

from typing import Any

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
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
    hookimpl,
)


def _estimate(args: FeatureArgs, world: Any) -> Estimate:
    from mindspeed.job.arithmetic import BYTES

    share = world.micro_batch_size * world.seq_length * world.hidden_size * BYTES[world.dtype] / (world.cp * world.tp)
    # halves of all-reduces stand where these stood, and backward gathers twice more for the gradients of weights
    more = Traffic("tp", "all_gather", share * (world.tp - 1), calls=2 * (world.tp > 1), forward=0)
    return Estimate(traffic=(more,))


class SequenceParallel(Feature[FeatureArgs]):
    """Norms, dropout and residuals work on 1 / tp of the tokens; the all-reduce becomes reduce-scatter and all-gather."""

    spec = FeatureSpec(
        name="sequence-parallel",
        summary="Norms, dropout and residuals on each tensor-parallel rank's share of the sequence",
        category=Category.MEGATRON,
        level=0,
        constraints=(
            Requires("tensor-parallel", reason="the sequence is shared out among its ranks"),
            Check(
                lambda args, world: world.tp > 1,
                "the sequence is shared out among tensor-parallel ranks, and there is {world.tp}",
                fix=(GiveField("tp", 2, or_more=True), RemoveFeature()),
            ),
            Check(
                lambda args, world: world.seq_length % (world.tp * world.cp) == 0,
                "sequence length {world.seq_length} is not a multiple of tp x cp = {world.tp} x {world.cp}",
                fix="use a --seq-length that is a multiple of {world.tp} x {world.cp}",
            ),
        ),
        applies=lambda args, world: world.tp > 1,
        megatron_flags=(MegatronFlag("sequence_parallel", switch="on", size="tp"),),
        estimate=_estimate,
        variants=lambda world: [{}],
        numerics=Numerics.reordered(reason="gradients of norm weights are sums of shares of the sequence"),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [ArgOverride("sequence_parallel", True, "sequence-parallel is active")]
