import pytest

from mindspeed.features.moe_zero_memory.layers import has_level1
from mindspeed.plugins import World
from tests.features.resolving import refusals

LEVEL1 = "moe-zero-memory"


@pytest.mark.parametrize(
    ("world", "chosen"),
    [
        # a stage has layers 1, 2, 5, 6 or 3, 4, 7, 8
        ({"num_layers": 8, "vpp": 2}, [[], [1, 3], [1, 3, 5, 7], [1, 2, 3, 4, 5, 7], [*range(1, 9)]]),
        # a stage has layers 1 or 2, 3
        ({"num_layers": 3, "first_stage_layers": 1}, [[], [1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3]]),
        # a stage has experts in layers 2, 4, 8 or 6, 10
        (
            {"num_layers": 10, "vpp": 2, "hybrid_layer_pattern": "*E*E|*E|*E|*E"},
            [[], [2, 6], [2, 6, 8, 10], [2, 4, 6, 8, 10], [2, 4, 6, 8, 10]],
        ),
    ],
)
def test_layers_with_experts_of_a_stage_count_across_its_chunks(world, chosen):
    job = World({"pp": 2} | world)
    numbers = sorted(set().union(*chosen))
    assert [[n for n in numbers if has_level1(n, job, limit)] for limit in range(5)] == chosen


def test_layers_of_multi_token_prediction_have_level1_unless_no_layer_has():
    job = World({"num_layers": 4, "hybrid_layer_pattern": "M-*E/*E"})
    assert [has_level1(2, job, limit) for limit in (0, 1)] == [False, True]


@pytest.mark.parametrize(("limit", "accepted"), [(2, True), (3, False)])
def test_a_number_above_the_layers_with_experts_of_every_stage_is_refused(limit, accepted):
    world = {"world_size": 4, "pp": 2, "ep": 2, "num_experts": 4, "num_layers": 8, "hybrid_layer_pattern": "*E*E|*-*E"}
    settings = {LEVEL1: {"level": "level1", "num_layers": limit}}
    text = (
        "MS304 moe-zero-memory: num_layers=3 is greater than the 2 layers with experts of a stage | "
        "--set moe-zero-memory.num_layers=2, or remove the setting moe-zero-memory.num_layers"
    )
    assert (text in refusals(LEVEL1, settings=settings, **world)) is not accepted
