"""Optimizer steps that are validated later have the bits of synchronized ones."""

from typing import Any

import pytest

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.verification.pool import WorkerPool

STEPS = [(0, 1.0), (0, 100.0), (0, 1.0), (1, 200.0), (1, 1.0), (0, 1.0)]
"""Stage and factor of its gradients: steps 2 and 4 are clipped for the gradients of one stage alone."""
INFINITE = [(0, 1.0), (1, float("inf")), (0, 1.0), (0, float("nan")), (0, 1.0), (1, 100.0), (0, 1.0)]


def on_rank(name: str, *arguments: Any) -> Any:
    """Run a function of `post_validation_job`, which imports Megatron, on this rank."""
    from tests.pipeline import post_validation_job

    return getattr(post_validation_job, name)(*arguments)


def compared(pool: WorkerPool, ranks: int, steps: Any, *given: Any, settings: Any = None, **world: Any) -> list[dict[str, Any]]:
    sizes = {"world_size": ranks, "num_layers": 8, "micro_batch_size": 2, "tied_embeddings": False, "mtp_num_layers": 0}
    names = ("zero-bubble", *(["virtual-pipeline"] if world.get("vpp", 1) > 1 else []))
    replicas = ranks // world["pp"]
    layer = Layer(
        "test",
        features=names,
        settings={"zero-bubble": {"post_validation": True, **(settings or {})}},
        world=sizes | {"global_batch_size": 8 * replicas} | world,
        platform="cpu",
    )
    plan = registry.resolve([layer])
    return pool.call(on_rank, ranks, "compared", steps, *given, plan=plan)


def assert_equal(results: list[dict[str, Any]], repeated: int) -> None:
    for result in results:
        assert result["different"] == 0 < result["tensors"]
        for name in ("losses", "logged", "scale", "scheduled", "rates"):
            assert result["actual"][name] == result["expected"][name], name
        assert result["finite"]
        assert result["repeated"] == repeated


def test_a_clipped_step_is_repeated_with_the_bits_of_a_synchronized_one(pool: WorkerPool) -> None:
    assert_equal(compared(pool, 2, STEPS[:3], "fp32", False, pp=2), repeated=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "dtype", "sharded", "world"),
    [
        (2, "fp32", False, {"pp": 2}),
        (2, "bf16", False, {"pp": 2, "vpp": 2}),
        (4, "bf16", False, {"pp": 4}),
        (4, "fp32", True, {"pp": 2}),
        (4, "bf16", True, {"pp": 2}),
    ],
)
def test_clipped_steps_are_repeated_with_the_bits_of_synchronized_ones(
    pool: WorkerPool, ranks: int, dtype: str, sharded: bool, world: dict[str, Any]
) -> None:
    assert_equal(compared(pool, ranks, STEPS, dtype, sharded, **world), repeated=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "sharded", "world"),
    [(2, False, {"pp": 2}), (4, True, {"pp": 2}), (4, False, {"pp": 4})],
)
def test_skipped_steps_of_fp16_leave_the_bits_of_synchronized_ones(
    pool: WorkerPool, ranks: int, sharded: bool, world: dict[str, Any]
) -> None:
    """Loss scale, learning rate and weight decay are those of a skipped step too."""
    results = compared(pool, ranks, INFINITE, "fp16", sharded, **world)
    assert_equal(results, repeated=3)
    assert [result["actual"]["scheduled"] for result in results] == [5] * ranks


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_aux_loss_coeff": 1e-2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
"""A model whose forward passes count tokens and sum losses for the log."""
LENGTHS = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
"""Messages with headers."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "optimizer", "arguments", "world"),
    [
        ({"placement": "v"}, "adam", {}, {"pp": 2, "vpp": 2}),
        ({"costs": [10, 20, 7, 10], "hop": 1}, "sgd", {}, {"pp": 2, "vpp": 2}),
        ({"recompute": "least", "limit": 3}, "adam", {}, {"pp": 2, "vpp": 2}),
        ({"recompute": "all"}, "adam", LENGTHS, {"pp": 2}),
        ({"placement": "v"}, "adam", LENGTHS, {"pp": 4, "vpp": 2}),
        ({}, "adam", EXPERTS, {"pp": 2, "num_experts": 4}),
    ],
    ids=["v", "sgd", "recompute", "lengths", "v-lengths", "experts"],
)
def test_repeated_warm_ups_of_other_schedules_and_models(
    pool: WorkerPool, settings: dict[str, Any], optimizer: str, arguments: dict[str, Any], world: dict[str, Any]
) -> None:
    given = (STEPS, "fp32", False, optimizer, arguments)
    assert_equal(compared(pool, world["pp"], *given, settings=settings, **world), repeated=2)
