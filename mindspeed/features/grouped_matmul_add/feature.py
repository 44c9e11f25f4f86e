"""Grouped experts on our operators, with weight gradients added to their buffer by the grouped product."""

from __future__ import annotations

from typing import Any

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Check,
    CheckpointState,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Mixin,
    Numerics,
    Patch,
    Replace,
    World,
    hookimpl,
)

_MOE = "megatron.core.transformer.moe"
_LAYERS = "mindspeed.features.grouped_matmul_add.layers"


def _are_grouped(args: FeatureArgs, world: World) -> bool:
    return bool(world.num_experts > 0 and world.grouped_experts)


class GroupedMatmulAdd(Feature[FeatureArgs]):
    """Megatron's grouped experts call ``mindspeed::npu_gmm``, and ``mindspeed::npu_groupmatmul_add_fp32`` backward."""

    spec = FeatureSpec(
        name="grouped-matmul-add",
        summary="Grouped experts on every platform, weight gradients added to their fp32 buffer by the grouped product",
        category=Category.COMPUTE,
        level=1,
        megatron="<0.17",
        ops=("npu_gmm", "npu_groupmatmul_add_fp32"),
        applies=_are_grouped,
        constraints=(
            Check(
                lambda args, world: world.num_experts > 0,
                "there are no experts to group, the model is dense",
                fix="--num-experts N, or remove grouped-matmul-add",
            ),
        ),
        numerics=Numerics.reordered(reason="each product is added to the sum of the micro-batches before it is rounded"),
        state=CheckpointState(
            "resharded",
            "weights of grouped and single experts are the same, the state of their optimizer is not",
            added="refused",
            removed="refused",
        ),
    )

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [ArgOverride("moe_grouped_gemm", True, "all experts of a rank are one module", only=f"{_LAYERS}:fits")]

    @hookimpl
    def config_ready(self, config: Any) -> None:
        from mindspeed.features.grouped_matmul_add.layers import misfits

        if config.num_moe_experts and (wrong := misfits(config)):
            self.decline(f"{' and '.join(wrong)} in a model that is being built")

    @hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.grouped_matmul_add.layers import fits, with_grouped_experts

        return with_grouped_experts(spec) if fits(config) else spec

    @hookimpl
    def patches(self) -> list[Patch]:
        return [
            Mixin(
                f"{_MOE}.experts:GroupedMLP",
                f"{_LAYERS}:AccumulatingExperts",
                reason="its products are ours, in every type",
                phase="build",
            ),
            Replace(
                f"{_MOE}.grouped_gemm_util:grouped_gemm_is_available",
                f"{_LAYERS}:is_available",
                reason="the package of CUDA kernels that it asks for is not needed",
                phase="build",
            ),
        ]
