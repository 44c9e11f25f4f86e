"""Find what the ranks of a ``mindspeed pretrain`` would refuse, by a start of each distinct one in a separate process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.job.arithmetic import counts_per_chunk
from mindspeed.workbench.training.job import Job, write_job
from mindspeed.workbench.verification.pool import WorkerPool

_RANK: Final = str(Path(__file__).with_name("trainer_rank.py"))


def start(pool: WorkerPool, job: Job) -> None:
    """Start the distinct ranks of a job up to the end of their first step. Raises RunError with what one refuses."""
    with tempfile.TemporaryDirectory(prefix="mindspeed-start-") as folder:
        variables = write_job(job, folder)
        size = int(job.plan.world.world_size)
        pool.call_alone(_RANK, "start", distinct_ranks(job.plan), size, variables, folder, plan=job.plan)


def distinct_ranks(plan: ActivationPlan) -> list[int]:
    """Return the first rank of the stages that differ: the first two, the middle one, the last, and each with other layers."""
    world = plan.world
    stages, chunks = range(world.pp), counts_per_chunk(world) if world.knows("num_layers") else ()
    layers = {chunks[stage :: len(stages)]: stage for stage in reversed(stages)}
    distinct = {*stages[:2], len(stages) // 2, stages[-1], *layers.values()}
    return [stage * (int(world.world_size) // len(stages)) for stage in sorted(distinct)]
