"""Both dispatcher features give expert parallelism their dispatcher, and refuse the same jobs."""

import pytest

from tests.features.resolving import ask, refusals
from tests.moe.refusals import DISPATCHERS, job, refusal

WORLD = {"world_size": 2, "ep": 2, "num_experts": 4}
KINDS = {"allgather": "alltoall", "alltoall": "allgather"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_it_gives_expert_parallelism_its_dispatcher(kind):
    name = f"moe-{kind}-dispatcher"
    (planned,) = [feature for feature in ask(name, **WORLD).features if feature.name == "expert-parallel"]
    assert planned.args["dispatcher"] == kind
    assert planned.settings["dispatcher"].source == f"required by {name}"


def test_another_dispatcher_of_the_user_is_refused(kind):
    name, other = f"moe-{kind}-dispatcher", KINDS[kind]
    assert refusals(name, **WORLD, settings={"expert-parallel": {"dispatcher": kind}}) == []
    spelled = {"allgather": "all-gather", "alltoall": "all-to-all"}[kind]
    assert refusals(name, **WORLD, settings={"expert-parallel": {"dispatcher": other}}) == [
        f"MS212 {name} requires expert-parallel.dispatcher={kind}, because it replaces the {spelled} dispatcher, "
        f"and it is {other} (command line) | --set expert-parallel.dispatcher={kind}, or remove {name}"
    ]
    assert refusals(name, **WORLD, dispatcher="flex") == [
        f"MS304 {name}: Megatron's dispatcher is flex, and {name} replaces the {kind} dispatcher "
        f"| --dispatcher {kind}, or remove {name}"
    ]


def test_both_dispatchers_are_refused():
    gathers, sends = (f"moe-{kind}-dispatcher" for kind in KINDS)
    required, slots, *_ = refusals(sends, gathers, **WORLD)
    assert required == (
        f"MS212 {gathers} requires expert-parallel.dispatcher=allgather, because it replaces the all-gather dispatcher, "
        f"and it is alltoall (required by {sends}) | remove {gathers} or {sends}"
    )
    assert slots == f"MS203 {gathers} and {sends} all hold the slot token-permutation | remove {gathers} or {sends}"


@pytest.mark.parametrize("field", [*DISPATCHERS, "num_experts"])
def test_jobs_that_it_does_not_support_are_refused(kind, field):
    name = f"moe-{kind}-dispatcher"
    assert refusals(name, **WORLD) == []
    assert refusal(name, field) in refusals(name, **WORLD | job(field) | ({"ep": 1} if field == "num_experts" else {}))


@pytest.mark.parametrize("name", ["moe-alltoall-overlap", "moe-allgather-overlap", "moe-zero-memory"])
def test_what_stands_on_a_dispatcher_is_refused_with_it(name):
    kind = "allgather" if "allgather" in name else "alltoall"
    assert refusals(name, **WORLD) == []
    assert refusals(name, **WORLD, cuda_graphs=True) == [refusal(f"moe-{kind}-dispatcher", "cuda_graphs")]


def test_gathered_tokens_are_not_padded():
    name, factor = "moe-allgather-dispatcher", {"expert_capacity_factor": 1.0}
    assert refusals(name, **WORLD, **factor, padded_experts=False) == []
    assert refusals(name, **WORLD, **factor, padded_experts=True) == [refusal(name, "padded_experts")]
    assert refusals("moe-alltoall-dispatcher", **WORLD, **factor, padded_experts=True) == []
