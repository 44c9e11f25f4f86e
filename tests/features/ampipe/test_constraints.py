from typing import Any

import pytest

from tests.features.resolving import active, ask, refusals
from tests.moe.refusals import DISPATCHERS, job, refusal

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
            "expert parallelism is off (ep=1), so ampipe has no transfer to overlap | --ep 2 or more, or remove ampipe",
        ),
        (
            {"tp": 2},
            {"parts": 3},
            12,
            "seq_length=64 is not divisible by 3 chunks x tp=2 | --set ampipe.parts=VALUE (a divisor of the tokens of a rank)",
        ),
        *(
            (
                {"tp": tp},
                {"parts": 2},
                groups,
                f"deepspeed-moe.groups={groups} is not a multiple of 2 chunks x tp={tp}, each with its own capacity "
                f"| --set deepspeed-moe.groups=VALUE (a multiple of 2 x {tp})",
            )
            for tp, groups in ((2, 2), (1, None))
        ),
        (
            {},
            {"overlap": True},
            4,
            "overlap hides transfers of tensor-parallel ranks, and tensor parallelism is off (tp=1) "
            "| --tp 2 or more, or remove the setting ampipe.overlap",
        ),
        (
            {"cp": 2},
            {},
            4,
            "ranks have a share of the keys each (cp=2), and ampipe needs all of them | --cp 1, or remove ampipe",
        ),
        (
            {"recompute_granularity": "selective"},
            {},
            4,
            "recompute_granularity is selective, which takes modules once per layer, and ampipe runs them once per chunk "
            "| --set recompute.granularity=full, or remove ampipe",
        ),
        (
            {"router_balancing": ("sinkhorn",)},
            {},
            4,
            "the router balances experts by sinkhorn over all tokens, and ampipe routes them chunk by chunk "
            "| --router-balancing aux_loss, or remove ampipe",
        ),
        (
            {"multi_latent_attention": True},
            {},
            4,
            "attention is multi-latent, which ampipe does not support | --no-multi-latent-attention, or remove ampipe",
        ),
        (
            {"windowed_attention": True},
            {},
            4,
            "attention has a window, and ampipe supports only causal and full attention "
            "| --no-windowed-attention, or remove ampipe",
        ),
        (
            {"gated_attention": True},
            {},
            4,
            "the output of attention has a gate, which ampipe does not support | --no-gated-attention, or remove ampipe",
        ),
        (
            {"expert_capacity_factor": 1.5},
            {},
            4,
            "Megatron limits the tokens of an expert (expert_capacity_factor 1.5), which ampipe does not support "
            "| --expert-capacity-factor 0, or remove ampipe",
        ),
    ],
)
def test_worlds_that_do_not_fit_are_refused(world: dict[str, Any], settings: dict[str, Any], groups: int | None, text: str):
    assert f"MS304 ampipe: {text}" in refused(world=world, groups=groups, **settings)


SHARED = (
    *DISPATCHERS,
    "num_experts",
    "forced_balancing",
    "cpu_offloading",
    "fine_grained_offloading",
    "transformer_engine_layers",
)


@pytest.mark.parametrize("field", SHARED)
def test_jobs_that_it_does_not_support_are_refused(field: str):
    assert refusal("ampipe", field) in refused(world=job(field))


def test_chunks_of_one_are_refused():
    (problem,) = refused(parts=1)
    assert problem.startswith("MS301 ")


def test_selective_recomputation_is_refused_and_full_one_is_not():
    def problems(granularity: str, **more: Any) -> list[str]:
        values = {"deepspeed-moe": {"groups": 4}, "recompute": {"granularity": granularity, **more}}
        return refusals("ampipe", "deepspeed-moe", "recompute", settings=values, **WORLD)

    assert problems("full", method="uniform", num_layers=1) == []
    (problem,) = problems("selective")
    assert problem.startswith("MS304 ampipe: recompute_granularity is selective, ")


MODULES = "it changes modules that run once per micro-batch, and chunks run them several times"
EXPERTS = "it recomputes or counts what experts get per micro-batch, and chunks come one by one"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("nano-pipe", "the schedule splits layers whose chunks are still in flight"),
        ("mc2", "it splits the projection after attention itself"),
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
