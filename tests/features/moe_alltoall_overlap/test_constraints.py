from __future__ import annotations

import pytest

from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG, active, refusals
from tests.moe.configurations import Dense, Sparse, config

NAME = "moe-alltoall-overlap"


def test_it_brings_its_dispatcher_and_grouped_experts():
    names = active(NAME, world_size=2, ep=2, num_experts=4)
    assert {"moe-alltoall-dispatcher", "moe-grouped-gemm", "expert-parallel"} < set(names)


def test_experts_on_one_rank_are_refused():
    (problem,) = refusals(NAME, world_size=1, num_experts=4)
    assert problem.endswith(f"to hide | --ep 2 or more, or remove {NAME}")


def test_two_overlaps_are_refused():
    problems = refusals("moe-alltoall-overlap", "moe-allgather-overlap", world_size=2, ep=2, num_experts=4)
    assert any(problem.startswith("MS203") and "moe-dispatcher" in problem for problem in problems)


def test_experts_that_are_not_grouped_are_refused_and_a_stage_of_dense_layers_is_not():
    cls = CATALOG.feature(NAME)
    feature = cls(cls.Args(), World({}))
    assert feature.layer_spec("dense", config(num_moe_experts=None)) == "dense"
    assert feature.layer_spec(dense := Dense(), config()) is dense
    with pytest.raises(MindSpeedError, match="experts that are not grouped ones of this library, such as Transformer Engine's"):
        feature.layer_spec(Sparse(experts=object), config())


def test_parts_divide_the_experts_of_a_rank():
    world = {"world_size": 2, "ep": 2, "num_experts": 8}
    assert refusals(NAME, **world, settings={NAME: {"parts": 4}}) == []
    assert refusals(NAME, **world, settings={NAME: {"parts": 3}}) == [
        f"MS304 {NAME}: the experts of a rank, 8 / 2, cannot be cut into 3 equal parts | use a divisor for {NAME}.parts"
    ]


def test_shared_experts_hide_transfers_whoever_gives_their_size_and_are_not_recomputed():
    world = {"world_size": 2, "ep": 2, "num_experts": 4}
    names = active(NAME, "moe-shared-experts", **world, settings={"moe-shared-experts": {"count": 2}})
    assert names.index("moe-shared-experts") < names.index(NAME)
    cls = CATALOG.feature(NAME)
    feature = cls(cls.Args(), World({}))
    overlaps = []
    for given in ({"num_moe_experts": None}, {"moe_shared_expert_intermediate_size": None}, {}):
        built = config(**{"moe_shared_expert_intermediate_size": 96, "moe_shared_expert_overlap": False} | given)
        feature.config_ready(built)
        overlaps.append(built.moe_shared_expert_overlap)
    assert overlaps == [False, False, True]
    built = config(
        moe_shared_expert_intermediate_size=96, recompute_granularity="selective", recompute_modules=["shared_experts"]
    )
    with pytest.raises(MindSpeedError) as error:
        feature.config_ready(built)
    assert str(error.value) == (
        f"MS304 {NAME}: recompute_modules has shared_experts, which hide transfers, in a model that is being built\n"
        f"  fix: remove {NAME}"
    )
