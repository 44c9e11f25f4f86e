from mindspeed.features.expert_parallel import costs
from tests.features.resolving import CATALOG, active, ask, not_checked, overrides, refusals


def test_a_size_above_one_adds_the_feature():
    assert active(world_size=2, ep=2, num_experts=4) == ["data-parallel", "expert-parallel"]


def test_a_dense_model_has_no_experts_to_spread():
    assert refusals(world_size=2, ep=2, num_experts=0) == [
        "MS304 expert-parallel: the model is dense, and expert-parallel works on experts "
        "| --num-experts N, or remove expert-parallel"
    ]


def test_experts_are_spread_evenly():
    assert refusals(world_size=4, ep=4, num_experts=8) == []
    assert refusals(world_size=4, ep=4, num_experts=6) == [
        "MS304 expert-parallel: 6 experts are not divisible by ep=4 | --ep N (a divisor of 6)"
    ]


def test_an_expert_takes_as_many_ranks_as_tensor_parallelism_unless_told_otherwise():
    names, world = ("sequence-parallel", "expert-parallel"), {"world_size": 8, "tp": 4, "ep": 4, "num_experts": 8}
    assert refusals(*names, **world) == [
        "MS304 expert-parallel: world size 8 is not a multiple of tp x ep x pp = 4 x 4 x 1 "
        "| --ep N (smaller than 4), or --set expert-parallel.expert_tensor_size=1"
    ]
    assert refusals(*names, **world, settings={"expert-parallel": {"expert_tensor_size": 2}}) == []
    assert refusals(*names, **world, settings={"expert-parallel": {"expert_tensor_size": 3}}) == [
        "MS304 expert-parallel: world size 8 is not a multiple of expert_tensor_size x ep x pp = 3 x 4 x 1 "
        "| --ep N (smaller than 4), or --set expert-parallel.expert_tensor_size=1"
    ]


def test_beside_tensor_parallelism_it_brings_sequence_parallel_along():
    names = active(world_size=4, tp=2, ep=2, num_experts=4)
    assert names == ["data-parallel", "tensor-parallel", "sequence-parallel", "expert-parallel"]


def test_an_unknown_model_is_not_checked():
    assert (
        "'the model is dense, and expert-parallel works on experts' depends on num_experts; give --num-experts"
        in not_checked(ep=2)
    )


def test_size_dispatcher_and_expert_tensor_size_reach_megatron():
    assert overrides("expert-parallel", size=2) == {
        "expert_model_parallel_size": 2,
        "moe_token_dispatcher_type": "alltoall",
    }
    assert overrides("expert-parallel", size=2, dispatcher="allgather", expert_tensor_size=1) == {
        "expert_model_parallel_size": 2,
        "moe_token_dispatcher_type": "allgather",
        "expert_tensor_parallel_size": 1,
    }


def test_dispatcher_and_expert_tensor_size_are_fields_of_the_job():
    settings = {"expert-parallel": {"dispatcher": "allgather", "expert_tensor_size": 1}}
    world = ask(world_size=2, ep=2, num_experts=4, settings=settings).world
    assert (world.dispatcher, world.expert_tensor_size) == ("allgather", 1)


def test_an_unknown_dispatcher_is_refused():
    assert refusals("expert-parallel", num_experts=4, settings={"expert-parallel": {"dispatcher": "flex"}}) == [
        "MS301 expert-parallel.dispatcher is 'flex': input should be 'alltoall', 'allgather' or 'auto' "
        "| --set expert-parallel.dispatcher=alltoall (how tokens travel to their experts; "
        "auto takes the one that sends fewer bytes)"
    ]


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
    assert costs.shared_by_tensor_ranks(costs.ExpertWork(8, 2, 16, 2, 4, 8, 2), 1) == 0
    assert costs.shared_by_tensor_ranks(costs.ExpertWork(8, 2, 16, 2, 4, 8, 2), 2) == 2 * 16 * 2 * (16 * (2 + 4) + 4)


def test_a_choice_by_bytes_needs_all_sizes():
    assert refusals("expert-parallel", **MOE, ep=4, router_topk=2, settings=AUTO) == []
    assert refusals("expert-parallel", **MOE, ep=4, settings=AUTO) == [
        "MS304 expert-parallel: dispatcher is auto, which compares bytes that follow from num_experts, router_topk, "
        "hidden_size, seq_length, micro_batch_size, dtype, and some of them are not known "
        "| give all of them, or --set expert-parallel.dispatcher=alltoall"
    ]


def test_experts_with_biases_are_not_split():
    tensor = {"world_size": 4, "tp": 2, "ep": 2, "num_experts": 8}
    whole = {"expert-parallel": {"expert_tensor_size": 1}}
    assert refusals("expert-parallel", **tensor) == []
    assert refusals("expert-parallel", **tensor, linear_bias=True, settings=whole) == []
    assert refusals("expert-parallel", **tensor, linear_bias=True) == [
        "MS304 expert-parallel: linear layers have biases, and an expert with biases cannot be split over tensor-parallel "
        "ranks | --no-linear-bias, or --set expert-parallel.expert_tensor_size=1"
    ]
