"""A sequence spread over ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager

from mindspeed import plugins as ms


class ContextParallelArgs(ms.FeatureArgs):
    size: int = ms.Field(1, ge=1, description="Number of ranks over which each sequence is split (context-parallel size)")
    algorithm: str | None = ms.Field(
        None,
        description="Algorithm of attention over the context-parallel ranks: the name of a feature such as ring-attention, or "
        "auto = the one that sends the fewest bytes. Not needed if the job requests such a feature",
    )


def _needs_algorithm(args: ContextParallelArgs, world: ms.World) -> bool:
    """Return whether context parallelism is on without Transformer Engine's attention."""
    is_local = world.knows("transformer_engine_layers") and not world.transformer_engine_layers
    has_engine = world.is_set("engine_installed") and not world.is_set("engine_over_local") and not is_local
    return args.size > 1 and not has_engine


def _is_spread(args: ContextParallelArgs, world: ms.World) -> bool:
    """Return whether cp is greater than 1."""
    return args.size > 1


@ms.condition(
    "hybrid_context_parallel assigns a group of ranks to each sample, but cp={args.size} splits every sample over the "
    "same ranks",
    fix=(ms.Fix.give_field("hybrid_context_parallel", False), ms.Fix.give_field("cp", 1)),
    when=_is_spread,
)
def samples_share_a_group(args: ContextParallelArgs, world: ms.World) -> bool:
    """Check that Megatron does not spread samples over ranks by their length."""
    return not world.hybrid_context_parallel


class ContextParallel(ms.Feature[ContextParallelArgs]):
    """Split sequences over ranks by a chosen algorithm.

    The setting `algorithm` names the feature that computes attention over the ranks, such as ring-attention. The loss
    is averaged over the unmasked tokens of all ranks, so it equals the loss of one process.
    """

    spec = ms.FeatureSpec(
        name="context-parallel",
        category=ms.Category.CONTEXT_PARALLEL,
        sizes={"cp": "size"},
        constraints=(
            ms.RequiresSlot(
                ms.Slot.CONTEXT_PARALLEL,
                reason="each rank has only a part of the keys, so attention needs an algorithm such as ring-attention or "
                "ulysses-attention",
                when=_needs_algorithm,
                setting="algorithm",
            ),
            ms.Condition.divides(
                "seq_length",
                ("args.size",),
                "sequence length {world.seq_length} is not divisible by cp={args.size}",
                fix=(ms.Fix.give_field("seq_length", note="a multiple of {args.size}"),),
                when=_is_spread,
            ),
            samples_share_a_group,
        ),
        numerics=ms.Numerics.reordered(reason="gradients are summed first over the tokens of each rank and then over ranks"),
        state=ms.CheckpointState("resharded", "every context-parallel rank holds the same weights"),
        verify_with=ms.VerifyWith(settings={"context-parallel": {"algorithm": "auto"}}, world={"cp": 2}),
        own_trainer="from mindspeed.nn import ContextParallelAttention",
    )

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [
            ms.ArgOverride(
                "context_parallel_size", self.args.size, "context-parallel.size sets the number of ranks per sequence"
            )
        ]

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        if self.args.size == 1:
            return []
        calc_loss = "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss"
        further = "megatron.core.transformer.multi_token_prediction"
        loss = "mindspeed.features.context_parallel.loss"
        return [
            ms.Wrap(
                calc_loss,
                f"{loss}:with_loss_of_all_ranks",
                "divides the loss by the number of tokens of all context-parallel ranks; Megatron divides by a rank's "
                "local tokens",
                optional=True,
            ),
            ms.Wrap(
                calc_loss,
                f"{loss}:with_router_losses_of_all_ranks",
                "corrects the weight of the experts' auxiliary losses, which Megatron scales by 1 / cp",
                when=ms.When("<0.16"),
                optional=True,
            ),
            ms.Wrap(
                f"{further}:roll_tensor",
                f"{loss}:with_tokens_of_all_ranks",
                "divides the losses of multi-token prediction by the tokens of all ranks instead of a rank's local tokens",
                optional=True,
            ),
            ms.Wrap(
                f"{further}:process_mtp_loss",
                f"{loss}:with_shares_of_tokens",
                "multiplies the losses of multi-token prediction by the tokens of all ranks instead of a rank's local tokens",
                when=ms.When(">=0.17"),
                optional=True,
            ),
        ]

    @ms.hookimpl
    def around_schedule(self, forward_only: bool) -> AbstractContextManager[None] | None:
        if forward_only:
            return None
        from megatron.core import parallel_state

        from mindspeed.features.context_parallel.randomness import rank_rng

        return rank_rng(parallel_state.get_context_parallel_rank())
