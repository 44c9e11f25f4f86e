"""A mask of another shape than an algorithm reads is refused with the shape that it expects, through Megatron's layers."""

import pytest

import mindspeed
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import LLAMA, Recipe
from tests.features.context_parallel.masks import refusal

RECIPE = Recipe(LLAMA)
LENGTH = LLAMA.seq_length


LONG = pytest.mark.long
SHARE, WHOLE = "(12, 24) or (1, 1, 12, 24)", "(24, 24) or (1, 1, 24, 24)"


@pytest.mark.parametrize(
    ("algorithm", "world", "function", "expected"),
    [
        ("ring-attention", 2, "ring_attention", SHARE),
        pytest.param("ulysses-attention", 2, "ulysses_attention", WHOLE, marks=LONG),
        pytest.param("kv-allgather-cp", 2, "kv_allgather_attention", SHARE, marks=LONG),
        pytest.param("hybrid-attention", 4, "ring_attention", SHARE, marks=LONG),
    ],
)
def test_a_mask_of_another_shape_is_refused(pool: WorkerPool, algorithm: str, world: int, function: str, expected: str) -> None:
    settings = {"context-parallel": {"size": world, "algorithm": algorithm}}
    if algorithm == "hybrid-attention":
        settings[algorithm] = {"ulysses_degree": 2}
    plan = mindspeed.plan(settings=settings, world={**RECIPE.world(), "world_size": world}, platform="cpu")
    text = f"MS505 {function}: mask has shape (1, 1, 3, 5), but {expected} is expected\n  fix: see the docstring of {function}"
    assert pool.call(refusal, world, RECIPE, 3, 5, plan=plan) == [text] * world
