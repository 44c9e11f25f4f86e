"""The dispatcher that micro-batches of different lengths need."""

import mindspeed
from mindspeed.plugins import MindSpeedError
from tests.features.resolving import MODEL

NAME = "dynamic-shapes"


def planned(dispatcher: str) -> list[str]:
    """The problems of a plan for experts with this dispatcher."""
    try:
        settings = {"expert-parallel": {"dispatcher": dispatcher}}
        mindspeed.plan([NAME], settings, world=MODEL | {"num_experts": 8, "pp": 2, "ep": 2})
    except MindSpeedError as error:
        return [f"{problem.code} {problem.message} | {problem.fix_text}" for problem in error.problems]
    return []


def test_the_allgather_dispatcher_of_experts_is_refused():
    assert planned("alltoall") == []
    assert planned("allgather") == [
        "MS402 Megatron's moe_token_dispatcher_type cannot have two values: expert-parallel sets it to 'allgather' and "
        "dynamic-shapes sets it to 'alltoall' | remove dynamic-shapes"
    ]
