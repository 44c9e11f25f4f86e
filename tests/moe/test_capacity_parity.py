"""Features on top of the layer with a capacity, in every layout, against that layer alone in one process with equal groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long

Settings = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Surroundings:
    """Features and a layout beside a feature under test; ``groups`` are those of all tokens of a micro-batch."""

    nproc: int
    features: tuple[str, ...] = ()
    world: dict[str, Any] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    groups: int = 2


UNDER_TEST: dict[str, Settings] = {
    "deepspeed-moe-rearrange": {},
    "deepspeed-moe-dropless": {"deepspeed-moe": {"capacity_factor": 8.0}},
    "pipe-experts": {"pipe-experts": {"parts": 2}},
}
TENSOR = ("tensor-parallel", "sequence-parallel")
BUCKETS = ("distributed-optimizer", "async-ddp", "async-param-gather")
FULL = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
AROUND = {
    "ep4": Surroundings(4, world={"ep": 4}),
    "ep2, bf16": Surroundings(2, world={"ep": 2, "dtype": "bf16"}),
    "ep2 tp2, whole experts": Surroundings(2, TENSOR, {"ep": 2, "tp": 2}, {"expert-parallel": {"expert_tensor_size": 1}}),
    "ep2 tp2, shared experts": Surroundings(4, TENSOR, {"ep": 2, "tp": 2}, {"expert-parallel": {"expert_tensor_size": 2}}),
    "ep2 pp2": Surroundings(4, ("pipeline-parallel",), {"ep": 2, "pp": 2}),
    "ep2 pp2 vpp2": Surroundings(4, ("pipeline-parallel", "virtual-pipeline"), {"ep": 2, "pp": 2, "vpp": 2}),
    "ep2 with buckets": Surroundings(4, BUCKETS, {"ep": 2}),
    "ep2, layers recomputed": Surroundings(2, ("recompute",), {"ep": 2}, FULL),
    "ep2, experts recomputed": Surroundings(2, ("recompute",), {"ep": 2}, {"recompute": {"modules": ("moe",)}}),
}


def together(*parts: Settings) -> Settings:
    """Settings of several parts, feature by feature."""
    names = {name for part in parts for name in part}
    return {name: {key: value for part in parts for key, value in part.get(name, {}).items()} for name in names}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("feature", UNDER_TEST)
def test_every_layout_gives_what_the_layer_gives(prove: Prove, feature: str, around: str) -> None:
    case = AROUND[around]
    settings = together(UNDER_TEST[feature], case.settings, {"deepspeed-moe": {"groups": case.groups}})
    names = (feature, "expert-parallel", *case.features)
    assert prove(*names, settings=settings, world=case.world, nproc=case.nproc).problems == []


def test_streams_of_tensor_ranks_apart(prove: Prove) -> None:
    case = AROUND["ep2 tp2, shared experts"]
    settings = together(case.settings, {"deepspeed-moe": {"groups": 2}, "pipe-experts": {"parts": 2, "streams": True}})
    names = ("pipe-experts", "expert-parallel", *case.features)
    assert prove(*names, settings=settings, world=case.world, nproc=4).problems == []


def test_all_of_them_on_four_ranks(prove: Prove) -> None:
    settings = together(*UNDER_TEST.values(), {"ampipe": {"parts": 2}, "deepspeed-moe": {"groups": 2}})
    names = (*UNDER_TEST, "ampipe", "expert-parallel")
    assert prove(*names, settings=settings, world={"ep": 4}, nproc=4).problems == []
