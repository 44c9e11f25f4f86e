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
    When,
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


def _needs_algorithm(args: ContextParallelArgs, world: World) -> bool:
    """Return whether sequences are spread, and no Transformer Engine has attention for them."""
    is_local = world.knows("transformer_engine_layers") and not world.transformer_engine_layers
    has_engine = world.is_set("engine_installed") and not world.is_set("engine_over_local") and not is_local
    return args.size > 1 and not has_engine


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
    """Split sequences over ranks by a chosen algorithm.

    The loss is that of one process: each micro-batch is divided by the tokens of all ranks, which may hold different numbers
    of tokens that count.
    """

    spec = FeatureSpec(
        name="context-parallel",
        category=Category.CONTEXT_PARALLEL,
        sizes={"cp": "size"},
        constraints=(
            RequiresSlot(
                Slot.CONTEXT_PARALLEL,
                reason="attention has to look beyond the tokens of a rank: name ring-attention, ulysses-attention or another",
                when=_needs_algorithm,
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
        return [ArgOverride("context_parallel_size", self.args.size, "context-parallel.size")]

    @hookimpl
    def patches(self) -> list[Patch]:
        if self.args.size == 1:
            return []
        calc_loss = "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss"
        further = "megatron.core.transformer.multi_token_prediction"
        loss = "mindspeed.features.context_parallel.loss"
        return [
            Wrap(
                calc_loss,
                f"{loss}:with_loss_of_all_ranks",
                "Megatron divides by a rank's own tokens, and ranks may hold different numbers of tokens that count",
                optional=True,
            ),
            Wrap(
                calc_loss,
                f"{loss}:with_router_losses_of_all_ranks",
                "auxiliary losses of experts weigh 1 / cp of what is configured",
                when=When("<0.16"),
                optional=True,
            ),
            Wrap(
                f"{further}:roll_tensor",
                f"{loss}:with_tokens_of_all_ranks",
                "losses of multi-token prediction are divided by a rank's own tokens",
                optional=True,
            ),
            Wrap(
                f"{further}:process_mtp_loss",
                f"{loss}:with_shares_of_tokens",
                "losses of multi-token prediction are multiplied by a rank's own tokens",
                when=When(">=0.17"),
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
