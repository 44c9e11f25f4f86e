"""Experts that process every token, in addition to those that the router selects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed import plugins as ms
from mindspeed.features.moe_shared_experts import conditions
from mindspeed.features.moe_shared_experts.conditions import MoeSharedExpertsArgs, width
from mindspeed.moe.conditions import NO_LINEAR_BIAS
from mindspeed.plugins.shared_conditions import has_experts


class MoeSharedExperts(ms.Feature[MoeSharedExpertsArgs]):
    """Add shared experts that see every token.

    Their outputs are added to those of the routed experts, with an optional gate.
    """

    spec = ms.FeatureSpec(
        name="moe-shared-experts",
        category=ms.Category.MOE,
        level=0,
        constraints=(
            has_experts,
            NO_LINEAR_BIAS,
            conditions.is_sized,
            conditions.count_and_size_agree,
            conditions.model_has_that_width,
            conditions.transfers_are_alltoalls,
        ),
        megatron_flags=(
            ms.MegatronFlag("moe_shared_expert_intermediate_size", "size"),
            ms.MegatronFlag("moe_shared_expert_overlap", "overlap"),
        ),
        numerics=ms.Numerics.reordered(
            reason="with the setting overlap, gradients of a layer's input are summed in a different order than without it"
        ),
        reference={"overlap": False},
        verify_with=ms.VerifyWith(settings={"moe-shared-experts": {"count": 1, "overlap": True}}, world={"ep": 2}),
    )

    @ms.hookimpl
    def job_values(self) -> Mapping[str, Any]:
        size = width(self.args, self.world)
        sized = {} if size is None else {"shared_expert_hidden_size": size}
        return sized | ({"shared_expert_overlap": True} if self.args.overlap else {})

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        overrides, size = [], width(self.args, self.world)
        if size is not None:
            setting = "size" if self.args.count is None else "count"
            overrides.append(
                ms.ArgOverride(
                    "moe_shared_expert_intermediate_size",
                    size,
                    f"moe-shared-experts.{setting} sets the width of shared experts",
                )
            )
        if self.args.overlap:
            overrides.append(
                ms.ArgOverride(
                    "moe_shared_expert_overlap",
                    True,
                    "moe-shared-experts.overlap=true overlaps shared experts with all-to-alls",
                )
            )
        return overrides

    @ms.hookimpl
    def config_ready(self, config: Any) -> None:
        if self.args.count is not None:  # the plan may not know the width of a routed expert
            config.moe_shared_expert_intermediate_size = self.args.count * config.moe_ffn_hidden_size
        if self.args.gate != "none" and hasattr(config, "moe_shared_expert_gate"):
            config.moe_shared_expert_gate = True

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        if self.args.gate == "none":
            return spec
        from mindspeed.features.moe_shared_experts.layers import with_gate

        return with_gate(spec, hidden=self.args.gate == "hidden", by_config=hasattr(config, "moe_shared_expert_gate"))
