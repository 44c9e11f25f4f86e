from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.moe.experts import SequentialMLP

from mindspeed.features.moe_grouped_gemm.layers import foreign_experts
from mindspeed.job.world import World
from mindspeed.moe.grouped_experts import GroupedExperts
from tests.features.resolving import active, refusals
from tests.moe.configurations import Dense, Sparse
from tests.moe.refusals import job, refusal

NAME = "moe-grouped-gemm"
EXPERTS = {"world_size": 1, "num_experts": 4, "router_topk": 2}
EVERYWHERE = {"has_variant": lambda op, platform: True}


@pytest.mark.parametrize("field", ["num_experts", "low_precision", "transformer_engine_experts"])
def test_experts_of_another_arithmetic_are_refused_and_level_one_leaves_them_alone(field: str) -> None:
    assert refusals(NAME, **EXPERTS) == []
    assert refusals(NAME, **EXPERTS | job(field)) == [refusal(NAME, field)]
    assert NAME not in active(**EXPERTS | job(field), grouped_experts=True, **EVERYWHERE)


@pytest.mark.parametrize(
    ("field", "sentence", "fix"),
    [
        (
            "clamped_activation",
            "the input of the activation function is clamped, which moe-grouped-gemm does not support",
            "--no-clamped-activation",
        ),
        (
            "shifted_gate",
            "an offset is added to the linear part of gated units (glu_linear_offset), which moe-grouped-gemm does not support",
            "--no-shifted-gate",
        ),
        (
            "probabilities_on_input",
            (
                "routing probabilities scale the input of experts, which moe-grouped-gemm supports only with router_topk=1, "
                "but router_topk is 2"
            ),
            "--no-probabilities-on-input, or --router-topk 1",
        ),
    ],
)
def test_activations_that_grouped_experts_do_not_have_are_refused(field: str, sentence: str, fix: str) -> None:
    assert refusals(NAME, **EXPERTS, **{field: True}) == [f"MS304 {NAME}: {sentence} | {fix}, or remove {NAME}"]
    assert NAME not in active(**EXPERTS, grouped_experts=True, **{field: True}, **EVERYWHERE)
    assert field != "probabilities_on_input" or refusals(NAME, **EXPERTS | {"router_topk": 1}, **{field: True}) == []


def test_experts_of_another_class_are_named_and_a_stage_of_dense_layers_has_none():
    def foreign(spec: Any) -> list[str]:
        return foreign_experts(SimpleNamespace(world=World({})), spec, SimpleNamespace())

    assert foreign("dense") == foreign(Dense()) == foreign(Sparse(SequentialMLP)) == foreign(Sparse(GroupedExperts)) == []
    assert foreign([Sparse(SequentialMLP), Sparse(object)]) == [
        "the layer specification uses object, which is not one of Megatron's local experts"
    ]
