from typing import Any

import pytest

from mindspeed.features.deepspeed_moe.feature import DeepspeedMoe, DeepspeedMoeArgs
from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import active, ask, not_checked, refusals

MOE: dict[str, Any] = {"num_experts": 8}


def refused(world: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    return refusals("deepspeed-moe", settings={"deepspeed-moe": settings}, **MOE | (world or {}))


@pytest.mark.parametrize(
    "settings", [{"capacity_factor": 0}, {"capacity_factor": -1.0}, {"min_capacity": 0}, {"noise": "gauss"}]
)
def test_values_out_of_range_are_refused(settings: dict[str, Any]):
    (problem,) = refused(**settings)
    assert problem.startswith("MS301 ")


def test_deepspeeds_spelling_of_noise_is_accepted():
    assert [feature(noise=word).args.noise for word in ("RSample", "Jitter", "None")] == ["rsample", "jitter", "none"]


@pytest.mark.parametrize("settings", [{"noise": "rsample"}, {"random_priority": True}])
def test_noise_for_one_expert_changes_nothing_with_several_and_the_plan_says_so(settings: dict[str, Any]):
    text = "noise=rsample and random_priority act only where a token has one expert, but router_topk is 2"
    for topk, expected in ((1, False), (2, True)):
        resolution = ask("deepspeed-moe", settings={"deepspeed-moe": settings}, router_topk=topk, **MOE)
        assert resolution.problems == []
        assert (text in [row.text for row in resolution.rows]) == expected


def test_operators_of_dispatchers_are_left_out_and_refused_where_they_are_requested():
    everywhere = {"has_variant": lambda op, platform: True}
    resolution = ask("deepspeed-moe", **MOE, **everywhere)
    assert (resolution.problems, "moe-token-permute" in [feature.name for feature in resolution.features]) == ([], False)
    assert [row.text for row in resolution.rows if row.feature == "moe-token-permute"] == [
        (
            "deepspeed-moe conflicts with it, because moe-token-permute changes Megatron's dispatcher, which deepspeed-moe "
            "does not use"
        )
    ]
    assert "moe-token-permute" in active("moe-alltoall-dispatcher", ep=2, **MOE, **everywhere)
    assert refusals("deepspeed-moe", "moe-token-permute", **MOE) == [
        (
            "MS202 deepspeed-moe conflicts with moe-token-permute, because moe-token-permute changes Megatron's dispatcher, "
            "which deepspeed-moe does not use | remove deepspeed-moe or moe-token-permute"
        )
    ]


def test_ranks_that_share_experts_have_micro_batches_of_one_length():
    reason = (
        "all ranks must exchange equal numbers of tokens, but with dynamic-shapes their micro-batches have different lengths"
    )
    excluded = f"MS202 deepspeed-moe conflicts with dynamic-shapes, because {reason}"
    features = ("deepspeed-moe", "expert-parallel", "dynamic-shapes", "pipeline-parallel")
    assert refusals(*features, ep=2, pp=2, **MOE) == [f"{excluded} | remove deepspeed-moe or dynamic-shapes"]
    assert refusals(*features, pp=2, **MOE) == []


def test_the_plan_has_the_bytes_of_masks_and_names_what_does_without():
    world = MOE | {"seq_length": 1024, "router_topk": 2, "dtype": "bf16", "tp": 2}
    rows = ask("deepspeed-moe", settings={"deepspeed-moe": {"groups": 4, "capacity_factor": 1.25}}, **world).rows
    kept = 2 * 512 * 8 * 80 * 2  # two masks, tokens of a rank, experts, 256 / 8 x 1.25 x 2 places, bytes of a value
    assert [row.text for row in rows if row.feature == "deepspeed-moe" and "masks" in row.text] == [
        (
            f"masks of 512 tokens x 8 experts x 80 slots keep {kept:,} bytes per layer and micro-batch; "
            "deepspeed-moe-rearrange avoids these masks"
        )
    ]


def test_an_unknown_world_is_not_checked():
    assert any("num_experts" in row for row in not_checked("deepspeed-moe"))


def feature(**settings: Any) -> DeepspeedMoe:
    return DeepspeedMoe(DeepspeedMoeArgs(**settings), World({"num_layers": 6, "num_experts": 4}))


def test_experts_are_in_every_nth_layer_counted_from_one():
    assert feature().megatron_args() == []
    (override,) = feature(interval=3).megatron_args()
    assert (override.argument, override.value) == ("moe_layer_freq", (0, 0, 1, 0, 0, 1))


def test_a_resumed_run_keeps_its_groups():
    saved = feature(groups=2).save_extra(None)
    feature(groups=2).load_extra(None, saved)
    with pytest.raises(MindSpeedError) as error:
        feature().load_extra(None, saved)
    assert str(error.value) == (
        "MS304 deepspeed-moe: the checkpoint was trained with 2 groups of tokens per micro-batch, but this run has 1\n"
        "  fix: --set deepspeed-moe.groups=2"
    )
