"""``mindspeed pretrain``: train a GPT on megatron-core, with features by name."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from gettext import gettext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from mindspeed.cli.launch_options import Processes, end_rank, hold_to_lock, is_of_trainer, launch_options, lock_option
from mindspeed.cli.output import OK, end, json_option, print_alone, print_problems, print_result, program, wants_json
from mindspeed.cli.plan_text import as_lines, brief_lines
from mindspeed.cli.request_options import COMMAND_LINE, FullJobCommand, Request, gather_options, names_argument, request_options
from mindspeed.cli.terminal import padded
from mindspeed.engine.resolution.setting_validation import flag
from mindspeed.problems import Fix, Text, localized, marked
from mindspeed.process.run import UNFINISHED
from mindspeed.workbench.training.config import JOB_FILE, TrainConfig, train_config

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan
    from mindspeed.engine.resolution.environment import Environment
    from mindspeed.workbench.training.job import Job


_FURTHER_SPELLINGS: Final = {"run": ["--run-folder"]}
"""Spellings that torchrun leaves alone where it takes a flag for the beginning of one of its own."""


def train_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option per field of `TrainConfig`; the command gets those that were given as one argument ``train``."""
    options = {}
    for name, field in TrainConfig.model_fields.items():
        text = str(field.description) + ("" if field.default is None else f"  [default: {field.default}]")
        switch = f"{flag(name)}/{flag(f'no_{name}')}" if field.annotation is bool else flag(name)
        spellings = [switch, *_FURTHER_SPELLINGS.get(name, ()), name]
        options[name] = click.Option(spellings, type=_click_type(field.annotation), help=text)
    return gather_options(command, options, "train", lambda values: {k: v for k, v in values.items() if v is not None})


