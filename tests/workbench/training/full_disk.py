"""One process that saves again and again, each time on a disk that is full from a later write on.

``full_disk.py RUN EVERY [async]``: ``RUN`` holds a job and its checkpoint of step 2; every ``EVERY``-th write is the first that
fails; ``async`` saves asynchronously. Prints one JSON line: the number of saves that failed, and what was lost.
"""

import errno
import io
import json
import os
import sys
from dataclasses import replace
from multiprocessing import Value
from pathlib import Path
from typing import Any

from mindspeed import registry
from mindspeed.engine.runtime.launch import joined
from mindspeed.workbench.training.job import read_job

LEFT = Value("i", -1)
"""Writes that still succeed, in this process and those that it forks; -1 is no limit."""
_open = io.open


class Limited:
    """A file whose writes fail when the disk is full."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "Limited":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: Any) -> int:
        with LEFT.get_lock():
            if LEFT.value == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
            LEFT.value -= LEFT.value > 0
        written: int = self._file.write(content)
        return written


def limited_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    opened = _open(file, mode, *args, **options)
    return Limited(opened) if set(mode) & set("wax") and ".partial" in str(file) else opened


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def main() -> None:
    import torch.distributed as dist

    from mindspeed.problems import RunError
    from mindspeed.workbench.training import saving
    from mindspeed.workbench.training.checkpoints import checkpoint_path, partial_path, saved_steps
    from mindspeed.workbench.training.trainer import Trainer, seed_generators

    run = Path(sys.argv[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert joined(os.environ) is not None
    os.environ |= {registry.PLAN_VARIABLE: str(run / "plan.json"), "MINDSPEED_TRAIN": str(run / "process.json")}
    job = replace(read_job(os.environ), run=str(run))  # which may be a copy of the run that the job names
    registry.activate(job.plan)
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"file://{run}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    seed_generators(job.config.seed)
    trainer = Trainer(job, job.source())
    while trainer.state.step < 3:
        trainer._step()
    saver = saving.Saver(replace(job, config=job.config.model_copy(update={"async_save": sys.argv[3:] == ["async"]})), "data")
    kept, lost, failed = content(checkpoint_path(str(run), 2)), [], 0
    io.open = sys.modules["builtins"].open = limited_open  # type: ignore[assignment]
    for writes in range(0, 100_000, int(sys.argv[2])):
        LEFT.value = writes
        try:
            saver.save(trainer.state)
            saver.finish()
        except RunError as error:
            failed += 1
            (problem,) = error.problems
            whole = "the checkpoint of step 3 cannot be saved; the checkpoint of step 2 is unchanged"
            if (problem.code, problem.message) != ("MS603", whole) or not problem.fix:
                lost.append(f"{writes}: {error}")
        else:
            break
        finally:
            LEFT.value = -1
        if content(checkpoint_path(str(run), 2)) != kept or saved_steps(str(run)) != [2]:
            lost.append(f"{writes}: {saved_steps(str(run))}")
        if partial_path(checkpoint_path(str(run), 3)).exists():
            lost.append(f"{writes}: a part of step 3 is left")
    print(json.dumps({"failed": failed, "lost": lost, "steps": saved_steps(str(run))}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
