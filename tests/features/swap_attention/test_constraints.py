from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG, refusals

NAME = "swap-attention"
CONFIG = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_modules": None,
    "enable_cuda_graph": False,
    "fp8": None,
    "cpu_offloading": False,
}


def test_a_model_of_several_layers_is_accepted():
    assert refusals(NAME) == []
    assert refusals(NAME, "activation-recompute") == []


def test_a_model_of_one_layer_is_refused():
    assert refusals(NAME, num_layers=1) == [
        f"MS304 {NAME}: the model has one layer, whose backward follows its forward at once | remove {NAME}"
    ]


def test_the_input_of_linear_qkv_cannot_be_recomputed_and_swapped():
    assert refusals(NAME, "norm-recompute") == [
        f"MS202 norm-recompute and {NAME} exclude each other, because the input of linear_qkv is recomputed; leave linear_qkv "
        f"out of {NAME}.modules | remove norm-recompute or {NAME}"
    ]
    assert refusals(NAME, "norm-recompute", settings={NAME: {"modules": ["core_attention", "linear_proj"]}}) == []


def ready(**config):
    feature = CATALOG.feature(NAME)
    feature(feature.Args(), World({})).config_ready(SimpleNamespace(**CONFIG | config))


@pytest.mark.parametrize("config", [{}, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}])
def test_a_configuration_that_fits_is_accepted(config):
    ready(**config)


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
            "recompute.modules has core_attn, which then saves nothing",
        ),
        ({"cpu_offloading": True}, "Megatron moves activations to the host itself"),
        ({"fine_grained_activation_offloading": True}, "Megatron moves activations to the host itself"),
        ({"fp8": "e4m3"}, "fp8 layers keep other tensors"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(config, refusal):
    with pytest.raises(MindSpeedError) as error:
        ready(**config)
    assert str(error.value) == f"MS304 {NAME}: {refusal}\n  fix: remove {NAME}"
