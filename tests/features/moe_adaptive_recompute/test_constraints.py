from tests.features.resolving import active, refusals
from tests.moe.refusals import refusal

NAME = "moe-adaptive-recompute"


def test_it_brings_grouped_experts():
    assert active(NAME, world_size=1, num_experts=4) == ["moe-grouped-gemm", NAME]


def test_cuda_graphs_which_would_freeze_the_decision_are_refused():
    assert refusals(NAME, world_size=1, num_experts=4, cuda_graphs=True) == [refusal(NAME, "cuda_graphs")]


def test_a_scale_below_zero_is_refused():
    assert refusals(NAME, world_size=1, num_experts=4, settings={NAME: {"scale": 0}}) == []
    assert refusals(NAME, world_size=1, num_experts=4, settings={NAME: {"scale": -1}}) == [
        f"MS301 {NAME}.scale is -1: input should be greater than or equal to 0 | --set {NAME}.scale=2.0 "
        "(rows of a rank, as a multiple of the balanced number, above which it recomputes its experts)"
    ]
