"""The choice that a run makes, on the tiny model in one process and over pipelines."""

from typing import Any

import pytest

from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.plugins.active import active_feature
from mindspeed.problems import RunError
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import GPT, Recipe
from tests.conftest import Prove, differences

NAME = "adaptive-recompute"
RECIPE = Recipe(GPT, steps=4)


def trained(recipe: Recipe) -> dict[str, float]:
    from mindspeed.workbench.verification.training import train

    train(recipe)
    return dict(active_feature(NAME).policy.metrics())


def run(pool: WorkerPool, budget: float, swap: bool = False) -> dict[str, float]:
    settings = {NAME: {"budget_mb": budget, "profiling_steps": 2, "swap": swap}}
    layer = Layer("test", features=(NAME,), settings=settings, world={**RECIPE.world(), "world_size": 1}, platform="cpu")
    (metrics,) = pool.call(trained, 1, RECIPE, plan=registry.resolve([layer]))
    return metrics


PARTS = 4 * 3
"""Two norms and an activation in each layer."""


@pytest.mark.parametrize(
    ("budget", "kept"), [(10.0, {PARTS}), pytest.param(0.72, set(range(1, PARTS)), marks=pytest.mark.long)]
)
def test_as_much_is_kept_as_the_budget_holds(pool: WorkerPool, budget: float, kept: set[int]) -> None:
    metrics = run(pool, budget)
    assert metrics["kept_parts"] in kept
    assert metrics["peak_mb"] <= budget
    assert metrics["predicted_mb"] == pytest.approx(metrics["peak_mb"], rel=0.05)


@pytest.mark.long
def test_a_budget_below_the_least_is_refused_with_the_least(pool: WorkerPool) -> None:
    with pytest.raises(RunError) as error:
        run(pool, 0.69)  # what the planner foretells at least
    text = "which a step needs even if adaptive-recompute recomputes or offloads everything that it can"
    assert f"MS304 {NAME}: budget_mb=0.69 is less than 0.72 MiB, {text}\n" in str(error.value)


@pytest.mark.long
def test_attention_is_swapped_where_that_is_allowed(pool: WorkerPool) -> None:
    assert run(pool, 10.0, swap=True)["kept_parts"] == PARTS + 3
    assert run(pool, 0.7, swap=True)["peak_mb"] <= 0.7


@pytest.mark.long
@pytest.mark.parametrize("also", [["pipeline-parallel"], ["virtual-pipeline"], ["sequence-parallel"]], ids="-".join)
@pytest.mark.parametrize("swap", [False, True])
def test_a_layout_is_bit_equal(prove: Prove, also: list[str], swap: bool) -> None:
    settings: dict[str, dict[str, Any]] = {NAME: {"budget_mb": 1.0, "profiling_steps": 2, "swap": swap}}
    verdict = prove(NAME, also=also, settings=settings)
    assert verdict.problems == []
    assert differences(verdict) == {0.0}
