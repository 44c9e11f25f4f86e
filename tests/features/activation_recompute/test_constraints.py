from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG

NAME = "activation-recompute"
CONFIG = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_modules": None,
    "enable_cuda_graph": False,
    "fp8": None,
    "moe_shared_expert_overlap": False,
}


def ready(**config):
    feature = CATALOG.feature(NAME)
    feature(feature.Args(), World({})).config_ready(SimpleNamespace(**CONFIG | config))


def test_an_mlp_that_is_recomputed_already_is_refused():
    with pytest.raises(MindSpeedError) as error:
        ready(recompute_granularity="selective", recompute_modules=["mlp"])
    assert str(error.value).startswith(f"MS304 {NAME}: recompute.modules has mlp, whose activation is recomputed already")


def test_shared_experts_in_parts_are_refused():
    with pytest.raises(MindSpeedError) as error:
        ready(moe_shared_expert_overlap=True)
    assert str(error.value).startswith(f"MS304 {NAME}: moe_shared_expert_overlap runs shared experts in parts")
