import pytest

from mindspeed.features.moe_zero_memory.layers import has_level1
from tests.features.resolving import refusals

NAME, WORLD = "moe-zero-memory", {"world_size": 2, "ep": 2, "num_experts": 4, "num_layers": 8}


def refused(**settings):
    return refusals(NAME, **WORLD, settings={NAME: settings})


def test_a_number_of_layers_is_for_level1():
    assert refused(level="level1", num_layers=0) == refused(level="level1", num_layers=8) == []
    assert refused(num_layers=2) == [f"MS301 {NAME}: num_layers=2 limits level1, and level is level0 | "]
    assert refused(level="level1", num_layers=9) == [
        f"MS304 {NAME}: num_layers=9 is more than a stage has: 8 layers / pp=1 | --set {NAME}.num_layers=VALUE (smaller than 9)"
    ]
    staged, settings = WORLD | {"pp": 2, "world_size": 4}, {"level": "level1", "num_layers": 5}
    assert refusals(NAME, **staged, settings={NAME: settings | {"num_layers": 4}}) == []
    assert refusals(NAME, **staged, settings={NAME: settings}) == [
        f"MS304 {NAME}: num_layers=5 is more than a stage has: 8 layers / pp=2 | --set {NAME}.num_layers=VALUE (smaller than 5)"
    ]


def test_two_ways_to_recompute_experts_are_refused():
    assert refusals(NAME, "moe-adaptive-recompute", **WORLD) == [
        f"MS202 moe-adaptive-recompute and {NAME} exclude each other, because each recomputes the experts in its own way "
        f"| remove moe-adaptive-recompute or {NAME}"
    ]


@pytest.mark.parametrize(
    ("recompute", "owner", "reason"),
    [
        ({"granularity": "full", "method": "uniform", "num_layers": 1}, NAME, "full recompute takes the experts as well"),
        ({"modules": ["moe"]}, NAME, "recompute.modules has moe, which the experts are a part of"),
        ({"modules": ["moe_act"]}, NAME, "recompute.modules has moe_act, which it never keeps"),
        (
            {"modules": ["shared_experts"]},
            "moe-alltoall-overlap",
            "shared experts that hide transfers cannot be recomputed",
        ),
    ],
)
def test_recompute_of_the_same_modules_is_refused(recompute, owner, reason):
    assert refusals(NAME, "recompute", **WORLD) == []
    conflict, *others = refusals(NAME, "recompute", **WORLD | {"grouped_experts": True}, settings={"recompute": recompute})
    assert conflict == f"MS202 {owner} and recompute exclude each other, because {reason} | remove {NAME} or recompute"
    assert [text.partition(":")[0] for text in others] == ([] if owner == NAME else [f"MS304 {NAME}"])


def test_layers_of_a_stage_count_across_its_chunks():
    # 8 layers on 2 stages with 2 chunks each: a stage has layers 1, 2, 5, 6 or 3, 4, 7, 8
    chosen = [[n for n in range(1, 9) if has_level1(n, 8, 2, 2, limit)] for limit in (0, 1, 2, 3, None)]
    assert chosen == [[], [1, 3], [1, 3, 5, 7], [1, 2, 3, 4, 5, 7], [*range(1, 9)]]


@pytest.mark.parametrize(
    ("job", "sentence", "fix"),
    [
        (
            {"recompute_granularity": "full"},
            "every layer is recomputed as a whole (recompute_granularity full), which moe-zero-memory does not support",
            "--recompute-granularity selective",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("shared_experts", "moe_act", "core_attn")},
            "recompute_modules has moe_act, shared_experts, and moe-zero-memory recomputes moe, moe_act, shared_experts itself",
            "--recompute-modules N (without moe_act, shared_experts)",
        ),
    ],
)
def test_what_would_recompute_twice_is_refused(job, sentence, fix):
    assert refusals(NAME, **WORLD, recompute_granularity="selective", recompute_modules=("core_attn",)) == []
    assert refusals(NAME, **WORLD, **job) == [f"MS304 {NAME}: {sentence} | {fix}, or remove {NAME}"]
