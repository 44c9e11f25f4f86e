"""What the ranks of a job do in the tests of determinism: all with two threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed.plugins import active_feature
from mindspeed.workbench.verification.shape import Recipe
from mindspeed.workbench.verification.training import train


@contextmanager
def two_threads() -> Iterator[None]:
    """Run with two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reruns(recipe: Recipe) -> list[tuple[dict[tuple[int, int], float], dict[str, float]]]:
    """Train twice; return each time the losses of this rank and the digests of all."""
    feature: Any = active_feature("deterministic")
    found = []
    with two_threads():
        for _ in range(2):
            losses = dict(train(recipe).losses)
            found.append((losses, feature.digests.compare(recipe.steps)))
    return found


def losses(recipe: Recipe) -> dict[tuple[int, int], float]:
    """Train; return the losses of this rank."""
    with two_threads():
        return dict(train(recipe).losses)


def unordered_sums(most: int) -> int:
    """Sum the same numbers at one place, in parallel, up to ``most`` times or until two sums differ; return how many there are.

    Threads add to the place whenever they get there, unless torch's algorithms are deterministic.
    """
    index = torch.zeros(200_000, dtype=torch.int64)
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * 1e4
    sums: set[float] = set()
    with two_threads():
        for _ in range(most):
            sums.add(torch.zeros(1).index_put_((index,), values, accumulate=True).item())
            if len(sums) > 1:
                break
    return len(sums)
