"""Conditions of attention and linear layers, asked about a configuration that a process builds."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn.functional import gelu, silu

from mindspeed.job.config import world_of_config
from mindspeed.plugins import World
from mindspeed.plugins.conditions import conditions, failure
from tests.features.resolving import CATALOG, MODEL

ALGORITHMS = ("ring-attention", "ulysses-attention", "hybrid-attention", "kv-allgather-cp", "adaptive-cp")
SETTINGS: dict[str, dict[str, Any]] = {"hybrid-attention": {"ulysses_degree": 2}, "context-parallel": {"size": 4}}
SPREAD = {"context_parallel_size": 4}


@pytest.mark.parametrize(
    ("name", "config", "found"),
    [
        *((name, SPREAD | {"softmax_type": "off-by-one"}, ["softmax_type_is_vanilla"]) for name in ALGORITHMS),
        *((name, SPREAD | {"window_size": (4, 0)}, ["attention_sees_all_keys"]) for name in ALGORITHMS),
        *((name, SPREAD | {"mtp_num_layers": 1}, ["predicts_one_token"]) for name in ALGORITHMS[1:3]),
        ("ring-attention", SPREAD | {"mtp_num_layers": 1}, []),
        ("ring-attention", {"context_parallel_size": 1, "window_size": (4, 0)}, []),
        ("context-parallel", SPREAD | {"hybrid_context_parallel": True}, ["samples_share_a_group"]),
        ("context-parallel", SPREAD | {"hybrid_context_parallel": False}, []),
        ("eod-reset", {"softmax_type": "learnable"}, ["softmax_type_is_vanilla"]),
        ("alibi", {"multi_latent_attention": True}, ["no_multi_latent_attention"]),
        ("flash-attention", {"softmax_type": "learnable", "qk_clip": True}, ["softmax_type_is_vanilla", "no_qk_clip"]),
        ("flash-attention", {"log_max_attention_logit": True}, ["no_logged_attention_logits"]),
        ("flash-attention", {}, []),
        ("rms-norm", {"normalization": "LayerNorm"}, ["normalization_is_RMSNorm"]),
        ("swiglu", {"activation_func": gelu, "gated_linear_unit": True}, ["mlp_is_swiglu"]),
        ("swiglu", {"activation_func": silu, "gated_linear_unit": False}, ["mlp_is_swiglu"]),
        ("swiglu", {"activation_func_clamp_value": 0.0}, ["no_clamped_activation"]),
        ("swiglu", {"glu_linear_offset": 1.0}, ["no_shifted_gate"]),
        ("swiglu", {"activation_func_fp8_input_store": True}, ["no_low_precision_activation_input"]),
        ("swiglu", {"cpu_offloading": True}, ["no_cpu_offloading"]),
        ("swiglu", {"use_te_activation_func": True}, ["no_transformer_engine_activation"]),
        ("swiglu", {"activation_func": silu, "gated_linear_unit": True, "cpu_offloading": False}, []),
        ("coc", {"tp_comm_overlap": True}, ["no_tensor_parallel_overlap"]),
        (
            "tensor-parallel-2d",
            {"gtp_weight_remat_size": 2, "moe_shared_expert_overlap": True},
            ["weight_shards_is_1", "no_shared_expert_overlap"],
        ),
        ("tensor-parallel-2d", {"gtp_weight_remat_size": 1, "moe_shared_expert_overlap": False}, []),
    ],
)
def test_a_configuration_that_is_built_gets_the_answer_of_the_plan(name: str, config: dict[str, Any], found: list[str]) -> None:
    feature = CATALOG.feature(name)
    given = {"tp": 2, "rotary": False, "num_query_groups": 8, "platform": "cpu"}
    job = World(MODEL | given | world_of_config(SimpleNamespace(**config)))
    args = feature.Args(**SETTINGS.get(name, {}))
    failures = [failure(condition, name, args, job) for condition in conditions(feature.spec.constraints)]
    assert [failed.condition.name for failed in failures if failed is not None] == found
