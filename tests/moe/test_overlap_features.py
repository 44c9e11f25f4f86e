"""Both overlap features bring their dispatcher and grouped experts, and refuse the same worlds and models."""

from __future__ import annotations

import pytest

from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG, active, refusals
from tests.moe.configurations import Dense, Sparse, config

WORLD = {"world_size": 2, "ep": 2, "num_experts": 4}
NAMES = {"moe-allgather-overlap": "gather", "moe-alltoall-overlap": "all-to-all"}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def built(name):
    """The feature as a model that is being built meets it."""
    cls = CATALOG.feature(name)
    return cls(cls.Args(), World({}))


def test_it_brings_its_dispatcher_and_grouped_experts(name):
    dispatcher = name.replace("overlap", "dispatcher")
    assert {dispatcher, "moe-grouped-gemm", "expert-parallel"} < set(active(name, **WORLD))


def test_experts_on_one_rank_are_refused(name):
    assert refusals(name, world_size=1, num_experts=4) == [
        f"MS304 {name}: experts are on one rank, and there is no {NAMES[name]} to hide | --ep 2 or more, or remove {name}"
    ]


def test_experts_that_cannot_be_spread_evenly_are_refused(name):
    assert refusals(name, world_size=2, ep=2, num_experts=3) == [
        "MS304 expert-parallel: 3 experts cannot be spread evenly over 2 ranks | --ep N (a divisor of 3)"
    ]


def test_two_overlaps_are_refused():
    problems = refusals(*NAMES, **WORLD)
    assert "MS203 moe-allgather-overlap and moe-alltoall-overlap all hold the slot moe-dispatcher " in problems[1]
    assert problems[1].endswith("| remove moe-allgather-overlap or moe-alltoall-overlap")
    assert [problem.split()[0] for problem in problems] == ["MS212", "MS203", "MS203"]


def test_recompute_of_the_shared_experts_that_hide_transfers_is_refused(name):
    assert refusals(name, "recompute", **WORLD, settings={"recompute": {"modules": ["core_attn"]}}) == []
    assert refusals(name, "recompute", **WORLD, settings={"recompute": {"modules": ["shared_experts"]}}) == [
        f"MS202 {name} and recompute exclude each other, because shared experts that hide transfers cannot be recomputed "
        f"| remove {name} or recompute"
    ]


ENGINE = "--no-transformer-engine-experts (Megatron-LM: --transformer-impl local)"


@pytest.mark.parametrize(
    ("feature", "refusing"),
    [
        *((name, name) for name in NAMES),
        ("moe-zero-memory", "moe-alltoall-overlap"),
        ("moe-adaptive-recompute", "moe-adaptive-recompute"),
    ],
)
def test_experts_of_transformer_engine_are_refused_in_the_plan(feature, refusing):
    assert refusals(feature, **WORLD) == refusals(feature, **WORLD, transformer_engine_experts=False) == []
    assert refusals(feature, **WORLD, transformer_engine_experts=True) == [
        f"MS304 {refusing}: experts are Transformer Engine's grouped ones, which {refusing} does not serve "
        f"| {ENGINE}, or remove {refusing}"
    ]


def test_grouped_experts_leave_those_of_transformer_engine_alone():
    everything = {"world_size": 1, "num_experts": 4, "grouped_experts": True, "has_variant": lambda op, platform: True}
    assert "moe-grouped-gemm" in active(**everything, transformer_engine_experts=False)
    assert "moe-grouped-gemm" not in active(**everything, transformer_engine_experts=True)


@pytest.mark.parametrize("feature", [*NAMES, "moe-adaptive-recompute"])
def test_experts_that_are_not_grouped_are_refused_and_a_stage_of_dense_layers_is_not(feature):
    instance = built(feature)
    assert instance.layer_spec("dense", config(num_moe_experts=None)) == "dense"
    assert instance.layer_spec(Dense(), config()) == Dense()
    with pytest.raises(MindSpeedError) as error:
        instance.layer_spec(Sparse(experts=object), config())
    assert str(error.value) == (
        f"MS304 {feature}: the layer spec has experts that are not grouped ones of this library, such as Transformer Engine's\n"
        f"  fix: remove {feature}"
    )


def test_shared_experts_hide_transfers_whoever_gives_their_size_and_are_not_recomputed(name):
    names = active(name, "moe-shared-experts", **WORLD, settings={"moe-shared-experts": {"count": 2}})
    assert names.index("moe-shared-experts") < names.index(name)
    feature, overlaps = built(name), []
    for given in ({"num_moe_experts": None}, {"moe_shared_expert_intermediate_size": None}, {}):
        ready = config(**{"moe_shared_expert_intermediate_size": 96, "moe_shared_expert_overlap": False} | given)
        feature.config_ready(ready)
        overlaps.append(ready.moe_shared_expert_overlap)
    assert overlaps == [False, False, True]
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]}
    with pytest.raises(MindSpeedError) as error:
        feature.config_ready(config(moe_shared_expert_intermediate_size=96, **recomputed))
    assert str(error.value) == (
        f"MS304 {name}: recompute_modules has shared_experts, which hide transfers, in a model that is being built\n"
        f"  fix: remove {name}"
    )
