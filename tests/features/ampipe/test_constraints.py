from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.features.ampipe.feature import Ampipe, AmpipeArgs
from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import active, ask, refusals

WORLD: dict[str, Any] = {"num_experts": 8, "ep": 2, "multi_latent_attention": False}


def refused(*names: str, groups: int | None = 4, world: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    values = {"deepspeed-moe": {"groups": groups}} if groups else {}
    return refusals("ampipe", "deepspeed-moe", *names, settings={**values, "ampipe": settings}, **WORLD | (world or {}))


def test_it_needs_a_layer_that_runs_in_steps():
    assert refusals("ampipe", **WORLD) == [
        "MS205 ampipe needs one of deepspeed-moe, moe-alltoall-overlap, because the layer posts its transfers, and waits for "
        "them later | add one of deepspeed-moe, moe-alltoall-overlap to the features"
    ]


def test_layers_that_fit_are_accepted():
    assert refused() == []
    assert refused(parts=4, overlap=True, world={"tp": 2}, groups=16) == []
    assert "ampipe" in active("ampipe", "moe-alltoall-overlap", **WORLD)
    assert "ampipe" in active("ampipe", "deepspeed-moe", settings={"deepspeed-moe": {"groups": 2}}, **WORLD)


@pytest.mark.parametrize(
    ("world", "settings", "groups", "text"),
    [
        (
            {"ep": 1},
            {},
            4,
            "experts are on one rank, and there is no transfer to hide | --ep 2 or more, or remove ampipe",
        ),
        (
            {"tp": 2},
            {"parts": 3},
            12,
            "3 chunks cannot be made of 64 tokens on 2 tensor-parallel ranks | use a divisor of the tokens of a rank for "
            "ampipe.parts",
        ),
        (
            {"tp": 2},
            {"parts": 2},
            2,
            "deepspeed-moe.groups is 2, and 2 chunks on 2 tensor-parallel ranks, each with a capacity of its own, need a "
            "multiple of both | use a multiple of 2 x 2 for deepspeed-moe.groups",
        ),
        (
            {},
            {},
            None,
            "deepspeed-moe.groups is None, and 2 chunks on 1 tensor-parallel ranks, each with a capacity of its own, need a "
            "multiple of both | use a multiple of 2 x 1 for deepspeed-moe.groups",
        ),
        (
            {},
            {"overlap": True},
            4,
            "overlap hides transfers of tensor ranks, and tp is 1 | --tp 2 or more, or remove the setting ampipe.overlap",
        ),
        (
            {"multi_latent_attention": True},
            {},
            4,
            "attention is multi-latent, and its keys are not those of the whole sequence | remove ampipe",
        ),
        (
            {"expert_capacity_factor": 1.5},
            {},
            4,
            "expert_capacity_factor is 1.5, and its places are of all tokens together "
            "| --expert-capacity-factor 0, or remove ampipe",
        ),
        (
            {"cuda_graphs": True},
            {},
            4,
            "layers are captured as CUDA graphs, which ampipe does not serve "
            "| --no-cuda-graphs (Megatron-LM: --cuda-graph-impl none), or remove ampipe",
        ),
    ],
)
def test_worlds_that_do_not_fit_are_refused(world: dict[str, Any], settings: dict[str, Any], groups: int | None, text: str):
    assert f"MS304 ampipe: {text}" in refused(world=world, groups=groups, **settings)


def test_chunks_of_one_are_refused():
    (problem,) = refused(parts=1)
    assert problem.startswith("MS301 ")


def test_selective_recomputation_is_refused_and_full_one_is_not():
    def problems(granularity: str, **more: Any) -> list[str]:
        values = {"deepspeed-moe": {"groups": 4}, "recompute": {"granularity": granularity, **more}}
        return refusals("ampipe", "deepspeed-moe", "recompute", settings=values, **WORLD)

    assert problems("full", method="uniform", num_layers=1) == []
    assert problems("selective") == [
        "MS304 ampipe: recompute.granularity is selective, and the modules of a layer run once per chunk "
        "| --set recompute.granularity=full, or remove ampipe"
    ]


MODULES = "it changes modules that run once per micro-batch, and chunks run them several times"
EXPERTS = "it recomputes or counts what experts get per micro-batch, and chunks come one by one"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("ring-attention", "a rank has all keys of its chunks"),
        ("nano-pipe", "the schedule cuts layers where chunks are under way"),
        ("mc2", "it cuts the projection behind attention itself"),
        ("eod-reset", "chunks are of causal or full attention"),
        ("shared-attention-mask", "chunks are of causal or full attention"),
        ("norm-recompute", MODULES),
        ("activation-recompute", MODULES),
        ("swap-attention", MODULES),
        ("adaptive-recompute", MODULES),
        ("moe-zero-memory", EXPERTS),
        ("moe-adaptive-recompute", EXPERTS),
        ("moe-load-report", EXPERTS),
    ],
)
def test_features_that_do_not_fit_are_refused(other: str, reason: str):
    first, second = sorted(("ampipe", other))
    text = f"MS202 {first} and {second} exclude each other, because {reason} | remove {first} or {second}"
    assert text in refused(other)


