from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG, refusals

NAME = "adaptive-recompute"
BUDGET = {NAME: {"budget_mb": 1000}}
CONFIG = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_modules": None,
    "enable_cuda_graph": False,
    "fp8": None,
    "cpu_offloading": False,
    "moe_shared_expert_overlap": False,
}


def test_a_budget_is_needed():
    assert refusals(NAME, settings=BUDGET) == []
    assert refusals(NAME) == [
        f"MS304 {NAME}: no budget is given | --set {NAME}.budget_mb=MIB, the memory of a device without what other programs use"
    ]


def test_a_budget_that_no_choice_can_keep_is_refused_with_the_least():
    (problem,) = refusals(NAME, settings={NAME: {"budget_mb": 0.1}}, dtype="bf16")
    assert problem == (
        f"MS304 {NAME}: budget_mb=0.1 is below 2.62, the memory of weights, gradients and inputs of layers alone "
        f"| --set {NAME}.budget_mb=2.62 or more, or more tensor or pipeline parallelism"
    )
    assert refusals(NAME, settings={NAME: {"budget_mb": 2.62}}, dtype="bf16") == []


@pytest.mark.parametrize("feature", ["activation-recompute", "norm-recompute", "recompute", "swap-attention"])
def test_what_it_decides_is_refused(feature):
    first, second = sorted([NAME, feature])
    assert refusals(NAME, feature, settings=BUDGET) == [
        f"MS202 {first} and {second} exclude each other, because {NAME} decides it | remove {first} or remove {second}"
    ]


def ready(**config):
    feature = CATALOG.feature(NAME)
    feature(feature.Args(), World({})).config_ready(SimpleNamespace(**CONFIG | config))


def test_a_configuration_that_fits_is_accepted():
    ready()


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        ({"fp8": "e4m3"}, "fp8 layers keep other tensors"),
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap runs shared experts in parts"),
        ({"cpu_offloading": True}, "Megatron moves activations to the host itself"),
        ({"fine_grained_activation_offloading": True}, "Megatron moves activations to the host itself"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(config, refusal):
    with pytest.raises(MindSpeedError) as error:
        ready(**config)
    assert str(error.value) == f"MS304 {NAME}: {refusal}\n  fix: remove {NAME}"
