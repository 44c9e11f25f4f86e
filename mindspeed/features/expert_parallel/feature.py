"""Experts of a MoE layer spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed.features.expert_parallel import conditions
from mindspeed.features.expert_parallel.choice import ExpertParallelArgs, cheaper_dispatcher, describe_choice
from mindspeed.plugins import (
    ArgOverride,
    Category,
    CheckpointState,
    Feature,
    FeatureSpec,
    MegatronFlag,
    Numerics,
    Requires,
    hookimpl,
)
from mindspeed.plugins.shared_conditions import has_experts


class ExpertParallel(Feature[ExpertParallelArgs]):
    """Distribute the experts of MoE layers over ranks.

    Tokens are sent to the ranks of their experts and back.
    """

    spec = FeatureSpec(
        name="expert-parallel",
        category=Category.MEGATRON,
        level=0,
        sizes={"ep": "size"},
        constraints=(
            has_experts,
            conditions.ranks_divide_experts,
            conditions.ranks_hold_experts,
            conditions.ranks_hold_experts_of_given_size,
            conditions.bytes_are_known,
            conditions.biased_experts_are_whole,
            Requires(
                "sequence-parallel",
                reason="Megatron trains MoE layers with tp > 1 only with sequence parallelism",
                when=conditions.has_tensor_ranks,
            ),
        ),
        megatron_flags=(
            MegatronFlag("expert_tensor_parallel_size", "expert_tensor_size"),
            MegatronFlag("moe_token_dispatcher_type", "dispatcher", follows_default=True),
        ),
        numerics=Numerics.reordered(reason="expert gradients are summed over the tokens of several ranks"),
        state=CheckpointState(
            "resharded",
            "the optimizer state of distributed experts is separate, and another number of ranks can load it",
            added="refused",
            removed="refused",
            settings={"dispatcher": "safe"},
        ),
    )

    @hookimpl
    def notes(self) -> Iterable[str]:
        return describe_choice(self.args, self.world)

    @hookimpl
    def job_values(self) -> Mapping[str, Any]:
        size = self.args.expert_tensor_size
        return {"dispatcher": self._dispatcher()} | ({} if size is None else {"expert_tensor_size": size})

    def _dispatcher(self) -> str:
        chosen = self.args.dispatcher
        return cheaper_dispatcher(self.args, self.world) if chosen == "auto" else chosen

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        overrides = [
            ArgOverride(
                "expert_model_parallel_size",
                self.args.size,
                "expert-parallel.size sets the number of ranks that share the experts",
            ),
            ArgOverride(
                "moe_token_dispatcher_type",
                self._dispatcher(),
                "expert-parallel.dispatcher selects the collective that sends tokens to experts",
            ),
        ]
        if self.args.expert_tensor_size is not None:
            size = self.args.expert_tensor_size
            overrides.append(
                ArgOverride(
                    "expert_tensor_parallel_size",
                    size,
                    "expert-parallel.expert_tensor_size sets the number of ranks that split each expert",
                )
            )
        return overrides
