from __future__ import annotations

from tests.features.resolving import active, not_checked, overrides, refusals


def test_a_size_above_one_adds_the_feature():
    assert active(world_size=2, ep=2, num_experts=4) == ["data-parallel", "expert-parallel"]


def test_a_dense_model_has_no_experts_to_spread():
    assert refusals(world_size=2, ep=2, num_experts=0) == [
        "MS304 expert-parallel: there are no experts to spread, the model is dense "
        "| --num-experts with a multiple of 2, or remove expert-parallel"
    ]


def test_experts_are_spread_evenly():
    assert refusals(world_size=4, ep=4, num_experts=8) == []
    assert refusals(world_size=4, ep=4, num_experts=6) == [
        "MS304 expert-parallel: 6 experts cannot be spread evenly over 4 ranks | use a --ep that divides 6"
    ]


def test_an_expert_takes_as_many_ranks_as_tensor_parallelism_unless_told_otherwise():
    names, world = ("sequence-parallel", "expert-parallel"), {"world_size": 8, "tp": 4, "ep": 4, "num_experts": 8}
    assert refusals(*names, **world) == [
        "MS304 expert-parallel: world size 8 is not a multiple of tp x ep x pp = 4 x 4 x 1 "
        "| use a smaller --ep, or --set expert-parallel.expert_tensor_size=1"
    ]
    assert refusals(*names, **world, settings={"expert-parallel": {"expert_tensor_size": 2}}) == []
    assert refusals(*names, **world, settings={"expert-parallel": {"expert_tensor_size": 3}}) == [
        "MS304 expert-parallel: world size 8 is not a multiple of expert tensor size x ep x pp = 3 x 4 x 1 "
        "| use a smaller --ep or expert-parallel.expert_tensor_size"
    ]


def test_beside_tensor_parallelism_it_brings_sequence_parallel_along():
    names = active(world_size=4, tp=2, ep=2, num_experts=4)
    assert names == ["data-parallel", "tensor-parallel", "sequence-parallel", "expert-parallel"]


def test_an_unknown_model_is_not_checked():
    assert "'there are no experts to spread, the model is dense' depends on num_experts; give --num-experts" in not_checked(
        ep=2
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


def test_an_unknown_dispatcher_is_refused():
    assert refusals("expert-parallel", num_experts=4, settings={"expert-parallel": {"dispatcher": "flex"}}) == [
        "MS301 expert-parallel.dispatcher is 'flex': input should be 'alltoall' or 'allgather' "
        "| --set expert-parallel.dispatcher=alltoall  # how tokens travel to their experts"
    ]
