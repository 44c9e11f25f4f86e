"""Run one process of a job: activate the plan, form the process group, train.

Run as ``python -m mindspeed.workbench.training.worker`` with MINDSPEED_PLAN and MINDSPEED_TRAIN; light until then.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindspeed import registry
from mindspeed.engine.runtime import session
from mindspeed.engine.runtime.launch import INTERRUPTED, end_process, end_with_launcher, leave_problems
from mindspeed.engine.runtime.uncaught import lost_peer
from mindspeed.problems import RunError
from mindspeed.process.run import set_run_folder
from mindspeed.workbench.training.job import Job, read_job
from mindspeed.workbench.training.run_folder import disk_problem


def main() -> None:
    """Train the job that the environment names; errors are left to the launcher."""
    end_with_launcher()
    try:
        work(read_job(os.environ), os.environ)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    except Exception as error:  # every rank reports, and the launcher prints the cause once
        leave_problems(error)
        with suppress(Exception):  # features write what they hold, such as a trace
            registry.deactivate()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an orderly exit waits for peers that are gone


def work(job: Job, environ: Mapping[str, str]) -> dict[str, Any]:
    """Train as the rank in ``environ`` (RANK, WORLD_SIZE, LOCAL_RANK and the rendezvous). Returns the result."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    set_run_folder(Path(job.run))
    registry.activate(job.plan, job.facts())

    import torch.distributed as dist

    from mindspeed.platforms import runtime

    runtime.take_device(int(environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl", rank=int(environ["RANK"]), world_size=int(environ["WORLD_SIZE"]))
    from mindspeed.workbench.training.trainer import train

    try:
        result = train(job)
    except Exception as error:
        with suppress(Exception):
            session.call("run_failed", error=error)
        if (problem := lost_peer(error) or disk_problem(error, job.run)) is not None:
            raise RunError([problem]) from error
        raise
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
    end_process(0)
