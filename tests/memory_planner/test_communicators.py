"""Communicators of a plan, before launch."""

from typing import Any

import pytest

from mindspeed import registry
from mindspeed.memory_planner.communicators import communicator_lines, communicators
from mindspeed.registry import catalog


def planned(*names: str, platform: str = "npu", **world: Any) -> Any:
    return registry.plan(names, world={"world_size": 16, **world}, platform=platform, level=2)


def test_a_schedule_has_a_pair_for_each_channel_of_a_rank() -> None:
    plan = planned("nano-pipe", pp=4, tp=2, tied_embeddings=False)
    assert communicator_lines(plan, catalog()) == [
        "8, 1,760 MB outside of torch's memory: default_pg, TENSOR_MODEL_PARALLEL_GROUP, DATA_PARALLEL_GROUP_WITH_CP, "
        "MODEL_PARALLEL_GROUP, PIPELINE_CHANNELS_0 pair, PIPELINE_CHANNELS_1 pair, PIPELINE_CHANNELS_2 pair, "
        "PIPELINE_CHANNELS_3 pair"
    ]


@pytest.mark.parametrize(
    ("names", "world", "expected"),
    [
        (["pipeline-parallel"], {"pp": 2, "tied_embeddings": True}, "EMBEDDING_GROUP|PIPELINE_MODEL_PARALLEL_GROUP"),
        (["pipeline-parallel"], {"pp": 2, "tied_embeddings": False}, "PIPELINE_MODEL_PARALLEL_GROUP"),
        (
            ["virtual-pipeline"],
            {"pp": 2, "vpp": 2, "tied_embeddings": False},
            "PIPELINE_MODEL_PARALLEL_GROUP pair|default_pg pair",
        ),
        (["nano-pipe"], {"pp": 2, "tied_embeddings": False}, "PIPELINE_CHANNELS_0 pair|PIPELINE_CHANNELS_1 pair"),
    ],
)
def test_stages_have_the_group_of_megatron_or_channels(names: list[str], world: dict[str, Any], expected: str) -> None:
    others = {"default_pg", "DATA_PARALLEL_GROUP_WITH_CP", "MODEL_PARALLEL_GROUP"}
    found = [name for name in communicators(planned(*names, **world), catalog()) if name not in others]
    assert found == expected.split("|")


def test_the_megabytes_of_nccl_are_not_known_and_gloo_has_none() -> None:
    assert communicator_lines(planned("tensor-parallel", tp=2, platform="cuda"), catalog()) == [
        "4: default_pg, TENSOR_MODEL_PARALLEL_GROUP, DATA_PARALLEL_GROUP_WITH_CP, MODEL_PARALLEL_GROUP"
    ]
    assert communicator_lines(planned("tensor-parallel", tp=2, platform="cpu"), catalog()) == []
