"""Requirements of recompute-in-advance."""

from tests.features.resolving import active, refusals

NAME = "recompute-in-advance"


def test_groups_that_do_not_fill_a_chunk_are_refused() -> None:
    assert refusals(NAME, pp=2, settings={NAME: {"num_layers": 3}}) == [
        f"MS304 {NAME}: groups of 3 layers do not fill every model chunk: they have (4, 4) layers | --set {NAME}.num_layers=1"
    ]
    assert active(NAME, pp=2, settings={NAME: {"num_layers": 2}})[-1] == NAME


def test_modules_of_experts_need_experts() -> None:
    assert refusals(NAME, pp=2, settings={NAME: {"granularity": "selective", "modules": ["moe"]}}) == [
        f"MS304 {NAME}: moe and shared_experts are modules of a MoE model, but the model is dense "
        f"| --set {NAME}.modules=VALUE (without moe and shared_experts), or --num-experts N"
    ]
