"""Experts of a MoE layer spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed import plugins as ms
from mindspeed.features.expert_parallel import conditions
from mindspeed.features.expert_parallel.choice import ExpertParallelArgs, cheaper_dispatcher, describe_choice
from mindspeed.plugins.shared_conditions import has_experts


class ExpertParallel(ms.Feature[ExpertParallelArgs]):
    """Distribute the experts of MoE layers over ranks.

    Tokens are sent to the ranks of their experts and back.
    """

    spec = ms.FeatureSpec(
        name="expert-parallel",
        category=ms.Category.MEGATRON,
        level=0,
        sizes={"ep": "size"},
        constraints=(
            has_experts,
            conditions.ranks_divide_experts,
            conditions.ranks_hold_experts,
            conditions.ranks_hold_experts_of_given_size,
            conditions.bytes_are_known,
            conditions.biased_experts_are_whole,
            ms.Requires(
                "sequence-parallel",
                reason="Megatron trains MoE layers with tp > 1 only with sequence parallelism",
                when=conditions.has_tensor_ranks,
            ),
        ),
        megatron_flags=(
            ms.MegatronFlag("expert_tensor_parallel_size", "expert_tensor_size"),
            ms.MegatronFlag("moe_token_dispatcher_type", "dispatcher", follows_default=True),
        ),
        numerics=ms.Numerics.reordered(reason="expert gradients are summed over the tokens of several ranks"),
        state=ms.CheckpointState(
            "resharded",
            "the optimizer state of distributed experts is separate, and another number of ranks can load it",
            added="refused",
            removed="refused",
            settings={"dispatcher": "safe"},
        ),
    )

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        return describe_choice(self.args, self.world)

    @ms.hookimpl
    def job_values(self) -> Mapping[str, Any]:
        size = self.args.expert_tensor_size
        return {"dispatcher": self._dispatcher()} | ({} if size is None else {"expert_tensor_size": size})

    def _dispatcher(self) -> str:
        chosen = self.args.dispatcher
        return cheaper_dispatcher(self.args, self.world) if chosen == "auto" else chosen

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        overrides = [
            ms.ArgOverride(
                "expert_model_parallel_size",
                self.args.size,
                "expert-parallel.size sets the number of ranks that share the experts",
            ),
            ms.ArgOverride(
                "moe_token_dispatcher_type",
                self._dispatcher(),
                "expert-parallel.dispatcher selects the collective that sends tokens to experts",
            ),
        ]
        if self.args.expert_tensor_size is not None:
            size = self.args.expert_tensor_size
            overrides.append(
                ms.ArgOverride(
                    "expert_tensor_parallel_size",
                    size,
                    "expert-parallel.expert_tensor_size sets the number of ranks that split each expert",
                )
            )
        return overrides
