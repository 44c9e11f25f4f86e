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


@pytest.mark.parametrize("feature", [*NAMES, "moe-zero-memory", "moe-adaptive-recompute"])
def test_experts_of_transformer_engine_are_refused_by_the_grouped_experts_that_it_brings(feature):
    field = "transformer_engine_experts"
    assert refusals(feature, **WORLD, **{field: False}) == []
    refused = refusal("moe-grouped-gemm", field).replace("or remove moe-grouped-gemm", f"or remove {feature}")
    assert refusals(feature, **WORLD, **job(field)) == [refused]


def test_shared_experts_hide_transfers_whoever_gives_their_size(name):
    names = active(name, "moe-shared-experts", **WORLD, settings={"moe-shared-experts": {"count": 2}})
    assert names.index("moe-shared-experts") < names.index(name)
    cls, overlaps = CATALOG.feature(name), []
    for size in (None, 96):
        ready = config(moe_shared_expert_intermediate_size=size, moe_shared_expert_overlap=False)
        cls(cls.Args(), World({})).config_ready(ready)
        overlaps.append(ready.moe_shared_expert_overlap)
    assert overlaps == [False, True]
