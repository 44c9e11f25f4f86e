from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn import Module

from mindspeed.features.pipe_experts.feature import PipeExpertsArgs
from mindspeed.features.pipe_experts.spec import missing_places, places
from mindspeed.moe.capacity import CapacityOptions
from mindspeed.plugins import World
from tests.features.resolving import not_checked


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
    assert missing(17) == ["parts=17 is greater than the capacity of an expert, 16"]
