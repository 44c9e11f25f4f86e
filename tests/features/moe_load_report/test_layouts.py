"""The load of experts is that of one process in every layout: the ranks' shares of tokens and layers add up to it."""

from typing import Any, Final

import numpy as np
import pytest

from mindspeed import registry
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import MOE, Recipe
from tests.features.moe_load_report.load_job import rows_of_first_step

LAYOUTS: Final[dict[str, tuple[dict[str, int], tuple[str, ...]]]] = {
    "shares of the sequence, by tp": ({"tp": 2}, ("sequence-parallel",)),
    "shares of the sequence, by cp": ({"cp": 2}, ("ring-attention",)),
    "shares of the batch": ({}, ()),
    "shares of batch and experts": ({"ep": 2}, ()),
    "shares of the layers": ({"pp": 2}, ()),
}


def rows(pool: WorkerPool, ranks: int, *features: str, **world: Any) -> list[np.ndarray]:
    recipe = Recipe(MOE, steps=1)
    known = {**recipe.world(), "world_size": ranks, **world}
    plan = registry.plan(["moe-load-report", *features], world=known, platform="cpu")
    return [np.array(counted) for counted in pool.call(rows_of_first_step, ranks, recipe, plan=plan)]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rows_of_all_ranks_are_those_of_one_process(pool: WorkerPool, layout: str) -> None:
    (whole,) = rows(pool, 1)
    sizes, features = LAYOUTS[layout]
    first, second = rows(pool, 2, *features, **sizes)
    if layout == "shares of the layers":
        assert (np.concatenate([first, second]) == whole).all()
    else:
        assert (first + second == whole).all()
        assert 0 < first.sum() < whole.sum()
