"""Activations of experts computed again in backward, under the transfers."""

from __future__ import annotations

from typing import Any, Literal

from mindspeed.plugins import (
    Category,
    Check,
    Conflicts,
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

_LAYERS = "mindspeed.features.moe_zero_memory.layers"


class MoeZeroMemoryArgs(FeatureArgs):
    level: Literal["level0", "level1"] = Field(
        "level0",
        description="level0 keeps the first product of experts, level1 their probabilities and the input of shared ones",
    )
    num_layers: int | None = Field(
        None, ge=0, description="level1: layers of a stage that have it, the others have level0; all if not given"
    )


class MoeZeroMemory(Feature[MoeZeroMemoryArgs]):
    """Tokens are sent to their experts once more in backward, so that experts need not keep them."""

    spec = FeatureSpec(
        name="moe-zero-memory",
        summary="Expert activations computed again in backward, from tokens that are sent again under the transfers",
        category=Category.MOE,
        constraints=(
            Requires("moe-alltoall-overlap", reason="its transfers hide what is computed and sent again"),
            Conflicts("moe-adaptive-recompute", reason="each recomputes the experts in its own way"),
            Check(
                lambda args, world: args.level == "level1",
                "num_layers={args.num_layers} limits level1, and the level is {args.level}",
                fix="--set moe-zero-memory.level=level1, or drop num_layers",
                when=lambda args, world: args.num_layers is not None,
            ),
            Check(
                lambda args, world: args.num_layers <= world.num_layers // world.pp,
                "num_layers={args.num_layers} is more than a stage has, {world.num_layers} layers / {world.pp} stages",
                fix="use a smaller moe-zero-memory.num_layers",
                when=lambda args, world: args.num_layers is not None,
            ),
        ),
        numerics=Numerics.reordered(reason="moe-alltoall-overlap adds in another order; what is computed again has equal bits"),
    )

    @hookimpl
    def config_ready(self, config: Any) -> None:
        from mindspeed.moe.limits import recompute_misfits

        if config.num_moe_experts and (wrong := recompute_misfits(config)):
            self.decline(f"{' and '.join(wrong)} in a model that is being built")

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.moe_zero_memory.layers import with_forgetting_experts

        return with_forgetting_experts(spec) if config.num_moe_experts else spec

    @hookimpl
    def patches(self) -> list[Patch]:
        if self.args.level == "level0":
            return []
        return [
            Wrap(
                "megatron.core.transformer.moe.moe_layer:BaseMoELayer.set_layer_number",
                f"{_LAYERS}:numbering_experts",
                reason="the number of a layer decides about its level",
                phase="build",
            )
        ]
