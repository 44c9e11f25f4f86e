"""``mindspeed run``: an unchanged script or module under a plan, in one process or many."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindspeed.cli.bootstrap import MODULE
from mindspeed.cli.launch_options import Processes, end_rank, hold_to_lock, launch_options, lock_option
from mindspeed.cli.output import end, print_problems
from mindspeed.cli.request_options import JobCommand, Request, request_options

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan


def _check_program(words: tuple[str, ...]) -> None:
    """Raise BadParameter for a script that is not there, or ``-m`` alone; nothing is imported."""
    ctx = click.get_current_context()
    if words[0] != MODULE:
        click.Path(exists=True, dir_okay=False).convert(words[0], ctx.command.params[-1], ctx)
    elif len(words) == 1:
        raise click.BadParameter("-m needs the name of a module", ctx, ctx.command.params[-1])


@click.command(cls=JobCommand, context_settings={"allow_interspersed_args": False})
@request_options
@launch_options
@lock_option
@click.option("-m", "is_module", is_flag=True, help="The program is a module, as with python -m")
@click.argument("words", metavar="PROGRAM [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED)
def run(request: Request, processes: Processes, lock: str | None, is_module: bool, words: tuple[str, ...]) -> None:
    """Run a script, or a module, with features switched on.

    The script is plain Megatron code and needs no change:

    mindspeed run --nproc 2 --features sequence-parallel --tp 2 -- script.py --lr 0.1

    For a Megatron-LM script such as pretrain_gpt.py, mindspeed reads features and sizes from its flags. The script also
    accepts mindspeed's flags:

    mindspeed run --nproc 2 -- pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel --features swiglu ...

    A module runs as under python -m:

    mindspeed run --nproc 2 -- -m pytest tests

    Inside a torchrun or Slurm job, this process joins the job. The exit status is that of the program.
    """
    words = (MODULE, *words) if is_module else words
    _check_program(words)
    from mindspeed.cli import bootstrap
    from mindspeed.engine.runtime.launch import joined
    from mindspeed.problems import MindSpeedError
    from mindspeed.workbench.diagnostics import doctor

    if missing := doctor.problems():
        raise MindSpeedError(missing)
    job = joined(os.environ)
    alone = job is None and processes.world_size == 1
    if alone:
        job = _alone()
    bootstrap.set_import_path(words)
    world_size = int(job["WORLD_SIZE"]) if job else processes.world_size
    try:
        plan, words = _resolve(request, words, world_size, lock)
        end(_run(plan, words, processes, job, alone))
    except MindSpeedError as error:
        if job is None or alone:
            raise
        end_rank(error, {**os.environ, **job})


def _run(plan: ActivationPlan, words: tuple[str, ...], processes: Processes, job: dict[str, str] | None, alone: bool) -> int:
    """Become the program in this process, or start processes that do. Returns their exit status."""
    from mindspeed.cli import bootstrap
    from mindspeed.engine.runtime.launch import JobError, end_with_launcher, launch
    from mindspeed.registry import PLAN_VARIABLE, process_variables, write_plan

    with tempfile.TemporaryDirectory(prefix="mindspeed-run-") as folder:
        path = Path(folder) / "plan.json"
        write_plan(plan, path)
        variables = process_variables(plan)
        if job is not None and not (alone and variables):  # variables of a process are there from its start
            end_with_launcher()
            os.environ.update(job | {PLAN_VARIABLE: str(path)})
            bootstrap.run_program(words)
        command = [sys.executable, "-m", "mindspeed.cli.bootstrap", *words]
        try:
            return launch(command, processes.per_node, {PLAN_VARIABLE: str(path), **variables}, processes.passthrough)
        except JobError as lost:
            print_problems(lost.problems)
            return lost.status


def _resolve(
    request: Request, words: tuple[str, ...], world_size: int, lock: str | None
) -> tuple[ActivationPlan, tuple[str, ...]]:
    """The plan, which is that of the lock, and the program's words.

    The arguments of Megatron-LM say more of the plan and lose our flags.
    """
    from mindspeed.megatron_lm.given_arguments import argument_facts
    from mindspeed.megatron_lm.raw_data import with_prepared_data
    from mindspeed.megatron_lm.training_plan import is_training_script, plan_training, report_beside

    script, *arguments = words
    if script == MODULE or not is_training_script(script):
        plan = request.resolve(world_size)
        if lock is not None:
            hold_to_lock(lock, plan)
        return plan, words
    *below, command_line = request.layers
    environment = request.environment(world_size)
    read, plan = plan_training(arguments, {}, environment, below, [command_line])
    if lock is not None:
        hold_to_lock(lock, plan, argument_facts(arguments, environment.megatron))
    for note in read.notes:
        click.echo(f"mindspeed: {note.text}", err=True)
    if plan.names:
        report_beside(read, os.environ)
    return plan, (script, *with_prepared_data(read.rest, read.given, read.raw, environment.megatron))


def _alone() -> dict[str, str]:
    """The variables of a job of one process, so that a script finds a rendezvous also without a launcher."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
