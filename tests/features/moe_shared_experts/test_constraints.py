from __future__ import annotations

import pytest

from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG, ask, overrides, refusals
from tests.moe.configurations import config

NAME = "moe-shared-experts"


def refused(world=None, **settings):
    return refusals(NAME, world_size=1, **(world or {"num_experts": 4}), settings={NAME: settings})


def test_a_number_or_a_size_is_needed():
    assert refused(count=1) == refused(size=64) == refused(count=2, gate=True) == []
    assert refused() == [f"MS304 {NAME}: neither a number of shared experts nor their size is given | --set {NAME}.count=1"]


def test_a_number_and_a_size_agree():
    world = {"num_experts": 4, "moe_ffn_hidden_size": 32}
    assert refused(world, count=2, size=64) == refused(world, count=2) == refused(world, size=96) == []
    assert refused(world, count=2, size=96) == [
        f"MS304 {NAME}: 2 experts of 32 are not 96 wide | drop {NAME}.count, or {NAME}.size"
    ]


def test_a_dense_model_is_refused():
    assert refused({"num_experts": 0}, count=1) == [
        f"MS304 {NAME}: there are no routed experts to stand beside, the model is dense | --num-experts N, or remove {NAME}"
    ]


def test_biases_are_refused():
    assert refused({"num_experts": 4, "linear_bias": True}, count=1) == [
        f"MS304 {NAME}: linear layers have biases, and Megatron's shared experts have none "
        f"| --no-linear-bias (Megatron-LM: --disable-bias-linear), or remove {NAME}"
    ]


def test_a_size_reaches_megatron():
    assert overrides(NAME, size=64, overlap=True) == {
        "moe_shared_expert_intermediate_size": 64,
        "moe_shared_expert_overlap": True,
    }
    assert overrides(NAME, count=2) == {}


def ready(given, **settings):
    cls = CATALOG.feature(NAME)
    configuration = config(moe_ffn_hidden_size=32, moe_shared_expert_intermediate_size=given, moe_shared_expert_gate=False)
    cls(cls.Args(**settings), World({})).config_ready(configuration)
    return configuration


def test_a_count_is_a_size_and_the_old_switch_a_gate():
    configuration = ready(None, count=2, gate=True)
    assert (configuration.moe_shared_expert_intermediate_size, configuration.moe_shared_expert_gate) == (64, True)
    assert ready(64, count=2).moe_shared_expert_gate is False


def test_a_count_and_a_size_that_differ_are_refused():
    with pytest.raises(MindSpeedError) as error:
        ready(96, count=2)
    assert str(error.value) == (
        f"MS304 {NAME}: 2 experts of 32 are 64 wide, and their size is 96\n  fix: drop {NAME}.count, or the size"
    )


def test_a_count_is_a_width_that_the_planner_knows():
    world = {"num_experts": 4, "moe_ffn_hidden_size": 32}
    for settings, given in [({"count": 2}, None), ({"size": 64}, None), ({"count": 2}, 0), ({"count": 2}, 64)]:
        known = world if given is None else {**world, "shared_expert_hidden_size": given}
        resolution = ask(NAME, world_size=1, settings={NAME: settings}, **known)
        assert (resolution.problems, resolution.world.shared_expert_hidden_size) == ([], 64)
    assert refused({**world, "shared_expert_hidden_size": 96}, count=2) == [
        f"MS304 {NAME}: 2 experts of 32 are not 96 wide | drop {NAME}.count, or --shared-expert-hidden-size"
    ]
    assert refused({**world, "shared_expert_hidden_size": 96}, size=64) == [
        f"MS304 {NAME}: shared experts are 64 wide by a setting, and 96 by the model | "
        f"drop {NAME}.size, or --shared-expert-hidden-size"
    ]
