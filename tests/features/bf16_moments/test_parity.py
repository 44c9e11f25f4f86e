"""Steps of Adam with moments in bf16 against the slow form: torch's Adam, whose moments are rounded after each step."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.pool import WorkerPool
from tests.features.resolving import refusals
from tests.memory.adam_steps import Trained, adam_run, record, trained

NAME = "bf16-moments"
MOMENTS = ("exp_avg", "exp_avg_sq")


def train_slowly(recipe: Any) -> dict[str, Any]:
    """Run the steps of a recipe on one rank without the feature, and round the moments after each step."""
    from mindspeed.memory import optimizer_windows as windows

    with adam_run(recipe) as run:
        for step in range(recipe.steps):
            run.train_step(step)
            for member in windows.members(run.optimizer):
                for state in member.optimizer.state.values():
                    for name in MOMENTS:
                        state[name].copy_(state[name].bfloat16())
        return vars(record(run))


def slow_and_found(pool: WorkerPool, nproc: int, also: tuple[str, ...] = (), **settings: Any) -> list[tuple[Trained, Trained]]:
    """Every rank of the slow form and of the feature after five steps, which must be equal to the bit."""
    case = build_case([NAME], [Layer("test", settings=settings, world={"dtype": "bf16"})], also, nproc)
    recipe = replace(case.recipe, steps=5)
    slow = [Trained(**result) for result in pool.call(train_slowly, nproc, recipe, plan=case.baseline)]
    ranks = list(zip(slow, trained(pool, nproc, recipe, case.plan), strict=True))
    for without, found in ranks:
        assert found.losses == without.losses
        for values, others in ((found.weights, without.weights), (found.optimizer, without.optimizer)):
            assert values.keys() == others.keys()
            assert [name for name in values if not torch.equal(values[name], others[name].to(values[name].dtype))] == []
    return ranks


def test_five_steps_are_those_of_moments_rounded_after_each_step(pool: WorkerPool) -> None:
    for without, found in slow_and_found(pool, 1, **{NAME: {"parts": 4}}):
        assert found.bytes["state"] * 2 == without.bytes["state"]
        assert found.bytes["main"] == without.bytes["main"]


@pytest.mark.long
@pytest.mark.parametrize("nproc", [2, 4])
def test_shards_of_the_distributed_optimizer_are_rounded_as_well(pool: WorkerPool, nproc: int) -> None:
    for without, found in slow_and_found(pool, nproc, ("distributed-optimizer",)):
        assert found.bytes["state"] * 2 == without.bytes["state"]


@pytest.mark.long
@pytest.mark.parametrize("also", ["reuse-fp32-param", "swap-optimizer"])
def test_other_features_of_the_optimizer_keep_the_moments_in_bf16(pool: WorkerPool, also: str) -> None:
    for without, found in slow_and_found(pool, 1, (also,)):
        assert found.bytes["state"] * 2 == without.bytes["state"]


def save_and_load(recipe: Any) -> list[str]:
    """Return the moments that differ after a checkpoint was saved and loaded into a new optimizer."""
    from mindspeed.memory import optimizer_windows as windows

    with adam_run(recipe) as run:
        run.train_step(0)
        saved = run.optimizer.state_dict()
        before = dict(windows.whole_tensors(run.optimizer))
    with adam_run(recipe) as run:
        run.optimizer.load_state_dict(saved)
        after = dict(windows.whole_tensors(run.optimizer))
        resting = {
            moment.dtype for w in windows.main_weights(windows.members(run.optimizer)[0]) for moment in w.moments.values()
        }
    assert resting == {torch.bfloat16}
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


def test_a_checkpoint_has_fp32_moments_which_a_run_rounds_to_the_same_bits(pool: WorkerPool) -> None:
    case = build_case([NAME], [Layer("test", world={"dtype": "bf16"})], (), 1)
    assert pool.call(save_and_load, 1, replace(case.recipe, steps=1), plan=case.plan) == [[]]


def test_the_flag_of_mindspeed_llm_switches_it_on() -> None:
    from mindspeed.compat.old_flags.flags import read_old_flags
    from mindspeed.registry import catalog

    assert read_old_flags(["--o2-optimizer"], (), catalog()).layer.features == (NAME,)


def test_the_precision_aware_optimizer_is_refused_beside_it() -> None:
    (refused,) = refusals(NAME, precision_aware_optimizer=True, engine_installed=True)
    assert refused.startswith(
        f"MS304 {NAME}: the precision-aware optimizer already chooses the type of the moments (--exp-avg-dtype, "
        "--exp-avg-sq-dtype) | "
    )
