from types import SimpleNamespace

import pytest

from mindspeed.features.moe_tp_extend_ep.feature import MoeTpExtendEp
from mindspeed.plugins import FeatureArgs, MindSpeedError, World
from tests.features.resolving import ask

NAME = "moe-tp-extend-ep"


def test_every_expert_is_on_one_rank():
    resolution = ask(NAME, world_size=4, tp=2, ep=4, num_experts=4)
    (planned,) = [feature for feature in resolution.features if feature.name == "expert-parallel"]
    assert planned.args["expert_tensor_size"] == 1


def test_groups_that_split_experts_are_refused():
    feature = MoeTpExtendEp(FeatureArgs(), World({}))
    feature.groups_created(sizes={}, get_group=lambda name: SimpleNamespace(size=lambda: 1))
    with pytest.raises(MindSpeedError) as error:
        feature.groups_created(sizes={}, get_group=lambda name: SimpleNamespace(size=lambda: 2))
    assert str(error.value) == (
        f"MS304 {NAME}: process groups split every expert over 2 tensor-parallel ranks, but the feature keeps experts "
        "whole\n"
        f"  fix: remove the expert_tensor_parallel_size that the script sets, or remove {NAME}"
    )
