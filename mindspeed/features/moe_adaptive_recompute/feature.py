"""Experts recomputed where they have too many tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed.moe.feature import decline_other_experts, unserved
from mindspeed.plugins import (
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    Numerics,
    Patch,
    Requires,
    Wrap,
    hookimpl,
)

_LAYERS = "mindspeed.features.moe_adaptive_recompute.layers"


class MoeAdaptiveRecomputeArgs(FeatureArgs):
    scale: float = Field(2.0, ge=0, description="times the balanced number of rows, above which a rank recomputes its experts")


class MoeAdaptiveRecompute(Feature[MoeAdaptiveRecomputeArgs]):
    """A rank whose experts have many more tokens than it would have in balance keeps their input alone."""

    spec = FeatureSpec(
        name="moe-adaptive-recompute",
        summary="Experts of a rank recomputed in backward where they have too many tokens",
        category=Category.MOE,
        constraints=(
            Requires("moe-grouped-gemm", reason="the experts of a rank are recomputed as one"),
            *unserved("moe-adaptive-recompute", "transformer_engine_experts"),
        ),
        numerics=Numerics.reordered(reason="grouped products; what is recomputed has equal bits"),
    )

    def __init__(self, args: MoeAdaptiveRecomputeArgs, world: Any) -> None:
        super().__init__(args, world)
        self.calls = self.fires = 0

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.moe_adaptive_recompute.layers import RecomputingExperts
        from mindspeed.moe.grouped_experts import with_expert_mixin

        if not config.num_moe_experts:
            return spec
        decline_other_experts(self, spec)
        return with_expert_mixin(spec, RecomputingExperts)

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Wrap(
                "megatron.core.transformer.moe.moe_layer:MoELayer.forward",
                f"{_LAYERS}:counting_tokens",
                reason="its input has the tokens that would be spread in balance",
            )
        ]

    @hookimpl
    def step_metrics(self, state: Any) -> Mapping[str, float]:
        return {"recomputed": self.fires, "calls": self.calls}
