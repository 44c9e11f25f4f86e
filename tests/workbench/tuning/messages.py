"""Count what a training step sends, in a worker."""

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from mindspeed.platforms.collectives import traffic
from mindspeed.workbench.verification.record import RankResult
from mindspeed.workbench.verification.shape import Recipe
from mindspeed.workbench.verification.training import _Run


def sent(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Return calls and bytes of the second step by group, on this rank; an all-reduce is two calls."""
    torch.manual_seed(recipe.seed)
    model_parallel_cuda_manual_seed(recipe.seed, force_reset_rng=True)
    run = _Run(recipe, RankResult())
    run.train_step(1)
    with traffic() as moved:
        run.train_step(2)
    found: dict[str, tuple[int, int]] = {}
    for (kind, group), count in moved.items():
        calls, size = found.get(group, (0, 0))
        found[group] = calls + count.calls * (2 if kind == "all_reduce" else 1), size + count.bytes
    return found
