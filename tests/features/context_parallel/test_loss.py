"""The loss of a shared sequence: loss functions of two and of three values at two context-parallel ranks."""

from dataclasses import replace
from typing import Any

import pytest

import mindspeed
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import LLAMA, Recipe
from tests.features.context_parallel.losses import steps

RECIPE = Recipe(replace(LLAMA, num_layers=1), global_batch_size=3, ragged=True)
PROBLEM = (
    "MS343 context-parallel: the loss function returns two values and divides by the local tokens of a rank. Gradients "
    "are therefore too large by a factor of 2, the number of context-parallel ranks (Adam hides this, the gradient norm "
    "shows it)\n"
    "  fix: return three values: the sum of the losses of this rank's tokens, their number (an int tensor), and the "
    "report"
)


def run(pool: WorkerPool, loss: str, size: int, strict: bool = False) -> Any:
    features = ["context-parallel", "ring-attention"] if size > 1 else []
    settings = {"context-parallel": {"size": size}} if size > 1 else {}
    world = {**RECIPE.world(), "world_size": size}
    plan = mindspeed.plan(features, settings, world=world, strict=strict, platform="cpu", level=2)
    return pool.call(steps, size, RECIPE, loss, 2, plan=plan)


def reports(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith("MS343")]


@pytest.mark.long
def test_two_values_are_reported_once_on_the_first_rank_with_the_fix(pool: WorkerPool) -> None:
    (first, error, _), (second, _, _) = run(pool, "two_values", 2)
    assert (reports(first), error, reports(second)) == ([PROBLEM], "", [])


def test_two_values_are_an_error_on_every_rank_under_strict_before_any_gradient_is_made(pool: WorkerPool) -> None:
    assert [(error, norms) for _, error, norms in run(pool, "two_values", 2, strict=True)] == [(PROBLEM, [])] * 2


@pytest.mark.long
@pytest.mark.parametrize("loss", ["three_values", "share_of_two_values"])
def test_a_loss_is_that_of_one_process_where_ranks_and_micro_batches_have_different_numbers_of_tokens(
    pool: WorkerPool, loss: str
) -> None:
    ((_, _, expected),) = run(pool, "mean_of_some", 1)
    for said, _, norms in run(pool, loss, 2):
        assert (reports(said), norms) == ([], pytest.approx(expected, rel=1e-5))


@pytest.mark.long
def test_two_values_are_too_large_by_the_number_of_ranks(pool: WorkerPool) -> None:
    ((said, _, expected),) = run(pool, "two_values", 1)
    assert reports(said) == []
    for _, _, norms in run(pool, "two_values", 2):
        assert norms == pytest.approx([2 * norm for norm in expected], rel=1e-5)
