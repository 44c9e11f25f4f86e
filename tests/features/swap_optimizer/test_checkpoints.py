"""Checkpoints of runs with both optimizer features are Megatron's own: a plain run resumes them, and they resume one of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.pool import WorkerPool
from tests.memory.adam_steps import Trained, assert_equal
from tests.memory.optimizer_checkpoints import resume, save_and_go_on

pytestmark = pytest.mark.long

BOTH = ("swap-optimizer", "reuse-fp32-param")
AT = 2
SHARDED = ("distributed-optimizer",)


@pytest.mark.parametrize(
    ("names", "also", "nproc", "sharding", "asynchronous"),
    [
        (BOTH, (), 1, "", False),
        (BOTH, SHARDED, 2, "dp_reshardable", False),
        (BOTH, SHARDED, 2, "dp_reshardable", True),
        (BOTH, SHARDED, 2, "fully_reshardable", False),
        (BOTH, SHARDED, 2, "dp_zero_gather_scatter", False),
        (BOTH[:1], SHARDED, 2, "dp_reshardable", True),
        (BOTH[1:], SHARDED, 2, "dp_reshardable", True),
        (BOTH[:1], (), 1, "", True),
        (BOTH[1:], (), 1, "", True),
    ],
)
def test_a_checkpoint_is_resumed_with_and_without_the_features(
    pool: WorkerPool,
    tmp_path: Path,
    names: tuple[str, ...],
    also: tuple[str, ...],
    nproc: int,
    sharding: str,
    asynchronous: bool,
) -> None:
    settings = {name: {"parts": 4} for name in names}
    case = build_case(names, [Layer("test", settings=settings, world={"dtype": "bf16"})], also, nproc)
    recipe = replace(case.recipe, steps=5, shape=replace(case.recipe.shape, dropout=0.0))
    plans = {"plain": case.baseline, "features": case.plan}
    whole, resumed = [], []
    for name, plan in plans.items():
        saved = pool.call(save_and_go_on, nproc, recipe, AT, str(tmp_path / name), sharding, asynchronous, plan=plan)
        whole.append([Trained(**rank) for rank in saved])
    assert_equal(*whole)
    for saved, loaded in (("plain", "plain"), ("plain", "features"), ("features", "plain"), ("features", "features")):
        ranks = pool.call(resume, nproc, recipe, AT, str(tmp_path / saved), sharding, plan=plans[loaded])
        resumed.append([Trained(**rank) for rank in ranks])
    assert {step for rank in resumed[0] for step, _ in rank.losses} == set(range(AT, recipe.steps))
    for ranks in resumed[1:]:
        assert_equal(resumed[0], ranks)
