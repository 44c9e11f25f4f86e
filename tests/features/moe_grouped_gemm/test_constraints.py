from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.features.moe_grouped_gemm.feature import MoeGroupedGemm
from mindspeed.moe.grouped_experts import misfits
from mindspeed.plugins import FeatureArgs, MindSpeedError, World
from tests.features.resolving import active, not_checked, refusals


def test_a_dense_model_is_refused():
    assert refusals("moe-grouped-gemm", world_size=1, num_experts=4) == []
    assert refusals("moe-grouped-gemm", world_size=1) == [
        "MS304 moe-grouped-gemm: there are no experts to group, the model is dense "
        "| --num-experts N, or remove moe-grouped-gemm"
    ]


def test_an_unknown_model_is_not_checked():
    assert not_checked("moe-grouped-gemm") == [
        "'there are no experts to group, the model is dense' depends on num_experts; give --num-experts",
        "'linear layers have biases, and grouped experts have none' depends on linear_bias; give --linear-bias",
    ]


def test_biases_are_refused_and_level_one_leaves_such_a_model_alone():
    biased = {"world_size": 1, "num_experts": 4, "linear_bias": True}
    assert refusals("moe-grouped-gemm", **biased) == [
        "MS304 moe-grouped-gemm: linear layers have biases, and grouped experts have none "
        "| --no-linear-bias (Megatron-LM: --disable-bias-linear), or remove moe-grouped-gemm"
    ]
    assert "moe-grouped-gemm" not in active(**biased, grouped_experts=True, has_variant=lambda op, platform: True)


def test_level_one_switches_it_on_where_experts_are_grouped_and_the_operator_has_a_variant():
    everywhere = {"has_variant": lambda op, platform: True}
    grouped = {"world_size": 1, "num_experts": 4, "grouped_experts": True}
    assert "moe-grouped-gemm" in active(**grouped, **everywhere)
    assert "moe-grouped-gemm" not in active(**grouped | {"grouped_experts": False}, **everywhere)
    assert "moe-grouped-gemm" not in active(**grouped, has_variant=lambda op, platform: op != "npu_gmm")


@pytest.mark.parametrize(("field", "value"), [("low_precision", True), ("latent_expert_size", 8)])
def test_experts_of_another_arithmetic_are_refused_and_level_one_leaves_them_alone(field: str, value: Any) -> None:
    world = {"world_size": 1, "num_experts": 4, field: value}
    sentence, fix = {
        "low_precision": (
            "linear layers multiply in fp8 or fp4",
            "--no-low-precision (Megatron-LM: no --fp8-format, --fp4-format)",
        ),
        "latent_expert_size": ("experts work on latent vectors", "--latent-expert-size 0 (Megatron-LM: no --moe-latent-size)"),
    }[field]
    assert refusals("moe-grouped-gemm", **world) == [
        f"MS304 moe-grouped-gemm: {sentence}, which moe-grouped-gemm does not serve | {fix}, or remove moe-grouped-gemm"
    ]
    assert refusals("moe-grouped-gemm", **world | {field: type(value)(0)}) == []
    assert "moe-grouped-gemm" not in active(**world, grouped_experts=True, has_variant=lambda op, platform: True)


def config(**values: Any) -> SimpleNamespace:
    defaults = {"add_bias_linear": False, "moe_latent_size": None, "moe_apply_probs_on_input": False, "moe_router_topk": 2}
    return SimpleNamespace(**defaults | values)


def test_what_grouped_experts_cannot_have_is_found_all_at_once() -> None:
    assert misfits(config()) == []
    assert misfits(config(moe_apply_probs_on_input=True, moe_router_topk=1)) == []
    clamped = {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
    wrong = {"add_bias_linear": True, "moe_latent_size": 8, "moe_apply_probs_on_input": True, "fp8": "hybrid"}
    assert misfits(config(**wrong, **clamped)) == [
        "add_bias_linear is set",
        "activation_func_clamp_value is set",
        "glu_linear_offset is set",
        "moe_latent_size is set",
        "moe_apply_probs_on_input is set and moe_router_topk is not 1",
        "fp8 or fp4 is set",
    ]


def test_a_dense_configuration_beside_the_experts_is_not_judged() -> None:
    feature = MoeGroupedGemm(FeatureArgs(), World({}))
    feature.config_ready(config(add_bias_linear=True, num_moe_experts=None))
    with pytest.raises(MindSpeedError) as error:
        feature.config_ready(config(add_bias_linear=True, num_moe_experts=4))
    assert str(error.value) == (
        "MS304 moe-grouped-gemm: add_bias_linear is set in a model that is being built\n  fix: remove moe-grouped-gemm"
    )
