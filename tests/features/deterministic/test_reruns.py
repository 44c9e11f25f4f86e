"""A rerun gives the same bits with two threads, on one rank, two and four; see also tests/workbench/training/test_tools.py."""

from dataclasses import replace

import pytest

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import LLAMA, Recipe
from tests.features.deterministic import reruns_job

DROPOUT = replace(LLAMA, num_layers=2, dropout=0.1)


def plan_of(recipe: Recipe, *features: str, ranks: int = 1, interval: int = 0, **world: int) -> ActivationPlan:
    settings = {"deterministic": {"digest_interval": interval}} if interval else {}
    known = {**recipe.world(), "world_size": ranks, **world}
    return registry.plan(list(features), settings, platform="cpu", world=known)


def check_rerun(pool: WorkerPool, ranks: int) -> None:
    recipe = Recipe(DROPOUT, steps=2, global_batch_size=ranks)
    plan = plan_of(recipe, "deterministic", ranks=ranks, interval=1)
    found = pool.call(reruns_job.reruns, ranks, recipe, plan=plan)
    assert all(first == second for first, second in found)
    assert len({tuple(first[1].items()) for first, _ in found}) == 1


def test_a_rerun_has_the_same_losses_gradients_and_weights(pool: WorkerPool) -> None:
    check_rerun(pool, 2)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_rerun_has_the_same_bits_on_other_numbers_of_ranks(pool: WorkerPool, ranks: int) -> None:
    check_rerun(pool, ranks)


def test_a_planted_unordered_sum_differs_without_the_feature_and_not_with_it(pool: WorkerPool) -> None:
    recipe = Recipe(LLAMA)
    (without,) = pool.call(reruns_job.unordered_sums, 1, 400, plan=plan_of(recipe))
    (ordered,) = pool.call(reruns_job.unordered_sums, 1, 10, plan=plan_of(recipe, "deterministic"))
    assert (without, ordered) == (2, 1)


@pytest.mark.long
def test_it_seeds_nothing(pool: WorkerPool) -> None:
    """With dropout the first step of two stages has the same losses as without the feature."""
    recipe = Recipe(DROPOUT, steps=1, global_batch_size=2)
    plans = [plan_of(recipe, *names, ranks=2, pp=2) for names in (("deterministic",), ())]
    with_it, without = (pool.call(reruns_job.losses, 2, recipe, plan=plan) for plan in plans)
    assert with_it == without
    assert with_it != pool.call(reruns_job.losses, 2, replace(recipe, seed=7), plan=plans[1])
