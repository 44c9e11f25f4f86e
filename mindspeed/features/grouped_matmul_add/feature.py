"""Weight gradients of grouped experts added to their buffer by the grouped product."""

from __future__ import annotations

from typing import Any

from mindspeed import plugins as ms
from mindspeed.moe.conditions import experts_are_grouped


class GroupedMatmulAdd(ms.Feature[ms.FeatureArgs]):
    """Fuse gradient accumulation of grouped experts.

    The grouped matrix product of backward adds weight gradients directly to their fp32 buffer.
    """

    spec = ms.FeatureSpec(
        name="grouped-matmul-add",
        category=ms.Category.COMPUTE,
        level=1,
        ops=("npu_gmm", "npu_groupmatmul_add_fp32"),
        constraints=(
            ms.Requires(
                "moe-grouped-gemm",
                reason="grouped-matmul-add computes the weight gradients of the experts that moe-grouped-gemm groups",
            ),
            experts_are_grouped,
        ),
        numerics=ms.Numerics.reordered(
            reason="each product is added to the gradient of earlier micro-batches before rounding. Megatron first rounds the "
            "product to the type of the weight"
        ),
        own_trainer="from mindspeed.ops import npu_groupmatmul_add_fp32",
    )

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.features.grouped_matmul_add.layers import with_accumulating_experts

        return with_accumulating_experts(spec)
