"""Both dispatcher features give expert parallelism their dispatcher, and refuse the same jobs."""

import pytest

from tests.features.resolving import ask, refusals
from tests.moe.refusals import job, refusal

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


def test_a_dense_model_is_refused(kind):
    name = f"moe-{kind}-dispatcher"
    assert refusals(name, **WORLD) == []
    assert refusal(name, "num_experts") in refusals(name, **WORLD | job("num_experts") | {"ep": 1})
