"""Start one rank of a job of ``mindspeed pretrain``, up to the end of its first step: tensors have shapes but no contents.

What the trainer does is done here: its model, optimizer, data and schedule, with the other ranks of the group missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mindspeed.engine.runtime import session
from mindspeed.megatron.training_hook_wrappers import step_metrics
from mindspeed.workbench.training import saving, trainer
from mindspeed.workbench.training.batches import Batches, build_datasets
from mindspeed.workbench.training.job import read_job
from mindspeed.workbench.verification.dry_run import fake_tensors
from mindspeed.workbench.verification.scratch_folder import scratch_folder


def start(variables: Mapping[str, str], folder: str) -> None:
    """Build what this rank has of the job that `write_job` has written, and train one step. The plan of the job is active.

    The first rank writes the index of the data to ``folder``.
    """
    job = read_job(variables)
    if (active := session.current()) is not None:
        active.proof.say = None  # what other ranks reach cannot be asked
    config, world = job.config, job.plan.world
    trainer.seed_generators(config.seed)
    data, _ = build_datasets(job.source(), world.seq_length, config.held_out, config.seed, Path(folder) / "index")
    with scratch_folder(), fake_tensors():
        chunks = trainer.build_model(world, config)
        optimizer = trainer.build_optimizer(chunks, world, config)
        state = saving.TrainerState(chunks, optimizer, trainer.build_scheduler(optimizer, config))
        batches = Batches(data, world.micro_batch_size, world.global_batch_size, config.seed)
        trainer.update(state, batches)
        state.step += 1
        step_metrics(state)
