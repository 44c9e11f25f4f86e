"""Experts recomputed where they have too many tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed import plugins as ms
from mindspeed.plugins.shared_conditions import NO_CUDA_GRAPHS


class MoeAdaptiveRecomputeArgs(ms.FeatureArgs):
    scale: float = ms.Field(
        2.0,
        ge=0,
        description="Threshold: the experts of a rank are recomputed in backward when they receive more than scale times "
        "their balanced share of the tokens",
    )


class MoeAdaptiveRecompute(ms.Feature[MoeAdaptiveRecomputeArgs]):
    """Recompute experts that receive too many tokens.

    Local experts are recomputed in backward when they receive more tokens than a threshold.
    """

    spec = ms.FeatureSpec(
        name="moe-adaptive-recompute",
        category=ms.Category.MOE,
        constraints=(
            ms.Requires(
                "moe-grouped-gemm",
                reason="moe-grouped-gemm makes the experts of a rank one module, which moe-adaptive-recompute recomputes as a "
                "whole",
            ),
            NO_CUDA_GRAPHS,
        ),
        numerics=ms.Numerics.reordered(
            reason="moe-grouped-gemm, which this feature requires, may sum in a different order than one product per expert. "
            "Recomputation itself is bitwise exact"
        ),
        own_trainer="it recomputes Megatron's experts by the number of their tokens",
    )

    def __init__(self, args: MoeAdaptiveRecomputeArgs, world: Any) -> None:
        super().__init__(args, world)
        self.calls = self.fires = 0

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.moe_adaptive_recompute.layers import RecomputingExperts
        from mindspeed.moe.grouped_experts import with_expert_mixin

        return with_expert_mixin(spec, RecomputingExperts)

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Wrap(
                "megatron.core.transformer.moe.moe_layer:MoELayer.forward",
                "mindspeed.features.moe_adaptive_recompute.layers:counting_tokens",
                reason="computes the number of tokens that a rank's experts receive if all experts receive equally many. "
                "Experts that receive more than scale x this number are recomputed",
            )
        ]

    @ms.hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float]:
        return {"recomputed": self.fires, "calls": self.calls}
