"""No feature changes the initial weights: from the same seed a model begins as it does without the feature."""

import pytest

import mindspeed
from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.job.world import PARALLEL_SIZES
from mindspeed.plugins import MindSpeedError
from mindspeed.plugins.discovery import discover
from mindspeed.verification.case import VerificationCase, build_case
from mindspeed.verification.pool import WorkerPool
from tests.features.initial_weights import initial_weights

GROUPED = ("moe-adaptive-recompute", "moe-grouped-gemm", "moe-zero-memory")
"""Features that exchange Megatron's single experts for grouped ones, whose weights could be drawn in another order."""
OTHER_MODELS = {
    "alibi": "it has no position embeddings",
    "moe-shared-experts": "it adds a gate to the model",
    "tensor-parallel-2d": "a rank draws tiles of another shape",
}
NAMES = [name if name in GROUPED else pytest.param(name, marks=pytest.mark.long) for name in sorted(discover(only=()).usable)]


def without(name: str, case: VerificationCase) -> ActivationPlan:
    """Megatron's own plan in the layout of a case: the features that own parallel sizes, but not the one under test."""
    known, world = registry.catalog(), case.plan.world.known()
    sizes = {size: world[size] for size in (*PARALLEL_SIZES, "world_size") if size in world}
    names = [f.name for f in case.plan.features if f.name != name and known.specs[f.name].sizes]
    left_out = {name, *known.level_one}.difference(names)
    return mindspeed.plan(names, world=case.recipe.world() | sizes, without=sorted(left_out), platform="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_begins_with_the_weights_of_megatron(name: str, pool: WorkerPool) -> None:
    if name in OTHER_MODELS:
        pytest.skip(f"it is another model: {OTHER_MODELS[name]}")
    try:
        case = build_case([name])
        plans = case.plan, without(name, case)
    except MindSpeedError as error:
        pytest.skip(f"it has no layout that is also one without it: {error.problems[0].message}")
    ranks = int(case.plan.world.world_size)
    after, before = (pool.call(initial_weights, ranks, case.recipe, plan=plan) for plan in plans)
    assert [sorted(rank) for rank in after] == [sorted(rank) for rank in before]
    assert after == before
