from tests.features.resolving import refusals

NAME = "moe-alltoall-overlap"


def test_parts_divide_the_experts_of_a_rank():
    world = {"world_size": 2, "ep": 2, "num_experts": 8}
    assert refusals(NAME, **world, settings={NAME: {"parts": 4}}) == []
    assert refusals(NAME, **world, settings={NAME: {"parts": 3}}) == [
        f"MS304 {NAME}: the local experts, 8 / ep=2, are not divisible by parts=3 | --set {NAME}.parts=1"
    ]
