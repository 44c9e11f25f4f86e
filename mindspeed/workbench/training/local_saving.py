"""The newest state of a run on a disk of each node, by megatron-core and nvidia-resiliency-ext."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import CheckpointingException
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

from mindspeed.engine.runtime.uncaught import lost_peer
from mindspeed.files.text_files import replace_text
from mindspeed.problems import Problem, RunError, advice
from mindspeed.workbench.training.data_source import DataSource
from mindspeed.workbench.training.evaluation import gathered
from mindspeed.workbench.training.job import Job
from mindspeed.workbench.training.saving import TrainerState, put_state, start_adam, state_dict

RUN_ID: Final = "run_id"
"""File of a run folder. Local checkpoints of an earlier run in a folder of this name have another identity."""


class LocalSaver:
    """Write the state of each rank to a disk of its node, where the newest is kept. Its methods are collective.

    Only the same plan on the same number of ranks continues from it, and only where every rank finds its file again.
    """

    def __init__(self, job: Job, data: str) -> None:
        self._job, self._data = job, data
        self._run_id = _run_id(job)
        session = f"{self._run_id}-{job.plan.digest[:12]}-{dist.get_world_size()}"
        self._root = Path(str(job.config.local_save)) / sha256(str(Path(job.run).absolute()).encode()).hexdigest()[:12]
        self._manager = LocalCheckpointManager(self._root, session)
        self._has_saved = False

    def newest(self) -> int:
        """Return the step of the newest state that every rank has; -1 without one."""
        with _named_failures(self._job, "read"):
            return int(self._manager.find_latest())

    def load(self, state: TrainerState, source: DataSource) -> str:
        """Continue from the newest state; return a sentence about it."""
        with _named_failures(self._job, "read"):
            saved, _ = self._manager.load()
            loaded = saved.to_state_dict(state_dict(state, is_loading=True), algo="atomic")
        progress = loaded.pop("progress")
        state.step = progress["step"]
        state.samples = progress["samples"] if source.is_that_of(progress["data"]) else 0
        put_state(self._job, state, loaded)
        return f"continues from step {state.step}, which is on the disks of the nodes in {self._job.config.local_save}"

    def save(self, state: TrainerState) -> None:
        """Write the state in place of the one before."""
        with _named_failures(self._job, "written"):
            if not self._has_saved:
                self._begin()
            start_adam(state.optimizer)
            progress = {"step": state.step, "samples": state.samples, "data": self._data}
            with gathered(state.chunks):
                content: dict[str, Any] = state_dict(state) | {"progress": progress}
                tensors, _ = MCoreTensorAwareStateDict.from_state_dict(content, algo="atomic")
                self._manager.save(tensors, state.step)

    def remove(self) -> None:
        """Remove the state of this rank: the run has a checkpoint that is as new."""
        shutil.rmtree(self._manager.local_ckpt_dir, ignore_errors=True)

    def _begin(self) -> None:
        """Remove what other starts of this run have left, and record the identity by which the next one finds the state."""
        for session in self._root.iterdir() if self._root.is_dir() else ():
            if session.name != self._manager.session_id:
                shutil.rmtree(session, ignore_errors=True)
        for unfinished in self._manager.local_ckpt_dir.glob("*.dirty.pt"):
            unfinished.unlink()
        if dist.get_rank() == 0:
            replace_text(Path(self._job.run) / RUN_ID, self._run_id)
        self._has_saved = True


def _run_id(job: Job) -> str:
    """Return the identity of the run that ``job`` continues, or a new one; collective."""
    path = Path(job.run) / RUN_ID
    run_id = [secrets.token_hex(4)]
    if dist.get_rank() == 0 and job.auto_resume and path.is_file():
        run_id = [path.read_text(encoding="utf-8").strip()]
    dist.broadcast_object_list(run_id, src=0)
    return run_id[0]


@contextmanager
def _named_failures(job: Job, verb: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, CheckpointingException) as error:
        if (lost := lost_peer(error)) is not None:
            raise RunError([lost]) from error
        folder = str(job.config.local_save)
        text = f"the local checkpoint cannot be {verb}: {error}"
        fix = "free some space on the disk of this node, or remove --local-save and start again"
        raise RunError([Problem("MS603", text, where=folder, fix=advice(fix))]) from error
