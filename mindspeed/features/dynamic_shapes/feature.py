"""Micro-batches of different lengths in a pipeline."""

from __future__ import annotations

from mindspeed import plugins as ms
from mindspeed.pipeline.conditions import has_stages


def _splits_sequences(args: ms.FeatureArgs, world: ms.World) -> bool:
    """Return whether context parallelism splits sequences."""
    return bool(world.cp > 1)


class DynamicShapes(ms.Feature[ms.FeatureArgs]):
    """Support micro-batches of different lengths.

    Each pipeline stage sends the shape of a tensor to the next stage before the tensor itself.
    """

    spec = ms.FeatureSpec(
        name="dynamic-shapes",
        category=ms.Category.PARALLEL,
        constraints=(
            ms.Requires("pipeline-parallel", reason="dynamic-shapes changes the messages between pipeline stages"),
            has_stages,
            ms.Condition.divides(
                "seq_length",
                (2, "cp"),
                "a sequence of {world.seq_length} tokens cannot be split into 2 x cp = 2 x {world.cp} equal chunks",
                fix=(ms.Fix.advise("pad every micro-batch to a multiple of 2 x {world.cp} tokens"),),
                when=_splits_sequences,
            ),
        ),
        numerics=ms.Numerics.reordered(
            reason="the first and the last stage sum the gradient of tied embeddings, so the summation order differs from "
            "training in one process"
        ),
        verify_with=ms.VerifyWith(world={"pp": 2}),
        own_trainer="from mindspeed.parallel import Pipeline",
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        why = "Megatron requires this dispatcher with variable_seq_lengths, even if the model has no experts"
        return [
            ms.ArgOverride("variable_seq_lengths", True, "pipeline stages send the shape of a tensor before the tensor"),
            ms.ArgOverride("moe_token_dispatcher_type", "alltoall", why),
        ]
