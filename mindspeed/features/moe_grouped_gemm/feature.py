"""Experts of a MoE layer as one grouped product."""

from __future__ import annotations

from typing import Any

from mindspeed.moe.feature import are_grouped, unserved
from mindspeed.plugins import Category, Check, CheckpointState, Feature, FeatureArgs, FeatureSpec, Numerics, hookimpl


class MoeGroupedGemm(Feature[FeatureArgs]):
    """All experts of a rank are one module whose products are ``mindspeed::npu_gmm``, in every type and on every platform."""

    spec = FeatureSpec(
        name="moe-grouped-gemm",
        summary="All experts of a rank in one grouped product, on every platform and in every type",
        category=Category.MOE,
        level=1,
        ops=("npu_gmm",),
        applies=are_grouped,
        constraints=(
            Check(
                lambda args, world: world.num_experts > 0,
                "there are no experts to group, the model is dense",
                fix="--num-experts N, or remove moe-grouped-gemm",
            ),
            Check(
                lambda args, world: not world.linear_bias,
                "linear layers have biases, and grouped experts have none",
                fix="--no-linear-bias (Megatron-LM: --disable-bias-linear), or remove moe-grouped-gemm",
            ),
            *unserved("moe-grouped-gemm", "low_precision", "latent_expert_size"),
        ),
        numerics=Numerics.reordered(reason="a grouped product may sum in another order than a product per expert"),
        state=CheckpointState(
            "resharded",
            "weights of grouped and single experts are the same, the state of their optimizer is not",
            added="refused",
            removed="refused",
        ),
    )

    @hookimpl
    def config_ready(self, config: Any) -> None:
        from mindspeed.moe.grouped_experts import misfits

        if config.num_moe_experts and (wrong := misfits(config)):
            self.decline(f"{' and '.join(wrong)} in a model that is being built")

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.moe.grouped_experts import fits, with_grouped_experts

        return with_grouped_experts(spec) if fits(config) else spec
