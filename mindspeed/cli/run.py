"""``mindspeed run``: a script that knows nothing of mindspeed, under a plan, in one process or many."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import click

from mindspeed.cli.launch_options import Processes, launch_options
from mindspeed.cli.output import print_problems
from mindspeed.cli.request_options import Request, request_options


@click.command(context_settings={"allow_interspersed_args": False})
@request_options
@launch_options
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", metavar="[ARGUMENT]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, request: Request, processes: Processes, script: str, arguments: tuple[str, ...]) -> None:
    """Run a script with features switched on.

    The script is plain Megatron code and needs no change:

    mindspeed run --nproc 2 --features sequence-parallel --tp 2 -- script.py --lr 0.1

    Inside a job of torchrun or Slurm this process joins the job. The exit status is that of the script.
    """
    from mindspeed import doctor
    from mindspeed.cli import bootstrap
    from mindspeed.plugins.problems import MindSpeedError
    from mindspeed.registry import PLAN_VARIABLE, write_plan
    from mindspeed.training.launch import JobError, joined, launch, python

    if missing := doctor.problems():
        raise MindSpeedError(missing)
    job = joined(os.environ)
    if job is None and processes.world_size == 1:
        job = _alone()
    plan = request.resolve(int(job["WORLD_SIZE"]) if job else processes.world_size)
    with tempfile.TemporaryDirectory(prefix="mindspeed-run-") as folder:
        path = Path(folder) / "plan.json"
        write_plan(plan, path)
        if job is not None:
            os.environ.update(job | {PLAN_VARIABLE: str(path)})
            bootstrap.run_script(script, arguments)
        command = [*python("mindspeed.cli.bootstrap"), script, *arguments]
        try:
            status = launch(command, processes.per_node, {PLAN_VARIABLE: str(path)}, processes.passthrough)
        except JobError as lost:
            print_problems(lost.problems)
            status = lost.status
        ctx.exit(status)


def _alone() -> dict[str, str]:
    """The variables of a job of one process, so that a script finds a rendezvous also without a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
