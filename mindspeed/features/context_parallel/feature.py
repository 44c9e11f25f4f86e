"""A sequence spread over ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager

from mindspeed.plugins import (
    ArgOverride,
    Category,
    CheckpointState,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    GiveField,
    Numerics,
    Patch,
    RequiresSlot,
    Slot,
    VerifyWith,
    World,
    Wrap,
    condition,
    hookimpl,
)


class ContextParallelArgs(FeatureArgs):
    size: int = Field(1, ge=1, description="number of ranks that share every sequence")
    algorithm: str | None = Field(
        None,
        description="feature that computes attention, such as ring-attention; auto chooses the one that sends fewest bytes",
    )


def _is_spread(args: ContextParallelArgs, world: World) -> bool:
    """Return whether sequences are spread over several ranks."""
    return args.size > 1


@condition(
    "sequence length {world.seq_length} is not divisible by cp={args.size}",
    fix=(GiveField("seq_length", note="a multiple of {args.size}"),),
    when=_is_spread,
)
def sequence_divides(args: ContextParallelArgs, world: World) -> bool:
    """Check that each rank gets as many tokens."""
    return bool(world.seq_length % args.size == 0)


@condition(
    "hybrid_context_parallel gives each sample a group of ranks, but cp={args.size} spreads all samples over one group",
    fix=(GiveField("hybrid_context_parallel", False), GiveField("cp", 1)),
    when=_is_spread,
)
def samples_share_a_group(args: ContextParallelArgs, world: World) -> bool:
    """Check that Megatron does not spread samples over ranks by their length."""
    return not world.hybrid_context_parallel


class ContextParallel(Feature[ContextParallelArgs]):
    """Split every sequence over ranks, with the attention algorithm of your choice.

    A loss counts each token once: ranks may hold different numbers of tokens that count, so Megatron divides the sum of
    gradients by the number of tokens of all ranks.
    """

    spec = FeatureSpec(
        name="context-parallel",
        category=Category.CONTEXT_PARALLEL,
        sizes={"cp": "size"},
        constraints=(
            RequiresSlot(
                Slot.CONTEXT_PARALLEL,
                reason="attention has to look beyond the tokens of a rank: name ring-attention, ulysses-attention or another",
                when=_is_spread,
                setting="algorithm",
            ),
            sequence_divides,
            samples_share_a_group,
        ),
        numerics=Numerics.reordered(reason="gradients are sums of shares of the sequence"),
        state=CheckpointState("resharded", "weights are the same on every rank of the group"),
        verify_with=VerifyWith(settings={"context-parallel": {"algorithm": "auto"}}, world={"cp": 2}),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        overrides = [ArgOverride("context_parallel_size", self.args.size, "context-parallel.size")]
        if self.args.size > 1:
            overrides.append(
                ArgOverride("calculate_per_token_loss", True, "ranks may hold different numbers of tokens that count")
            )
        return overrides

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Wrap(
                "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
                "mindspeed.features.context_parallel.loss:with_per_token_loss_check",
                "a loss function of two values would make gradients too large, and is reported",
                optional=True,
            ),
        ]

    @hookimpl
    def around_schedule(self, forward_only: bool) -> AbstractContextManager[None] | None:
        if forward_only:
            return None
        from megatron.core import parallel_state

        from mindspeed.features.context_parallel.randomness import rank_rng

        return rank_rng(parallel_state.get_context_parallel_rank())
