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


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("ring-attention", {}, ""),
        ("ring-attention", {"window": 2}, "RING_OUTER_GROUP"),
        ("ring-attention", {"window": 2, "second_communicator": True}, "RING_SECOND_GROUP|RING_OUTER_GROUP"),
        ("hybrid-attention", {"ulysses_degree": 2}, "HYBRID_INNER_GROUP|HYBRID_OUTER_GROUP"),
        (
            "hybrid-attention",
            {"ulysses_degree": 2, "window": 2},
            "HYBRID_INNER_GROUP|HYBRID_OUTER_GROUP|RING_OUTER_GROUP",
        ),
        ("adaptive-cp", {"ulysses_degree": 4}, "HYBRID_INNER_GROUP|HYBRID_OUTER_GROUP"),
        ("ulysses-attention", {}, ""),
    ],
)
def test_groups_that_a_feature_creates_are_counted(name: str, settings: dict[str, Any], expected: str) -> None:
    world = {"world_size": 16, "cp": 8, "num_attention_heads": 16, "num_query_groups": 16, "seq_length": 1024}
    plan = registry.plan([name], settings={name: settings}, world=world, platform="npu", level=2)
    others = {"default_pg", "CONTEXT_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP", "EMBEDDING_GROUP", "MODEL_PARALLEL_GROUP"}
    assert [one for one in communicators(plan, catalog()) if one not in others] == (expected.split("|") if expected else [])


def test_a_double_ring_has_one_communicator_more() -> None:
    plans = [
        registry.plan(
            ["ring-attention"],
            settings={"ring-attention": {"window": window}},
            world={"world_size": 8, "cp": 8, "seq_length": 1024, "tied_embeddings": False},
            platform="npu",
            level=2,
        )
        for window in (1, 4)
    ]
    plain, double = (communicator_lines(plan, catalog())[0] for plan in plans)
    assert plain.startswith("3, 1,200 MB outside of torch's memory: ")
    assert double == plain.replace("3, 1,200", "4, 1,600") + ", RING_OUTER_GROUP"


def test_the_megabytes_of_nccl_are_not_known_and_gloo_has_none() -> None:
    assert communicator_lines(planned("tensor-parallel", tp=2, platform="cuda"), catalog()) == [
        "4: default_pg, TENSOR_MODEL_PARALLEL_GROUP, DATA_PARALLEL_GROUP_WITH_CP, MODEL_PARALLEL_GROUP"
    ]
    assert communicator_lines(planned("tensor-parallel", tp=2, platform="cpu"), catalog()) == []
