from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.features.deepspeed_moe.feature import DeepspeedMoe, DeepspeedMoeArgs
from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import active, ask, not_checked, refusals

MOE: dict[str, Any] = {"num_experts": 8}


def refused(world: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    return refusals("deepspeed-moe", settings={"deepspeed-moe": settings}, **MOE | (world or {}))


def test_a_dense_model_is_refused():
    assert refused() == []
    assert refused({"num_experts": 0}) == [
        "MS304 deepspeed-moe: there are no experts to choose from, the model is dense "
        "| --num-experts N, or remove deepspeed-moe"
    ]


@pytest.mark.parametrize(
    ("world", "settings", "text"),
    [
        (
            {"tp": 2},
            {"groups": 3},
            "3 groups of tokens cannot be spread over the 2 x 1 ranks of tp and cp "
            "| use a multiple of tp x cp for deepspeed-moe.groups",
        ),
        (
            {},
            {"groups": 3},
            "3 groups cannot be made of 64 x 1 tokens of a micro-batch | use a divisor of the tokens for deepspeed-moe.groups",
        ),
        (
            {},
            {"groups": 32},
            "min_capacity=4 is more than the tokens of a group, and 64 x 1 tokens of a micro-batch make all groups "
            "| --set deepspeed-moe.min_capacity=1, or fewer groups",
        ),
        (
            {},
            {"interval": 9},
            "every 9th layer has experts, and the model has 8 layers | --set deepspeed-moe.interval=1, or more layers",
        ),
        (
            {"ep": 2},
            {"reference": True},
            "the reference runs every expert on every token of a rank, and experts are spread over ep x tp = 2 x 1 ranks "
            "| drop deepspeed-moe.reference",
        ),
    ],
)
def test_settings_that_do_not_fit_the_world_are_refused(world: dict[str, Any], settings: dict[str, Any], text: str):
    found = refused(world, **settings)
    assert f"MS304 deepspeed-moe: {text}" in found


@pytest.mark.parametrize(
    ("world", "fits", "text"),
    [
        (
            {"router_topk": 9},
            {"router_topk": 8},
            "a token has 9 experts, and there are 8 | use a --router-topk of at most 8",
        ),
        (
            {"expert_capacity_factor": 1.5},
            {"expert_capacity_factor": 0.0},
            "expert_capacity_factor is 1.5, Megatron's own capacity "
            "| --expert-capacity-factor 0, and --set deepspeed-moe.capacity_factor",
        ),
        (
            {"low_precision": True},
            {"low_precision": False},
            "linear layers multiply in fp8 or fp4, which deepspeed-moe does not serve "
            "| --no-low-precision (Megatron-LM: no --fp8-format, --fp4-format), or remove deepspeed-moe",
        ),
        (
            {"cuda_graphs": True},
            {"cuda_graphs": False},
            "layers are captured as CUDA graphs, which deepspeed-moe does not serve "
            "| --no-cuda-graphs (Megatron-LM: --cuda-graph-impl none), or remove deepspeed-moe",
        ),
        (
            {"latent_expert_size": 16},
            {"latent_expert_size": 0},
            "experts work on latent vectors, which deepspeed-moe does not serve "
            "| --latent-expert-size 0 (Megatron-LM: no --moe-latent-size), or remove deepspeed-moe",
        ),
        (
            {"overlapped_micro_batches": True},
            {"overlapped_micro_batches": False},
            "Megatron hides the transfers behind another micro-batch (overlap_moe_expert_parallel_comm), which deepspeed-moe "
            "does not serve | --no-overlapped-micro-batches (Megatron-LM: no --overlap-moe-expert-parallel-comm), or remove "
            "deepspeed-moe",
        ),
    ],
)
def test_models_that_the_layer_does_not_serve_are_refused(world: dict[str, Any], fits: dict[str, Any], text: str):
    assert refused(world) == [f"MS304 deepspeed-moe: {text}"]
    assert refused(fits) == []


def test_experts_that_ranks_cannot_share_evenly_are_refused():
    assert refused({"ep": 4}) == []
    assert refused({"ep": 3, "world_size": 3, "global_batch_size": 15}) == [
        "MS304 expert-parallel: 8 experts cannot be spread evenly over 3 ranks | --ep N (a divisor of 8)"
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


def test_deepspeeds_spelling_of_noise_is_taken():
    with pytest.raises(MindSpeedError, match="noise=rsample is for one expert"):
        feature(noise="RSample").config_ready(config())
    feature(noise="None").config_ready(config())


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


def config(**values: Any) -> SimpleNamespace:
    defaults = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_expert_capacity_factor": None,
        "moe_token_dispatcher_type": "alltoall",
    }
    return SimpleNamespace(**defaults | values)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"moe_router_topk": 5},
            "moe_router_topk is 5, more than the 4 experts\n  fix: use a moe_router_topk of at most 4",
        ),
        (
            {"moe_router_score_function": "sigmoid"},
            "moe_router_score_function is sigmoid, and the gate's is softmax\n  fix: set moe_router_score_function=softmax",
        ),
        (
            {"moe_router_load_balancing_type": "seq_aux_loss"},
            "moe_router_load_balancing_type is seq_aux_loss, and the gate has aux_loss and none\n"
            "  fix: set moe_router_load_balancing_type=aux_loss",
        ),
        (
            {"moe_expert_capacity_factor": 1.0},
            "moe_expert_capacity_factor is set, Megatron's own capacity\n"
            "  fix: drop moe_expert_capacity_factor, and --set deepspeed-moe.capacity_factor",
        ),
        (
            {"moe_token_dispatcher_type": "flex"},
            "moe_token_dispatcher_type is flex\n  fix: set moe_token_dispatcher_type=alltoall",
        ),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 1},
            "expert_tensor_parallel_size is 1, and each of 2 tensor-parallel ranks would train a copy of every expert alone\n"
            "  fix: set expert_tensor_parallel_size=2, or expert_model_parallel_size=2",
        ),
        *(
            ({name: value}, f"{name} is set\n  fix: drop {name}")
            for name, value in {
                "moe_router_num_groups": 2,
                "moe_router_enable_expert_bias": True,
                "moe_router_topk_scaling_factor": 2.5,
                "moe_router_force_load_balancing": True,
                "moe_apply_probs_on_input": True,
                "moe_shared_expert_overlap": True,
                "moe_latent_size": 16,
                "overlap_moe_expert_parallel_comm": True,
                "fp8": "e4m3",
                "fp4": "e2m1",
            }.items()
        ),
        ({"cuda_graph_impl": "local"}, "CUDA graphs are set\n  fix: drop the CUDA graphs of the configuration"),
    ],
)
def test_routing_that_the_gate_does_not_have_is_refused(values: dict[str, Any], text: str):
    feature().config_ready(config())
    feature().config_ready(config(num_moe_experts=None, **values))
    feature().config_ready(config(tensor_model_parallel_size=2, expert_tensor_parallel_size=2))
    with pytest.raises(MindSpeedError) as error:
        feature().config_ready(config(**values))
    assert str(error.value) == f"MS304 deepspeed-moe: {text}"


@pytest.mark.parametrize("setting", ["noise=rsample", "random_priority"])
def test_settings_of_one_choice_need_one_choice(setting: str):
    name = setting.partition("=")[0]
    given = feature(**{name: "rsample" if name == "noise" else True})
    given.config_ready(config(moe_router_topk=1))
    with pytest.raises(MindSpeedError) as error:
        given.config_ready(config())
    assert str(error.value) == (
        f"MS304 deepspeed-moe: {setting} is for one expert per token, and moe_router_topk is 2\n"
        f"  fix: drop deepspeed-moe.{name}, or set moe_router_topk=1"
    )


def test_a_resumed_run_keeps_its_groups():
    saved = feature(groups=2).save_extra(None)
    feature(groups=2).load_extra(None, saved)
    with pytest.raises(MindSpeedError) as error:
        feature().load_extra(None, saved)
    assert str(error.value) == (
        "MS304 deepspeed-moe: the run had 2 groups of tokens in a micro-batch, and would go on with 1\n"
        "  fix: --set deepspeed-moe.groups=2"
    )
