from tests.features.resolving import refusals

NAME = "moe-allgather-overlap"


def test_tokens_that_are_sent_again_need_the_other_overlap():
    world = {"world_size": 2, "ep": 2, "num_experts": 4}
    slots = [problem for problem in refusals(NAME, "moe-zero-memory", **world) if problem.startswith("MS203")]
    assert slots == [
        f"MS203 {NAME} and moe-alltoall-overlap all hold the slot moe-dispatcher | remove {NAME} or moe-zero-memory",
        "MS203 moe-allgather-dispatcher and moe-alltoall-dispatcher all hold the slot token-permutation "
        f"| remove {NAME} or moe-zero-memory",
    ]
