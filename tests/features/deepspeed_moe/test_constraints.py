from typing import Any

import pytest

from mindspeed.features.deepspeed_moe.feature import DeepspeedMoe, DeepspeedMoeArgs
from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import active, ask, not_checked, refusals
from tests.moe.refusals import DISPATCHERS, job, refusal

MOE: dict[str, Any] = {"num_experts": 8}


def refused(world: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    return refusals("deepspeed-moe", settings={"deepspeed-moe": settings}, **MOE | (world or {}))


SHARED = (*DISPATCHERS, "num_experts", "forced_balancing", "transformer_engine_layers")


@pytest.mark.parametrize("field", SHARED)
def test_jobs_that_it_does_not_support_are_refused(field: str):
    assert refused() == []
    assert refused(job(field)) == [refusal("deepspeed-moe", field)]


@pytest.mark.parametrize(
    ("world", "settings", "text"),
    [
        (
            {"tp": 2},
            {"groups": 3},
            "groups=3 is not divisible by tp x cp = 2 x 1 | --set deepspeed-moe.groups=VALUE (a multiple of 2 x 1)",
        ),
        (
            {},
            {"groups": 3},
            "groups=3 does not divide the 64 x 1 tokens of a micro-batch "
            "| --set deepspeed-moe.groups=VALUE (a divisor of the tokens)",
        ),
        (
            {},
            {"groups": 32},
            "min_capacity=4 is more than the tokens of a group; a micro-batch of 64 x 1 tokens has all groups "
            "| --set deepspeed-moe.min_capacity=1, or --set deepspeed-moe.groups=VALUE (fewer)",
        ),
        (
            {},
            {"interval": 9},
            "interval=9 is more than the 8 layers of the model "
            "| --set deepspeed-moe.interval=1, or --num-layers N (at least 9)",
        ),
        (
            {"ep": 2},
            {"reference": True},
            "the reference runs every expert on every token of a rank, and experts are spread over ep x tp = 2 x 1 ranks "
            "| remove the setting deepspeed-moe.reference",
        ),
        *(
            (
                {"router_topk": 2},
                {name: value},
                "noise=rsample and random_priority are for one expert per token, and router_topk is 2 "
                "| remove the setting deepspeed-moe.noise and remove the setting deepspeed-moe.random_priority, "
                "or --router-topk 1",
            )
            for name, value in {"noise": "RSample", "random_priority": True}.items()
        ),
    ],
)
def test_settings_that_do_not_fit_the_world_are_refused(world: dict[str, Any], settings: dict[str, Any], text: str):
    found = refused(world, **settings)
    assert f"MS304 deepspeed-moe: {text}" in found


@pytest.mark.parametrize(
    ("field", "value", "fits", "text"),
    [
        ("router_topk", 9, 8, "router_topk=9 is more than the 8 experts | --router-topk N (at most 8)"),
        (
            "expert_capacity_factor",
            1.5,
            0.0,
            "Megatron limits the tokens of an expert by expert_capacity_factor=1.5, and deepspeed-moe has a capacity of its "
            "own | --expert-capacity-factor 0 and --set deepspeed-moe.capacity_factor=VALUE",
        ),
        (
            "router_score",
            "sigmoid",
            "softmax",
            "scores of the router are sigmoid, and those of deepspeed-moe are softmax "
            "| --router-score softmax, or remove deepspeed-moe",
        ),
        (
            "router_balancing",
            ("seq_aux_loss",),
            ("none",),
            "the router balances experts by seq_aux_loss, and deepspeed-moe by aux_loss or none "
            "| --router-balancing aux_loss, or remove deepspeed-moe",
        ),
        (
            "dispatcher",
            "flex",
            "alltoall",
            "Megatron's dispatcher is flex, and deepspeed-moe has transfers of its own "
            "| --set expert-parallel.dispatcher=alltoall, or remove deepspeed-moe",
        ),
        (
            "router_groups",
            2,
            0,
            "the router chooses among 2 groups of experts, which deepspeed-moe does not support "
            "| --router-groups 0, or remove deepspeed-moe",
        ),
        (
            "router_bias",
            True,
            False,
            "the router balances experts by biases, which deepspeed-moe does not support "
            "| --no-router-bias, or remove deepspeed-moe",
        ),
        (
            "router_scaling",
            2.5,
            0.0,
            "the router scales probabilities by 2.5, which deepspeed-moe does not support "
            "| --router-scaling 0, or remove deepspeed-moe",
        ),
        (
            "probabilities_on_input",
            True,
            False,
            "probabilities weigh the input of experts, which deepspeed-moe does not support "
            "| --no-probabilities-on-input, or remove deepspeed-moe",
        ),
        (
            "shared_expert_overlap",
            True,
            False,
            "Megatron's dispatcher overlaps shared experts with its transfers, which deepspeed-moe does not support "
            "| --no-shared-expert-overlap, or --set moe-shared-experts.overlap=false, or remove deepspeed-moe",
        ),
    ],
)
def test_routing_that_the_gate_does_not_have_is_refused(field: str, value: Any, fits: Any, text: str):
    assert refused({field: value}) == [f"MS304 deepspeed-moe: {text}"]
    assert refused({field: fits}) == []


def test_tensor_ranks_that_would_train_copies_of_experts_are_refused():
    assert refused({"tp": 2, "expert_tensor_size": 2}) == refused({"tp": 2, "ep": 2, "expert_tensor_size": 1}) == []
    assert refused({"tp": 2, "expert_tensor_size": 1}) == [
        "MS304 deepspeed-moe: expert_tensor_size is 1 without expert parallelism, so each of tp=2 ranks trains a copy of every "
        "expert alone | --ep N (a multiple of 2), or remove the setting expert-parallel.expert_tensor_size"
    ]


@pytest.mark.parametrize("feature", ["deepspeed-moe-dropless", "deepspeed-moe-rearrange", "pipe-experts", "ampipe"])
def test_the_family_is_refused_beside_shared_experts_under_all_to_alls(feature: str):
    settings: dict[str, dict[str, Any]] = {"moe-shared-experts": {"size": 32}, "deepspeed-moe": {"groups": 2}}
    names = (feature, "deepspeed-moe", "moe-shared-experts")
    world = MOE | {"ep": 2, "multi_latent_attention": False}
    assert refusals(*names, settings=settings, **world) == []
    overlapped = settings | {"moe-shared-experts": {"size": 32, "overlap": True}}
    assert refusals(*names, settings=overlapped, **world) == [
        "MS304 deepspeed-moe: Megatron's dispatcher overlaps shared experts with its transfers, which deepspeed-moe does not "
        "support | --no-shared-expert-overlap, or --set moe-shared-experts.overlap=false, or remove deepspeed-moe"
    ]


def test_experts_that_ranks_cannot_share_evenly_are_refused():
    assert refused({"ep": 4}) == []
    assert refused({"ep": 3, "world_size": 3, "global_batch_size": 15}) == [
        "MS304 expert-parallel: 8 experts are not divisible by ep=3 | --ep N (a divisor of 8)"
    ]


def test_groups_that_fit_are_accepted():
    assert refused({"tp": 2}, groups=4) == []
    assert refused({"ep": 2}, groups=4, interval=2, min_capacity=16) == []


@pytest.mark.parametrize(
    "settings", [{"capacity_factor": 0}, {"capacity_factor": -1.0}, {"min_capacity": 0}, {"noise": "gauss"}]
)
def test_values_out_of_range_are_refused(settings: dict[str, Any]):
    (problem,) = refused(**settings)
    assert problem.startswith("MS301 ")


def test_deepspeeds_spelling_of_noise_is_accepted():
    assert [feature(noise=word).args.noise for word in ("RSample", "Jitter", "None")] == ["rsample", "jitter", "none"]


def test_tensor_parallelism_brings_sequence_parallelism():
    assert "sequence-parallel" in active("deepspeed-moe", tp=2, **MOE)


@pytest.mark.parametrize(
    ("name", "excluded"),
    [
        ("moe-alltoall-dispatcher", ["moe-alltoall-dispatcher"]),
        ("moe-allgather-dispatcher", ["moe-allgather-dispatcher"]),
        ("moe-alltoall-overlap", ["moe-alltoall-overlap", "moe-alltoall-dispatcher"]),
        ("moe-allgather-overlap", ["moe-allgather-overlap", "moe-allgather-dispatcher"]),
        ("moe-zero-memory", ["moe-alltoall-overlap", "moe-alltoall-dispatcher", "moe-zero-memory"]),
        ("moe-tp-extend-ep", ["moe-tp-extend-ep"]),
    ],
)
def test_features_that_send_tokens_otherwise_are_refused(name: str, excluded: list[str]):
    world = MOE | {"ep": 2, "tp": 2 if name == "moe-tp-extend-ep" else 1}
    assert refusals("deepspeed-moe", **world) == refusals(name, **world) == []
    assert refusals("deepspeed-moe", name, **world) == [
        f"MS202 deepspeed-moe and {other} exclude each other, because the layer has transfers of its own, of equal size on "
        f"every rank | remove deepspeed-moe or {name}"
        for other in excluded
    ]


def test_operators_of_dispatchers_are_left_out_and_refused_where_they_are_requested():
    everywhere = {"has_variant": lambda op, platform: True}
    resolution = ask("deepspeed-moe", **MOE, **everywhere)
    assert (resolution.problems, "moe-token-permute" in [feature.name for feature in resolution.features]) == ([], False)
    assert [row.text for row in resolution.rows if row.feature == "moe-token-permute"] == [
        "deepspeed-moe excludes it, because dispatchers call its operators, and the layer has none"
    ]
    assert "moe-token-permute" in active("moe-alltoall-dispatcher", ep=2, **MOE, **everywhere)
    assert refusals("deepspeed-moe", "moe-token-permute", **MOE) == [
        "MS202 deepspeed-moe and moe-token-permute exclude each other, because dispatchers call its operators, and the layer "
        "has none | remove deepspeed-moe or moe-token-permute"
    ]


def test_the_plan_has_the_bytes_of_masks_and_names_what_does_without():
    world = MOE | {"seq_length": 1024, "router_topk": 2, "dtype": "bf16", "tp": 2}
    rows = ask("deepspeed-moe", settings={"deepspeed-moe": {"groups": 4, "capacity_factor": 1.25}}, **world).rows
    kept = 2 * 512 * 8 * 80 * 2  # two masks, tokens of a rank, experts, 256 / 8 x 1.25 x 2 places, bytes of a value
    assert [row.text for row in rows if row.feature == "deepspeed-moe" and "masks" in row.text] == [
        f"masks of 512 tokens x 8 experts x 80 places keep {kept:,} bytes per layer and micro-batch; "
        "deepspeed-moe-rearrange has none"
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
        "MS304 deepspeed-moe: the run had 2 groups of tokens in a micro-batch, and would go on with 1\n"
        "  fix: --set deepspeed-moe.groups=2"
    )
