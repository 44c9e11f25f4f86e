"""Optimization level 1 switches a feature on where its operators have a variant and the model has something for it."""

from typing import Any

import pytest

from tests.features.resolving import active

EXPERTS = {"num_experts": 4, "router_topk": 2}
GROUPED = EXPERTS | {"grouped_experts": True}


@pytest.mark.parametrize(
    ("name", "suited", "other", "op"),
    [
        ("flash-attention", {}, {"qk_clip": True}, "fusion_attention"),
        ("grouped-matmul-add", GROUPED, GROUPED | {"grouped_experts": False}, "npu_groupmatmul_add_fp32"),
        ("grouped-matmul-add", GROUPED, EXPERTS | {"grouped_experts": False}, "npu_gmm"),
        ("matmul-add", {}, {"fsdp": True}, "npu_matmul_add_fp32"),
        ("moe-grouped-gemm", GROUPED, EXPERTS | {"grouped_experts": False}, "npu_gmm"),
        ("moe-token-permute", EXPERTS, {}, "npu_fused_moe_token_unpermute"),
        ("rms-norm", {}, {"normalization": "LayerNorm"}, "rms_norm"),
        ("rotary-embedding", {}, {"rotary": False}, "npu_rotary_position_embedding"),
        ("swiglu", {}, {"activation": "gelu"}, "swiglu"),
    ],
)
def test_a_feature_is_on_where_its_operators_have_a_variant_and_the_model_suits_it(
    name: str, suited: dict[str, Any], other: dict[str, Any], op: str
) -> None:
    def names(job: dict[str, Any], missing: str = "") -> list[str]:
        return active(world_size=1, has_variant=lambda op, platform: op != missing, **job)

    assert name in names(suited)
    assert name not in names(suited, missing=op)
    assert name not in names(other)
    assert "ring-attention-update" not in names(suited)