def test_overlap_of_tensor_ranks_is_refused_where_the_dispatch_has_them():
    world = WORLD | {"tp": 2, "seq_length": 64}
    settings: dict[str, dict[str, Any]] = {"ampipe": {"overlap": True}}
    assert refusals("ampipe", "moe-alltoall-overlap", **world) == []
    (problem,) = refusals("ampipe", "moe-alltoall-overlap", settings=settings, **world)
    assert problem == (
        "MS202 ampipe and moe-alltoall-overlap exclude each other, because its transfers of tensor ranks are part of the "
        "dispatch, and ampipe.overlap has none to hide | remove ampipe or moe-alltoall-overlap"
    )


def test_what_nobody_said_is_not_checked():
    resolution = ask("ampipe", "deepspeed-moe", model={}, settings={"deepspeed-moe": {"groups": 4}}, ep=2)
    assert [row.text for row in resolution.rows if row.kind == "not-checked" and row.feature == "ampipe"]


def config(**changes: Any) -> SimpleNamespace:
    values = {
        "num_moe_experts": 8,
        "expert_model_parallel_size": 2,
        "context_parallel_size": 1,
        "recompute_granularity": None,
        "window_size": None,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_expert_capacity_factor": None,
    }
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"expert_model_parallel_size": 1},
            "expert_model_parallel_size is 1, and there is no transfer to hide | set expert_model_parallel_size=2 or more",
        ),
        (
            {"context_parallel_size": 2},
            "context_parallel_size is above 1, and a rank has not all keys | set context_parallel_size=1",
        ),
        (
            {"recompute_granularity": "selective"},
            "recompute_granularity is selective, and the modules of a layer run once per chunk "
            "| set recompute_granularity=full",
        ),
        ({"window_size": (4, 0)}, "window_size is set, and chunks are of causal or full attention | drop window_size"),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            "moe_router_load_balancing_type is sinkhorn, and routes all tokens together "
            "| set moe_router_load_balancing_type=aux_loss",
        ),
        (
            {"moe_expert_capacity_factor": 1.0},
            "moe_expert_capacity_factor is set, and its places are of all tokens together | drop moe_expert_capacity_factor",
        ),
        ({"multi_latent_attention": True}, "multi_latent_attention is set | drop multi_latent_attention"),
        ({"cuda_graph_impl": "local"}, "CUDA graphs are set | drop the CUDA graphs of the configuration"),
        *(
            ({name: value}, f"{name} is set | drop {name}")
            for name, value in {
                "attention_output_gate": True,
                "fine_grained_activation_offloading": True,
                "cpu_offloading": True,
                "overlap_moe_expert_parallel_comm": True,
                "moe_router_force_load_balancing": True,
                "moe_latent_size": 16,
                "fp8": "e4m3",
                "fp4": "e2m1",
            }.items()
        ),
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes: dict[str, Any], text: str):
    feature = Ampipe(AmpipeArgs(), World({}))
    feature.config_ready(config())
    feature.config_ready(config(num_moe_experts=None, **changes))
    with pytest.raises(MindSpeedError) as raised:
        feature.config_ready(config(**changes))
    assert [f"{found.code} {found.message} | {found.fix_text}" for found in raised.value.problems] == [f"MS304 ampipe: {text}"]