def _click_type(annotation: Any) -> Any:
    """The click type of a field: a choice of words, or int, float or str; ``X | None`` is X."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    return click.Choice(kinds) if isinstance(kinds[0], str) else kinds[0]


@click.command(cls=FullJobCommand)
@names_argument("[NAME]...")
@launch_options
@lock_option
@click.option("--resume", metavar="RUN", help="Folder of a run to continue, with its job file and its newest checkpoint")
@click.option(
    "--step", type=click.IntRange(1), metavar="N", help="With --resume: use the checkpoint after step N instead of the newest"
)
@click.option(
    "--auto-resume",
    metavar="RUN",
    help="Folder of a run: continue it from its newest complete checkpoint, or start it there if it has none. The command can "
    "be repeated until the run has ended. Exit status 75: a signal ended the run, and its last step is saved",
)
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan, but start and write nothing")
@train_options
@request_options
@json_option
def pretrain(
    request: Request,
    names: tuple[str, ...],
    processes: Processes,
    lock: str | None,
    train: dict[str, Any],
    resume: str | None,
    step: int | None,
    auto_resume: str | None,
    dry_run: bool,
) -> None:
    """Train a GPT model, Llama-like or GPT-2-like, dense or MoE.

    mindspeed pretrain --nproc 2 --tp 2 --features sequence-parallel,distributed-optimizer

    Starts the processes itself, or joins the torchrun or Slurm job in which it runs. Without --data it trains on the
    sources of Python's standard library. A job file (-f) has sizes and model shape under 'world', and training options
    under 'train'. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP save a checkpoint and end the run; nohup blocks SIGHUP.

    The run folder has the numbers of each step in log.jsonl and for TensorBoard. Features send them to wandb and other
    services: mindspeed features list wandb
    """
    if step is not None and resume is None:
        raise click.UsageError("--step selects a checkpoint of the run that --resume continues")
    if auto_resume is not None and (resume is not None or "run" in train):
        raise click.UsageError("--auto-resume names the run folder; remove --resume and --run")
    from mindspeed.engine.runtime.launch import joined
    from mindspeed.problems import MindSpeedError
    from mindspeed.workbench.training.checkpoints import newest_complete
    from mindspeed.workbench.training.job import make_job
    from mindspeed.workbench.training.storage import fetch_newest

    request = request.naming(names)
    rank = joined(os.environ)
    environment = request.environment(int(rank["WORLD_SIZE"]) if rank else processes.world_size)
    if auto_resume is not None:
        train = {**train, "run": auto_resume}
    sources = {JOB_FILE: request.train, COMMAND_LINE: train}
    try:
        if auto_resume is not None:
            if not dry_run:
                fetch_newest(auto_resume, train_config(sources)[0])
            step = newest_complete(auto_resume)
            resume = auto_resume if step is not None else None
        job = make_job(request.layers, sources, environment, resume, step, auto_resume is not None)
        if lock is not None:
            hold_to_lock(lock, job.plan if is_of_trainer(lock) else _asked_plan(job.request, environment), job.locked_facts())
        if dry_run:
            _show_dry_run(job)
            end(OK)
        if rank is None:
            status = _start(job, processes)
            end(UNFINISHED if auto_resume is not None and status == OK and _result(job)["interrupted"] else status)
        result = _join(job, rank)
        end(UNFINISHED if auto_resume is not None and result["interrupted"] else OK)
    except MindSpeedError as error:
        if rank is None:
            raise
        end_rank(error, {**os.environ, **rank})


def _asked_plan(job_file: str, environment: Environment) -> ActivationPlan:
    """The plan of a job without what the trainer adds of its own, as mindspeed lock makes it."""
    from mindspeed import registry
    from mindspeed.engine.resolution.job_file import job_from_text

    return registry.resolve([job_from_text(job_file, JOB_FILE).layer], environment)


def _start(job: Job, processes: Processes) -> int:
    """Train in processes of our own. Returns the exit status."""
    from mindspeed.engine.runtime.launch import SIGNALLED, JobError, launch
    from mindspeed.registry import process_variables
    from mindspeed.workbench.training.interruption import ended_unsaved
    from mindspeed.workbench.training.job import write_job
    from mindspeed.workbench.training.run_folder import check_free

    if processes.nodes > 1:
        _check_shared_folder(job)
    check_free(job.run)
    if not wants_json():
        click.echo("\n".join([*brief_lines(job.plan), *_changes(job)]))
    result = Path(job.run) / "result.json"
    before = _modified(result)
    with tempfile.TemporaryDirectory(prefix="mindspeed-pretrain-") as folder:
        variables = write_job(job, folder) | process_variables(job.plan)
        command = [sys.executable, "-m", "mindspeed.workbench.training.worker"]
        try:
            status = launch(command, processes.per_node, variables, processes.passthrough)
        except JobError as lost:
            if lost.status != UNFINISHED:
                raise
            print_problems(lost.problems)
            return UNFINISHED
    if _modified(result) != before:  # also after Ctrl-C, if there was time to save
        _print_result(job, "--nproc", str(processes.per_node), *processes.passthrough)
        return OK
    if status > SIGNALLED:
        print_problems([ended_unsaved(job.run, status - SIGNALLED)])
    return status


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _join(job: Job, rank: dict[str, str]) -> dict[str, Any]:
    """Train in this process as one rank of the job that it belongs to. Returns the result."""
    from mindspeed.engine.runtime.launch import end_with_launcher
    from mindspeed.workbench.training.worker import work

    _check_shared_folder(job)
    end_with_launcher()
    os.environ.update(rank)
    if rank["RANK"] == "0" and not wants_json():
        click.echo("".join(f"{line}\n" for line in _changes(job)), nl=False)
    result = work(job, os.environ)
    if rank["RANK"] == "0":
        _print_result(job)
    return result


def _show_dry_run(job: Job) -> None:
    """Print what a job would run, its parameters and memory, from which checkpoint, and into which folder."""
    from mindspeed.job.arithmetic import parameters, shape_of_world
    from mindspeed.memory_planner.plans import peaks, summary
    from mindspeed.registry import catalog

    request = {"run": job.run, "checkpoint": job.checkpoint, "changes": job.changes(), "notes": list(job.notes)}
    template = gettext("would train up to step {step} in {folder}; nothing was started or written")
    end = template.format(step=job.config.train_iters, folder=job.run)
    count = parameters(shape_of_world(job.plan.world)).total
    forecast = {"memory": peaks(job.plan, catalog()), "parameters": count}
    data = {**request, "train": job.config.model_dump(), "plan": job.plan.to_json(), **forecast}
    lines = [gettext("{count:,} parameters").format(count=count), *map(localized, summary(job.plan, catalog()))]
    print_result(data, [*brief_lines(job.plan), *as_lines([(marked("memory"), lines)]), *_changes(job), end])


def _changes(job: Job) -> Iterator[str]:
    """Describe what the job does otherwise than the run that it continues, and what becomes of the checkpoint."""
    return as_lines(
        [(Text.of("changed since {checkpoint}", checkpoint=job.checkpoint), [*map(str, job.changes()), *job.notes])]
    )


def _check_shared_folder(job: Job) -> None:
    from mindspeed.problems import MindSpeedError, Problem

    if job.config.run is None:
        text = "processes that are started separately must use the same run folder"
        raise MindSpeedError([Problem("MS301", text, fix=Fix.give_option("--run", "FOLDER"))])


def _result(job: Job) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((Path(job.run) / "result.json").read_text(encoding="utf-8"))
    return result


def _print_result(job: Job, *launching: str) -> None:
    result = _result(job)
    if wants_json():
        keys = ("initial_loss", "heldout_loss", "unigram_entropy", "world_size", "digest", "run")
        print_alone(json.dumps({key: result[key] for key in keys}))
        return
    if result["sample"]:
        click.echo(f"{gettext('sample:')}\n{result['sample']}\n")
    losses = {gettext("initial loss"): result["initial_loss"], gettext("held-out loss"): result["heldout_loss"]}
    rows = {title: f"{loss:.4f}" for title, loss in losses.items() if loss is not None}
    rows[gettext("unigram entropy")] = gettext("{entropy:.4f} (of the held-out text)").format(entropy=result["unigram_entropy"])
    rows[gettext("run folder")] = job.run
    for title, value in rows.items():
        click.echo(f"{padded(title, 15)}  {value}")
    command = [program(), "pretrain", "--resume", job.run, *launching]
    if result["interrupted"]:
        click.echo(gettext("stopped after step {step}; continue with:").format(step=result["step"]))
    else:
        click.echo(gettext("continue training with:"))
        command += ["--train-iters", str(2 * job.config.train_iters)]
    click.echo(f"  {shlex.join(command)}")
