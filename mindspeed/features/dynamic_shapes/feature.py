"""Micro-batches of different lengths in a pipeline."""

from __future__ import annotations

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    Feature,
    FeatureArgs,
    FeatureSpec,
    GiveField,
    Numerics,
    RemoveFeature,
    Requires,
    VerifyWith,
    hookimpl,
)


class DynamicShapes(Feature[FeatureArgs]):
    """Tell the next stage the shape of each tensor before the tensor, so that micro-batches may differ in length."""

    spec = FeatureSpec(
        name="dynamic-shapes",
        summary="Micro-batches of different lengths in a pipeline",
        category=Category.PARALLEL,
        constraints=(
            Requires("pipeline-parallel", reason="tensors travel between its stages"),
            Check(
                lambda args, world: world.pp > 1,
                "one stage receives no tensors, and there is {world.pp}",
                fix=(GiveField("pp", 2, or_more=True), RemoveFeature()),
            ),
            Check(
                lambda args, world: world.seq_length % (2 * world.cp) == 0,
                "a sequence of {world.seq_length} tokens does not divide into 2 x cp = 2 x {world.cp} pieces",
                fix="pad every micro-batch to a multiple of 2 x {world.cp} tokens",
                when=lambda args, world: world.cp > 1,
            ),
        ),
        numerics=Numerics.reordered(reason="as pipeline-parallel; shapes change no number"),
        verify_with=VerifyWith(world={"pp": 2}),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        why = "Megatron refuses other shapes with its default dispatcher, also for a dense model"
        return [
            ArgOverride("variable_seq_lengths", True, "dynamic-shapes is active"),
            ArgOverride("moe_token_dispatcher_type", "alltoall", why),
        ]
