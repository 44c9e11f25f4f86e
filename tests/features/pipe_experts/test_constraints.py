from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.features.pipe_experts.feature import PipeExperts, PipeExpertsArgs
from mindspeed.features.pipe_experts.spec import places
from mindspeed.moe.capacity import CapacityOptions
from mindspeed.plugins import MindSpeedError, World
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
            "experts are on one rank, and there is no transfer to hide | --ep 2 or more, or remove pipe-experts",
        ),
        (
            {"ep": 8},
            {},
            {"ep": 4},
            "a rank has 8 / 8 experts and parts=1: one unit, which nothing can hide "
            "| --set pipe-experts.parts=2, or --ep N (a smaller one)",
        ),
        (
            {"ep": 2},
            {"parts": 65},
            {"ep": 2, "seq_length": 128},
            "parts=65 is more than the 64 x 1 tokens of a micro-batch, and an expert has no more places "
            "| use a smaller pipe-experts.parts",
        ),
        (
            {"ep": 2},
            {"streams": True},
            {"ep": 2, "tp": 2},
            "streams keeps transfers of tensor ranks apart, and tp=1 has none "
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


def feature(**settings: Any) -> PipeExperts:
    return PipeExperts(PipeExpertsArgs(**settings), World({"seq_length": 64, "micro_batch_size": 1}))


def groups(tensor_ranks: int) -> Any:
    return lambda name: SimpleNamespace(size=lambda: {"expt_tp": tensor_ranks}[name])


def test_groups_of_one_expert_tensor_rank_have_no_transfers_to_keep_apart() -> None:
    feature(streams=True).groups_created({}, groups(2))
    feature().groups_created({}, groups(1))
    with pytest.raises(MindSpeedError) as error:
        feature(streams=True).groups_created({}, groups(1))
    assert str(error.value) == (
        "MS304 pipe-experts: groups have one expert-tensor rank, and streams keeps its transfers apart from those of the "
        "expert group\n  fix: drop pipe-experts.streams, or set expert-parallel.expert_tensor_size=2 or more"
    )


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
    spec = SimpleNamespace(module="layer", params={"options": CapacityOptions(**options)}, submodules=None)
    config = SimpleNamespace(num_moe_experts=8, moe_router_topk=2)
    assert places(spec, config, World({"seq_length": 64, "micro_batch_size": 1})) == most
    assert places(spec, config, World({})) is None


def test_more_parts_than_places_are_refused_when_the_layers_are_built() -> None:
    from megatron.core.transformer.spec_utils import ModuleSpec

    config = SimpleNamespace(num_moe_experts=8, moe_router_topk=2)
    spec = ModuleSpec(module=object, params={"options": CapacityOptions()})
    assert feature(parts=16).layer_spec(spec, config).params["options"].parts == 16
    with pytest.raises(MindSpeedError) as error:
        feature(parts=17).layer_spec(spec, config)
    assert str(error.value) == (
        "MS304 pipe-experts: parts=17 is more than the 16 places of an expert\n"
        "  fix: use at most 16 for pipe-experts.parts, or a larger deepspeed-moe.capacity_factor"
    )
