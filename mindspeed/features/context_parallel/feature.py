"""A sequence spread over ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    CheckpointState,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    MegatronFlag,
    MindSpeedError,
    Numerics,
    Patch,
    Problem,
    RequiresSlot,
    Slot,
    VerifyWith,
    Wrap,
    hookimpl,
)
from mindspeed.plugins.fixes import advice


class ContextParallelArgs(FeatureArgs):
    size: int = Field(1, ge=1, description="ranks that share every sequence")
    algorithm: str | None = Field(
        None, description="the feature that does attention, such as ring-attention, or auto for the one that sends the least"
    )
    hybrid: bool = Field(
        False, description="Megatron's hybrid_context_parallel, a group of ranks for every sample, which is not beside a size"
    )


class ContextParallel(Feature[ContextParallelArgs]):
    """Each rank has a share of the tokens of every sequence; one algorithm lets attention look beyond it.

    A loss counts each token once: ranks may hold different numbers of tokens that count, so Megatron divides the sum of
    gradients by the number of tokens of all ranks.
    """

    spec = FeatureSpec(
        name="context-parallel",
        summary="Every sequence spread over ranks, with the algorithm of your choice for attention",
        category=Category.CONTEXT_PARALLEL,
        sizes={"cp": "size"},
        megatron_flags=(MegatronFlag("hybrid_context_parallel", "hybrid"),),
        constraints=(
            RequiresSlot(
                Slot.CONTEXT_PARALLEL,
                reason="attention has to look beyond the tokens of a rank: name ring-attention, ulysses-attention or another",
                when=lambda args, world: args.size > 1,
                setting="algorithm",
            ),
            Check(
                lambda args, world: world.seq_length % args.size == 0,
                "sequence length {world.seq_length} is not a multiple of {args.size} context-parallel ranks",
                fix="use a --seq-length that is a multiple of {args.size}",
            ),
            Check(
                lambda args, world: not (args.hybrid and args.size > 1),
                "hybrid_context_parallel spreads every sample over ranks of its own, and context-parallel.size={args.size} "
                "spreads all samples over one group",
                fix="drop --hybrid-context-parallel, or --set context-parallel.size=1",
            ),
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
    def config_ready(self, config: Any) -> None:
        if getattr(config, "hybrid_context_parallel", False):
            text = (
                "hybrid_context_parallel spreads every sample over ranks of its own, "
                f"and context-parallel.size={self.args.size} spreads all samples over one group"
            )
            fix = "drop --hybrid-context-parallel, or --set context-parallel.size=1"
            raise MindSpeedError([Problem("MS304", text, ("context-parallel",), fix=advice(fix))])

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
