"""A rerun gives the same bits, on one rank and on two."""

from __future__ import annotations

import pytest
import torch

from mindspeed import registry
from mindspeed.plugins import active_feature
from mindspeed.verification.pool import WorkerPool
from mindspeed.verification.shape import LLAMA, Recipe
from mindspeed.verification.training import train


def digests(recipe: Recipe) -> tuple[dict[tuple[int, int], float], dict[str, float]]:
    """Train with two threads; return the losses of this rank and the digests of all."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        losses = dict(train(recipe).losses)
        return losses, active_feature("deterministic").digests.compare(recipe.steps)
    finally:
        torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rerun_has_the_same_losses_gradients_and_weights(pool: WorkerPool, ranks: int) -> None:
    recipe = Recipe(LLAMA, steps=3)
    world = {**recipe.world(), "world_size": ranks}
    settings = {"deterministic": {"digest_interval": 1}}
    plan = registry.plan(["deterministic"], settings, platform="cpu", world=world)
    first, second = (pool.call(digests, ranks, recipe, plan=plan) for _ in range(2))
    assert first == second
    assert len({tuple(found[1].items()) for found in first}) == 1
