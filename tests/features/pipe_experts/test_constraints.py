from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn import Module

from mindspeed.features.pipe_experts.conditions import PipeExpertsArgs
from mindspeed.features.pipe_experts.spec import missing_places, places
from mindspeed.moe.capacity import CapacityOptions
from mindspeed.plugins import World
from tests.features.resolving import active, not_checked, refusals

MOE: dict[str, Any] = {"num_experts": 8}


def refused(world: dict[str, Any], **settings: Any) -> list[str]:
    return refusals("pipe-experts", settings={"pipe-experts": settings}, **MOE | world)


def test_it_brings_the_layer_and_the_experts_whose_products_it_spreads() -> None:
    names = active("pipe-experts", ep=2, **MOE)
    assert {"deepspeed-moe", "moe-grouped-gemm"} < set(names)
    assert names[-1] == "pipe-experts"


@pytest.mark.parametrize(
    ("world", "settings", "fits", "text"),
    [
        (
            {"ep": 1},
            {},
            {"ep": 2},
            "experts are on one rank (ep x tp = 1 x 1), so pipe-experts has no transfer to overlap "
            "| --ep 2 or more, or remove pipe-experts",
        ),
        (
            {"ep": 8},
            {},
            {"ep": 4},
            "a rank has one unit (8 experts / ep=8 x parts=1), and no other to overlap it with "
            "| --set pipe-experts.parts=2, or --ep N (smaller than 8)",
        ),
        (
            {"ep": 2},
            {"parts": 65},
            {"ep": 2, "seq_length": 128},
            "parts=65 is more than the 64 x 1 tokens of a micro-batch, which are the most places that an expert can have "
            "| --set pipe-experts.parts=VALUE (smaller than 65)",
        ),
        (
            {"ep": 2},
            {"streams": True},
            {"ep": 2, "tp": 2},
            "streams keeps transfers of ranks that share an expert apart, and every expert is on one rank "
            "| remove the setting pipe-experts.streams, or --tp 2 or more",
        ),
        (
            {"ep": 2, "tp": 2, "expert_tensor_size": 1},
            {"streams": True},
            {"ep": 2, "tp": 2, "expert_tensor_size": 2},
            "streams keeps transfers of ranks that share an expert apart, and every expert is on one rank "
            "| remove the setting pipe-experts.streams, or --tp 2 or more",
        ),
    ],
)
def test_what_hides_nothing_is_refused(
    world: dict[str, Any], settings: dict[str, Any], fits: dict[str, Any], text: str
) -> None:
    assert refused(world, **settings) == [f"MS304 pipe-experts: {text}"]
    assert refused(fits, **settings) == []


def test_one_expert_of_a_rank_in_slices_is_accepted() -> None:
    assert refused({"ep": 8}, parts=2) == []


def test_no_parts_are_refused() -> None:
    (problem,) = refused({"ep": 2}, parts=0)
    assert problem.startswith("MS301 ")


def test_an_unknown_world_is_not_checked() -> None:
    assert any("num_experts" in row for row in not_checked("pipe-experts", ep=2))


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 16),  # 64 tokens x 2 choices / 8 experts
        ({"capacity_factor": 0.5}, 8),
        ({"groups": 4}, 4),
        ({"dropless": True}, None),
    ],
)
def test_places_are_those_of_the_layer_in_training(options: dict[str, Any], most: int | None) -> None:
    config = SimpleNamespace(num_moe_experts=8, moe_router_topk=2)
    assert places(CapacityOptions(**options), config, World({"seq_length": 64, "micro_batch_size": 1})) == most
    assert places(CapacityOptions(**options), config, World({})) is None


def test_more_parts_than_places_are_refused_when_the_model_is_built() -> None:
    layer: Any = Module()
    layer.options, layer.config = CapacityOptions(), SimpleNamespace(num_moe_experts=8, moe_router_topk=2)
    model = Module()
    model.layer = layer

    def missing(parts: int) -> list[str]:
        args, world = PipeExpertsArgs(parts=parts), World({"seq_length": 64, "micro_batch_size": 1})
        return missing_places(SimpleNamespace(args=args, world=world), [model])

    assert missing(16) == []
    assert missing(17) == ["parts=17 is more than the 16 places of an expert"]
