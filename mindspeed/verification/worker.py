"""A worker process of the pool: activate a plan, form groups, train, undo, send the record back. Then the next job.

Run as ``python -m mindspeed.verification.worker FD`` with the pool's end of a connection on file descriptor FD.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Final

from mindspeed.verification.job import Failure, Job
from mindspeed.verification.record import Record

PATIENCE: Final = timedelta(seconds=60)
"""How long a collective waits for a rank that does not come."""


def main() -> None:
    """Serve jobs until the pool closes the connection."""
    connection: Connection[Record | Failure, Job] = Connection(int(sys.argv[1]))
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(job))


def _outcome(job: Job) -> Record | Failure:
    try:
        return run(job)
    except Exception as error:  # whatever a feature raises belongs to the caller
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())


def run(job: Job) -> Record:
    """One job in this process, which afterwards is as it was before."""
    from mindspeed import registry
    from mindspeed.activation import session
    from mindspeed.activation.plan import plan_from_json
    from mindspeed.verification.evidence import evidence

    record = Record()
    registry.activate(plan_from_json(job.plan))
    try:
        from mindspeed.verification.training import train  # with the platform in place, for it imports Megatron

        active = session.current()
        with evidence(active, record) if active else nullcontext(), _groups(job):
            train(job.recipe, record)
    finally:
        registry.deactivate()
    return record


@contextmanager
def _groups(job: Job) -> Iterator[None]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    torch.manual_seed(job.recipe.seed)
    torch.cuda.set_device(job.rank % torch.cuda.device_count())
    store = FileStore(job.store, job.world_size)
    dist.init_process_group("nccl", store=store, rank=job.rank, world_size=job.world_size, timeout=PATIENCE)
    try:
        parallel_state.initialize_model_parallel()
        yield
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
