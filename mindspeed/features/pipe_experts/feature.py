"""Capacity-gated experts one after another, while the rows of the others travel."""

from __future__ import annotations

from typing import Any

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


def _have_no_biases(args: PipeExpertsArgs, world: ms.World) -> bool:
    """Return whether experts have no biases, which grouped experts lack."""
    return not world.linear_bias


@ms.condition(
    "every expert is on one rank (ep x tp = {world.ep} x {world.tp}), so {feature} has no transfer to overlap",
    fix=(ms.Fix.give_field("ep", 2, or_more=True), ms.Fix.remove_feature()),
)
def ranks_exchange_rows(args: PipeExpertsArgs, world: ms.World) -> bool:
    """Check that rows travel between ranks."""
    return world.ep * world.tp > 1


@ms.condition(
    "each rank has one expert ({world.num_experts} experts / ep={world.ep}), whose tokens are in one slice "
    "(parts={args.parts}). So the rank has no other slice to compute during the all-to-all of this slice",
    fix=(ms.Fix.give_setting("parts", 2), ms.Fix.give_field("ep", note="smaller than {world.num_experts}")),
    when=is_sparse,
)
def ranks_have_units(args: PipeExpertsArgs, world: ms.World) -> bool:
    """Check that a rank computes more than one unit."""
    return bool(args.parts * world.num_experts > world.ep)


@ms.condition(
    "parts={args.parts} is greater than the {world.seq_length} x {world.micro_batch_size} tokens of a micro-batch, the "
    "maximum that an expert can receive",
    fix=(ms.Fix.give_setting("parts", note="smaller than {args.parts}"),),
    when=_has_slices,
)
def slices_have_tokens(args: PipeExpertsArgs, world: ms.World) -> bool:
    """Check that there are as many tokens as slices."""
    return bool(args.parts <= world.seq_length * world.micro_batch_size)


@ms.condition(
    "streams=true separates expert-parallel from expert-tensor-parallel transfers, but experts are not split over "
    "tensor-parallel ranks, so only expert-parallel transfers exist",
    fix=(ms.Fix.drop_setting("streams"), ms.Fix.give_field("tp", 2, or_more=True)),
    when=_has_streams,
)
def ranks_share_experts(args: PipeExpertsArgs, world: ms.World) -> bool:
    """Check that several tensor-parallel ranks share an expert."""
    return bool((world.expert_tensor_size if world.knows("expert_tensor_size") else world.tp) > 1)


class PipeExperts(ms.Feature[PipeExpertsArgs]):
    """Overlap expert dispatch, compute and return.

    The experts of deepspeed-moe run one by one, each in slices, so that transfers of one slice overlap with compute of
    another.
    """

    spec = ms.FeatureSpec(
        name="pipe-experts",
        category=ms.Category.DEEPSPEED_MOE,
        megatron=">=0.14,<0.17",
        constraints=(
            ms.Requires(
                "deepspeed-moe",
                reason="pipe-experts splits the inputs of experts into slices, and only deepspeed-moe gives them equal sizes "
                "on all ranks",
            ),
            ms.Requires(
                "moe-grouped-gemm",
                reason="pipe-experts reads the weights of all local experts from one tensor, which only the experts of "
                "moe-grouped-gemm have",
                when=_have_no_biases,
            ),
            ms.After("deepspeed-moe"),
            ms.After("moe-grouped-gemm"),
            ranks_exchange_rows,
            ranks_have_units,
            slices_have_tokens,
            ranks_share_experts,
            ms.ModelCondition(
                "mindspeed.features.pipe_experts.spec:missing_places",
                "parts is not greater than the capacity of an expert",
                fix=(
                    ms.Fix.give_setting("pipe-experts.parts", note="fewer"),
                    ms.Fix.give_setting("deepspeed-moe.capacity_factor", note="larger"),
                ),
            ),
        ),
        numerics=ms.Numerics.reordered(
            reason="the tokens of an expert are computed in slices instead of all at once. Smaller matrix products and the sum "
            "of weight gradients over slices change the summation order"
        ),
        verify_with=ms.VerifyWith(
            algorithm=("mindspeed.features.deepspeed_moe.units",),
            features=("deepspeed-moe",),
            settings={"pipe-experts": {"parts": 2}, "deepspeed-moe": {"groups": 4}},
            world={"ep": 2},
        ),
    )

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.pipe_experts.spec import with_units

        return with_units(spec, self.args)
