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
        for name in ("losses", "scale", "scheduled", "rates"):
            assert result["actual"][name] == result["expected"][name], name
        assert result["finite"]
        assert result["repeated"] == repeated


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
