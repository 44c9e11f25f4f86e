from types import SimpleNamespace

import pytest

from mindspeed.features.moe_tp_extend_ep.feature import MoeTpExtendEp
from mindspeed.plugins import FeatureArgs, MindSpeedError, World
from tests.features.resolving import ask, refusals

NAME = "moe-tp-extend-ep"


def test_every_expert_is_on_one_rank():
    resolution = ask(NAME, world_size=4, tp=2, ep=4, num_experts=4)
    (planned,) = [feature for feature in resolution.features if feature.name == "expert-parallel"]
    assert planned.args["expert_tensor_size"] == 1


def test_another_expert_tensor_size_is_refused():
    settings = {"expert-parallel": {"expert_tensor_size": 2}}
    (problem,) = refusals(NAME, world_size=4, tp=2, ep=2, num_experts=4, settings=settings)
    assert problem == (
        f"MS212 {NAME} requires expert-parallel.expert_tensor_size=1, because it places the experts, and it is 2 "
        f"(command line) | --set expert-parallel.expert_tensor_size=1, or remove {NAME}"
    )


def test_one_tensor_rank_is_refused():
    assert refusals(NAME, world_size=2, ep=2, num_experts=4) == [
        f"MS304 {NAME}: tensor parallelism is off (tp=1), so no expert is split | --tp 2 or more, or remove {NAME}"
    ]


def test_ranks_with_experts_are_a_multiple_of_tensor_ranks():
    assert refusals(NAME, world_size=12, tp=2, ep=3, num_experts=6, global_batch_size=12) == [
        f"MS304 {NAME}: ep=3 counts all ranks with experts, and is not a multiple of tp=2 "
        f"| --ep N (a multiple of 2), or remove {NAME}"
    ]


def test_groups_that_split_experts_are_refused():
    feature = MoeTpExtendEp(FeatureArgs(), World({}))
    feature.groups_created(sizes={}, get_group=lambda name: SimpleNamespace(size=lambda: 1))
    with pytest.raises(MindSpeedError) as error:
        feature.groups_created(sizes={}, get_group=lambda name: SimpleNamespace(size=lambda: 2))
    assert str(error.value) == (
        f"MS304 {NAME}: process groups split every expert over 2 tensor-parallel ranks, and experts are kept whole\n"
        f"  fix: drop the script's own expert_tensor_parallel_size, or remove {NAME}"
    )
