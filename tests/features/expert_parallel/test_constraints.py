import pytest

from mindspeed import registry
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.features.expert_parallel import choice
from mindspeed.problems import ResolutionError
from tests.features.resolving import CATALOG, ask


def test_dispatcher_and_expert_tensor_size_are_fields_of_the_job():
    settings = {"expert-parallel": {"dispatcher": "allgather", "expert_tensor_size": 1}}
    world = ask(world_size=2, ep=2, num_experts=4, settings=settings).world
    assert (world.dispatcher, world.expert_tensor_size) == ("allgather", 1)


MOE = {"world_size": 4, "num_experts": 16, "seq_length": 1024, "hidden_size": 512, "dtype": "bf16"}
AUTO = {"expert-parallel": {"dispatcher": "auto"}}


def chosen(**world):
    """The dispatcher that Megatron gets, and the row of the plan."""
    resolution = ask("expert-parallel", **MOE, **world, settings=AUTO)
    (text,) = [row.text for row in resolution.rows if "the dispatcher is" in row.text]
    cls = CATALOG.feature("expert-parallel")
    (planned,) = [feature for feature in resolution.features if feature.name == "expert-parallel"]
    values = {o.argument: o.value for o in cls(cls.Args(**planned.args), resolution.world).megatron_args()}
    return values["moe_token_dispatcher_type"], text


def test_the_dispatcher_that_sends_fewer_bytes_is_chosen_and_the_plan_has_both_numbers():
    assert chosen(ep=4, router_topk=2) == (
        "alltoall",
        "the dispatcher is alltoall: per layer and micro-batch a rank sends alltoall 8,397,312 and allgather 16,842,752 bytes",
    )
    assert chosen(ep=2, router_topk=8)[0] == "allgather"


def test_bytes_of_experts_that_tensor_ranks_share_count_what_these_gather():
    assert choice.shared_by_tensor_ranks(choice.ExpertWork(8, 2, 16, 2, 4, 8, 2), 1) == 0
    assert choice.shared_by_tensor_ranks(choice.ExpertWork(8, 2, 16, 2, 4, 8, 2), 2) == 2 * 16 * 2 * (16 * (2 + 4) + 4)


def test_a_fix_that_leaves_the_same_problem_in_other_words_is_not_offered():
    """At tp 1 an expert-tensor-parallel size of 1 changes the sentence alone; at tp 2 it mends."""
    (problem,) = refused(world_size=8, ep=8, pp=4, num_experts=8)
    assert problem.fix_text == "--ep 2 (so that tp x ep x pp divides 8)"
    (problem,) = refused(world_size=8, ep=8, tp=2, num_experts=8, sequence_parallel=True)
    assert "--set expert-parallel.expert_tensor_size=1" in problem.fix_text


def refused(**world):
    """The problems of a job, whose fixes were tried."""
    with pytest.raises(ResolutionError) as caught:
        registry.resolve([Layer("test", world=world)], made_up("cpu", "0.16.1"))
    return caught.value.problems
