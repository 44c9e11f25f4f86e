"""Both overlap features bring their dispatcher and grouped experts, and refuse the same jobs."""

import pytest

from mindspeed.plugins import World
from tests.features.resolving import CATALOG, active, refusals
from tests.moe.configurations import config
from tests.moe.refusals import job, refusal

WORLD = {"world_size": 2, "ep": 2, "num_experts": 4}
NAMES = ("moe-allgather-overlap", "moe-alltoall-overlap")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_it_brings_its_dispatcher_and_grouped_experts(name):
    dispatcher = name.replace("overlap", "dispatcher")
    assert {dispatcher, "moe-grouped-gemm", "expert-parallel"} < set(active(name, **WORLD))


def test_experts_on_one_rank_are_refused(name):
    assert refusals(name, world_size=1, num_experts=4) == [
        f"MS304 {name}: expert parallelism is off (ep=1), so {name} has no transfer to overlap "
        f"| --ep 2 or more, or remove {name}"
    ]


def test_experts_that_cannot_be_spread_evenly_are_refused(name):
    assert refusals(name, world_size=2, ep=2, num_experts=3) == [
        "MS304 expert-parallel: 3 experts are not divisible by ep=2 | --ep N (a divisor of 3)"
    ]


def test_two_overlaps_are_refused():
    problems = refusals(*NAMES, **WORLD)
    assert "MS203 moe-allgather-overlap and moe-alltoall-overlap all hold the slot moe-dispatcher " in problems[1]
    assert problems[1].endswith("| remove moe-allgather-overlap or moe-alltoall-overlap")


@pytest.mark.parametrize("field", ["transformer_engine_layers", "transformer_engine_experts"])
@pytest.mark.parametrize("feature", [*NAMES, "moe-zero-memory", "moe-adaptive-recompute"])
def test_experts_of_transformer_engine_are_refused_by_the_grouped_experts_that_it_brings(feature, field):
    assert refusals(feature, **WORLD, **{field: False}) == []
    assert refusals(feature, **WORLD, **job(field)) == [refusal("moe-grouped-gemm", field)]


def test_recompute_of_the_shared_experts_that_hide_transfers_is_refused(name):
    assert refusals(name, "recompute", **WORLD, settings={"recompute": {"modules": ["core_attn"]}}) == []
    assert refusals(name, "recompute", **WORLD, settings={"recompute": {"modules": ["shared_experts"]}}) == [
        f"MS202 {name} and recompute exclude each other, because shared experts that hide transfers cannot be recomputed "
        f"| remove {name} or recompute"
    ]


def test_shared_experts_that_hide_transfers_are_not_recomputed(name):
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ("shared_experts",)}
    assert refusals(name, **WORLD, **recomputed, shared_expert_hidden_size=0) == []
    assert refusals(name, **WORLD, **recomputed, shared_expert_hidden_size=96) == [
        f"MS304 {name}: recompute_modules has shared_experts, which {name} overlaps with transfers "
        f"| --recompute-modules N (without shared_experts), or remove {name}"
    ]
    shared = {"moe-shared-experts": {"size": 96}, "adaptive-recompute": {"budget_mb": 10_000}}
    problems = refusals(name, "adaptive-recompute", "moe-shared-experts", **WORLD, settings=shared)
    assert [problem for problem in problems if problem.startswith(f"MS304 {name}")] == [
        f"MS304 {name}: {name} computes shared experts in steps, which adaptive-recompute does not support "
        f"| remove adaptive-recompute or {name}"
    ]


def test_shared_experts_hide_transfers_whoever_gives_their_size(name):
    names = active(name, "moe-shared-experts", **WORLD, settings={"moe-shared-experts": {"count": 2}})
    assert names.index("moe-shared-experts") < names.index(name)
    cls, overlaps = CATALOG.feature(name), []
    for size in (None, 96):
        ready = config(moe_shared_expert_intermediate_size=size, moe_shared_expert_overlap=False)
        cls(cls.Args(), World({})).config_ready(ready)
        overlaps.append(ready.moe_shared_expert_overlap)
    assert overlaps == [False, True]
