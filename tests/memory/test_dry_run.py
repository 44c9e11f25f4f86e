"""A dry run has the bytes of a run, in one process and without contents."""

from statistics import mean
from typing import Any

import pytest

from benchmarks._memory_jobs import BF16, LLAMA
from benchmarks._memory_jobs import LARGER as LARGER_MODEL
from mindspeed import registry
from mindspeed.engine.resolution.request import Layer
from mindspeed.memory_planner.plans import stages_of
from mindspeed.problems import RunError
from mindspeed.workbench.verification.case import build_case, with_few_micro_batches
from mindspeed.workbench.verification.pool import WorkerPool

SHORT: dict[str, Any] = {"global_batch_size": 4}
LARGER: dict[str, Any] = SHORT | LARGER_MODEL
EXPERTS: dict[str, Any] = SHORT | {"num_experts": 4}
JOBS: list[tuple[tuple[str, ...], int, dict[str, Any]]] = [
    ((), 1, SHORT),
    ((), 1, SHORT | LLAMA | BF16),
    ((), 1, EXPERTS | BF16),
    (("norm-recompute", "activation-recompute"), 1, LARGER | LLAMA | BF16),
    (("rms-norm", "swiglu", "flash-attention", "rotary-embedding"), 1, LARGER | LLAMA | BF16),
    (("sequence-parallel",), 2, LARGER | LLAMA | BF16),
    (("pipeline-parallel",), 2, LARGER | LLAMA),
    (("virtual-pipeline",), 2, LARGER),
    (("expert-parallel",), 2, EXPERTS),
    (("ring-attention",), 2, LARGER | LLAMA | BF16),
]
ROUTING = 0.02
"""Routers of a run do not give every expert equally many tokens, a dry run does."""
SCALARS = 0.001
"""A rank of a run keeps a few scalars more or fewer than another one."""
MASK = 2048 * 2048
"""The causal mask of `fusion_attention`, made once in a process: by the step that is measured or by one before it."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "nproc", "world"), JOBS, ids=lambda value: "+".join(value) if isinstance(value, tuple) else ""
)
def test_a_dry_run_has_the_bytes_of_a_run(pool: WorkerPool, names: tuple[str, ...], nproc: int, world: dict[str, Any]) -> None:
    case = build_case(names, [Layer("test", world=world)], (), nproc)
    dry = pool.dry_run(case.plan, case.recipe)
    run = pool.measure(case.plan, case.recipe, nproc)
    per_stage = nproc // case.plan.world.pp
    for stage, (kept, peak) in enumerate(dry):
        kept_by_ranks, peaks_of_ranks = zip(*run[stage * per_stage : (stage + 1) * per_stage], strict=True)
        once = [MASK * (bytes_kept > MASK) for bytes_kept in (kept, *kept_by_ranks)]
        kept, *kept_by_ranks = (all_of_it - mask for all_of_it, mask in zip((kept, *kept_by_ranks), once, strict=True))
        peak, *peaks_of_ranks = (all_of_it - mask for all_of_it, mask in zip((peak, *peaks_of_ranks), once, strict=True))
        assert kept == pytest.approx(mean(kept_by_ranks), rel=ROUTING if "num_experts" in world else SCALARS)
        assert peak == pytest.approx(mean(peaks_of_ranks), rel=ROUTING)


def test_a_rank_of_thirty_two_needs_one_process(pool: WorkerPool) -> None:
    world = {"tp": 4, "num_attention_heads": 8, "num_query_groups": 4, "num_layers": 2, "global_batch_size": 32}
    layer = Layer("test", world=LLAMA | world)
    whole = build_case(("sequence-parallel",), [layer], (), 32)
    case = build_case(("sequence-parallel",), [layer, with_few_micro_batches(whole.plan.world)], (), 32)
    assert (whole.plan.world.num_micro_batches, case.plan.world.num_micro_batches) == (4, 2)
    ((kept, peak),) = pool.dry_run(case.plan, case.recipe)
    (stage,) = stages_of(case.plan, registry.catalog())
    assert (kept, peak) == (pytest.approx(stage.activations, rel=0.05), pytest.approx(stage.peak, rel=0.1))


def test_a_feature_that_reads_values_is_refused_with_the_operator(pool: WorkerPool) -> None:
    with pytest.raises(RunError) as error:
        pool.call(unique_of_fakes, 1, plan=build_case((), [], (), 1).plan)
    assert "aten._unique2.default" in str(error.value)


def unique_of_fakes() -> None:
    import torch

    from mindspeed.workbench.verification.dry_run import fake_tensors

    with fake_tensors():
        torch.unique(torch.rand(3, device="cuda"))


@pytest.mark.long
def test_the_loss_is_on_the_first_rank_with_placement_v(pool: WorkerPool) -> None:
    world = LARGER | LLAMA | BF16 | {"pp": 2, "vpp": 2, "num_layers": 4, "global_batch_size": 8}
    layer = Layer("test", settings={"zero-bubble": {"placement": "v"}}, world=world)
    case = build_case(("zero-bubble",), [layer], (), 2)
    stages = stages_of(case.plan, registry.catalog())
    assert [any("loss" in row.name for row in stage.rows) for stage in stages] == [True, False]
    for stage, (_, peak) in zip(stages, pool.dry_run(case.plan, case.recipe), strict=True):
        assert stage.peak == pytest.approx(peak, rel=0.1)


@pytest.mark.long
def test_recomputed_layers_come_back_with_what_the_operators_in_them_keep(pool: WorkerPool) -> None:
    settings = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
    operators = ("rms-norm", "swiglu", "flash-attention", "rotary-embedding")
    case = build_case(("recompute", *operators), [Layer("test", settings=settings, world=LARGER | LLAMA | BF16)], (), 1)
    ((_, peak),) = pool.dry_run(case.plan, case.recipe)
    (stage,) = stages_of(case.plan, registry.catalog())
    assert stage.peak == pytest.approx(peak, rel=0.02)
