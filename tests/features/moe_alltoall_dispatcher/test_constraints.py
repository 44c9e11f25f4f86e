from tests.features.resolving import refusals

NAME, WORLD = "moe-alltoall-dispatcher", {"world_size": 2, "num_experts": 8}
ONCE = {NAME: {"once_per_rank": True}}


def test_a_token_is_sent_once_per_rank_where_it_would_be_sent_more_often():
    assert refusals(NAME, **WORLD, ep=2, router_topk=2, settings=ONCE) == []
    assert refusals(NAME, **WORLD, ep=2, router_topk=1, settings=ONCE) == [
        f"MS304 {NAME}: once_per_rank saves copies of a token, and each token has 1 expert "
        f"| remove the setting {NAME}.once_per_rank"
    ]
    assert refusals(NAME, **WORLD, ep=1, router_topk=2, settings=ONCE) == [
        f"MS304 {NAME}: once_per_rank saves copies of tokens between ranks, and expert parallelism is off (ep=1) "
        f"| --ep 2 or more, or remove the setting {NAME}.once_per_rank"
    ]


def test_experts_that_are_split_are_refused():
    tensor = {"tp": 2, "ep": 2, "router_topk": 2, "world_size": 4, "num_experts": 8}
    whole = ONCE | {"expert-parallel": {"expert_tensor_size": 1}}
    assert refusals(NAME, **tensor, settings=whole) == []
    assert refusals(NAME, **tensor, settings=ONCE) == [
        f"MS304 {NAME}: once_per_rank needs whole experts, and tensor-parallel ranks split them "
        f"| --set expert-parallel.expert_tensor_size=1, or remove the setting {NAME}.once_per_rank"
    ]


def test_experts_that_are_padded_are_refused():
    world = {**WORLD, "ep": 2, "router_topk": 2, "expert_capacity_factor": 1.0}
    assert refusals(NAME, **world, padded_experts=False, settings=ONCE) == []
    assert refusals(NAME, **world, padded_experts=True, settings=ONCE) == [
        f"MS304 {NAME}: once_per_rank does not support experts that are padded to their capacity "
        f"| --no-padded-experts, or remove the setting {NAME}.once_per_rank"
    ]
