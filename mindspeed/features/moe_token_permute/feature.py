"""Tokens to experts and back through two operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspeed import plugins as ms
from mindspeed.plugins.shared_conditions import has_experts

_UTILS = "megatron.core.transformer.moe.moe_utils"
_LAYERS = "mindspeed.features.moe_token_permute.layers"
_LIBRARY = "mindspeed.moe.routing"


class MoeTokenPermute(ms.Feature[ms.FeatureArgs]):
    """Permute tokens by operators that sum in fp32.

    Before the experts, ``mindspeed::npu_fused_moe_token_permute`` copies each token once per selected expert and sorts the
    copies by expert. After them, ``mindspeed::npu_fused_moe_token_unpermute`` sums the outputs of each token. Only indices are
    saved for backward.
    """

    spec = ms.FeatureSpec(
        name="moe-token-permute",
        category=ms.Category.COMPUTE,
        level=1,
        ops=("npu_fused_moe_token_permute", "npu_fused_moe_token_unpermute"),
        constraints=(has_experts,),
        megatron_flags=(ms.MegatronFlag("moe_permute_fusion", switch="on"),),
        numerics=ms.Numerics.reordered(
            reason="the expert outputs of a token are summed in fp32 and rounded once. Megatron by default sums in the data "
            "type of the outputs, such as bf16, and rounds after each addition"
        ),
        own_trainer="from mindspeed.ops import npu_fused_moe_token_permute, npu_fused_moe_token_unpermute",
    )

    topk = 0
    """The most experts per token of the configurations that were created."""

    @ms.hookimpl
    def config_ready(self, config: Any) -> None:
        self.topk = max(self.topk, config.moe_router_topk or 0)

    @ms.hookimpl
    def notes(self) -> Iterable[str]:
        if self.world.platform == "cpu" or not self.world.padded_experts:
            return []
        return ["npu_fused_moe_token_unpermute runs its plain-torch reference, because experts are padded to their capacity"]

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        return [
            ms.Wrap(
                f"{_UTILS}:permute",
                f"{_LAYERS}:with_operator",
                reason="copies each token once per selected expert and sorts the copies by expert, with a fused operator",
                optional=True,
            ),
            ms.Wrap(
                f"{_UTILS}:unpermute",
                f"{_LAYERS}:with_sums",
                reason="sums the expert outputs of each token in fp32 by a fused operator",
                optional=True,
            ),
            ms.Replace(
                f"{_LIBRARY}:take_rows",
                f"{_LAYERS}:take_rows",
                reason="copies each token once per selected expert and sorts the copies by expert, with a fused operator. This "
                "patch is for dispatchers that other features define, such as moe-alltoall-dispatcher",
                optional=True,
            ),
            ms.Replace(
                f"{_LIBRARY}:sum_rows",
                f"{_LAYERS}:sum_rows",
                reason="sums the expert outputs of each token in fp32 with a fused operator. This patch is for dispatchers "
                "that other features define, such as moe-alltoall-dispatcher",
                optional=True,
            ),
            ms.Wrap(
                f"{_UTILS}:sort_chunks_by_idxs",
                f"{_LAYERS}:without_transformer_engine",
                reason="reorders tokens of experts by plain copies, because Transformer Engine's fused kernel may be missing",
                optional=True,
            ),
            ms.Wrap(
                "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
                "mindspeed.features.moe_token_permute.configuration:with_permute_fusion",
                reason="skips Megatron's check that --moe-permute-fusion is used only where Transformer Engine is installed, "
                "because operators of mindspeed replace Transformer Engine's kernels",
                phase="build",
                optional=True,
            ),
        ]
