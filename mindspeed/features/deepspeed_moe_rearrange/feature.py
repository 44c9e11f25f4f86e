"""Tokens to the places of capacity-gated experts by index instead of products with masks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspeed import plugins as ms


class DeepspeedMoeRearrange(ms.Feature[ms.FeatureArgs]):
    """Copy tokens to experts by index, not by matmul.

    The experts of deepspeed-moe get their tokens by indexing instead of a matrix product with a one-hot mask.
    """

    spec = ms.FeatureSpec(
        name="deepspeed-moe-rearrange",
        category=ms.Category.DEEPSPEED_MOE,
        megatron=">=0.14,<0.17",
        ops=("npu_fused_moe_token_permute", "npu_fused_moe_token_unpermute"),
        constraints=(
            ms.Requires(
                "deepspeed-moe",
                reason="deepspeed-moe-rearrange copies tokens into and out of the expert inputs of the deepspeed-moe layer",
            ),
            ms.After("deepspeed-moe"),
        ),
        numerics=ms.Numerics.reordered(
            reason="the expert outputs of a token are summed in fp32, instead of by a product with a mostly zero matrix"
        ),
        verify_with=ms.VerifyWith(features=("deepspeed-moe",), settings={"deepspeed-moe": {"groups": 4}}),
    )

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        if self.world.platform == "cpu":
            return []
        return [
            "npu_fused_moe_token_unpermute runs its plain-torch reference: the sums of a layer with a capacity have no kernel"
        ]

    @ms.hookimpl
    def layer_spec(self, spec: Any, config: Any) -> Any:
        from mindspeed.moe.capacity import with_options

        return with_options(spec, rearranged=True)
