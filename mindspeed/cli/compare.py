"""``mindspeed compare``: a job without and with its features, or finished runs, side by side."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mindspeed.cli.output import (
    FOLDER,
    end,
    exit_code,
    html_option,
    json_option,
    print_json,
    print_problems,
    print_table,
    wants_json,
    write_page,
)
from mindspeed.cli.request_options import COMMAND_LINE, Request, request_options
from mindspeed.cli.terminal import on_terminal
from mindspeed.cli.training_command import WORDS, PlansCommands

if TYPE_CHECKING:
    from mindspeed.problems import Problem
    from mindspeed.workbench.training.run_numbers import RunNumbers
    from mindspeed.workbench.training.variants import ComparedJob


@click.command(cls=PlansCommands)
@click.argument("runs", metavar="[RUN RUN]...", nargs=-1, type=FOLDER)
@click.option("--leave-one-out", is_flag=True, help="Also run the job without each of its features, all others on")
@click.option(
    "--nproc",
    type=click.IntRange(1),
    metavar="N",
    help="Number of processes of each run  [default: that of the command's launcher, else 1]",
)
@click.option("--output", type=FOLDER, metavar="FOLDER", help="Folder for the runs and compare.html  [default: runs/DATE-TIME]")
@html_option("the comparison")
@request_options
@json_option
def compare(
    request: Request, runs: tuple[Path, ...], leave_one_out: bool, nproc: int | None, output: Path | None, html: Path | None
) -> None:
    """Compare a job without and with its features: losses, time, memory and communication.

    mindspeed compare -f job.yaml --nproc 2

    mindspeed compare --nproc 2 --features swiglu -- pretrain_gpt.py --num-layers 2 ...

    mindspeed compare --leave-one-out -- mindspeed pretrain -f job.yaml --nproc 2 --train-iters 20

    mindspeed compare runs/a runs/b

    The job is trained twice, one run after the other, in two folders. The first run disables all features but those of
    level 0 and the owners of parallel sizes. A feature that logs memory and communication is added to both. Folders of
    finished runs are compared as they are. The exit status is 1 when a run fails.
    """
    from mindspeed.workbench.training.run_numbers import notes_on_jobs, notes_on_lengths, read_run

    words: list[str] | None = click.get_current_context().meta.get(WORDS)
    if runs and (words is not None or len(runs) == 1):
        raise click.UsageError("give the folders of at least two finished runs, or a job, but not both")
    if runs:
        first = read_run(runs[0])
        read = [first, *(read_run(folder, against=first) for folder in runs[1:])]
        _show(read, [*notes_on_lengths(read), *notes_on_jobs(read)], [], html)
        return
    folder = output or Path(time.strftime("runs/%Y%m%d-%H%M%S"))
    job = _job(request, words, nproc, folder)
    read, remarks, problems = _trained(job, folder, leave_one_out)
    _write_reports(read)
    _show(read, [*remarks, *notes_on_lengths(read)] if read else remarks, problems, html or folder / "compare.html")
    end(exit_code(problems))


def _job(request: Request, words: list[str] | None, nproc: int | None, folder: Path) -> ComparedJob:
    """Return the job of the words behind ``--``, or without them that of the options, which then stand in a job file."""
    from mindspeed.engine.resolution.request import Layer
    from mindspeed.engine.runtime.launch import joined
    from mindspeed.files.text_files import write_files
    from mindspeed.workbench.lint.launched_command import command_of_words
    from mindspeed.workbench.training.config import JOB_FILE
    from mindspeed.workbench.training.request_text import job_file
    from mindspeed.workbench.training.variants import pretrain_job, script_job

    if joined(os.environ) is not None:
        raise click.UsageError("mindspeed compare starts its runs itself; call it outside of torchrun and Slurm")
    verb = [Path(word).name for word in (words or [])[:2]]
    if words is not None and verb == ["mindspeed", "pretrain"]:
        if nproc or request.train or request.layers[-1] != Layer(COMMAND_LINE):
            raise click.UsageError("give --nproc and the options of the job after mindspeed pretrain")
        return pretrain_job(words[2:])
    if words is not None and verb[:1] == ["mindspeed"]:
        raise click.UsageError("after -- give a training script, or mindspeed pretrain with its options")
    if words is None and not request.train and not any(layer.features for layer in request.layers):
        raise click.UsageError("give a job with -f or --features, a command after --, or the folders of finished runs")
    file = folder / "job.yaml"
    write_files({file: job_file(request.layers, {JOB_FILE: request.train})}, fix="choose another --output FOLDER")
    if words is None:
        return pretrain_job(["-f", str(file), "--nproc", str(nproc or 1)])
    command = command_of_words(words)
    script = (command.program, *(word.text for word in command.arguments))
    count = nproc or command.world_size or 1
    launched = ["torchrun", "--nproc-per-node", str(count), *script]
    return script_job(["-f", str(file)], count, launched, script)


def _trained(job: ComparedJob, folder: Path, leave_one_out: bool) -> tuple[list[RunNumbers], list[str], list[Problem]]:
    """Train all variants. Return the numbers of those that ended, which features each lacks, and problems of the others."""
    from mindspeed.problems import MindSpeedError
    from mindspeed.workbench.training.run_numbers import read_run
    from mindspeed.workbench.training.variants import train, variants

    read: dict[str, RunNumbers] = {}
    remarks: list[str] = []
    problems: list[Problem] = []
    planned = list(variants(job, leave_one_out))
    if refused := [problem for variant in planned[:2] if isinstance(variant, MindSpeedError) for problem in variant.problems]:
        raise MindSpeedError(refused)
    for number, variant in enumerate(planned, 1):
        if isinstance(variant, MindSpeedError):
            problems += variant.problems
            continue
        run = folder / variant.folder
        click.echo(f"run {number}/{len(planned)}: {variant.name} in {run}", err=True)
        try:
            train(job, variant, run)
            read[variant.name] = read_run(run, variant.name, _other(read, number))
        except MindSpeedError as error:
            problems += error.problems
        if any(variant.name != f"without {name}" for name in variant.missing):
            remarks.append(f"disabled in the run {variant.name}: {', '.join(variant.missing)}")
    return list(read.values()), remarks, problems


def _write_reports(runs: Sequence[RunNumbers]) -> None:
    """Write the report of each run over the curves of the run that it is compared with."""
    from mindspeed.workbench.training.run_page import PAGE, report_page

    for run in runs:
        write_page(run.folder / PAGE, report_page(run.folder, run.against))


def _other(read: dict[str, RunNumbers], number: int) -> RunNumbers | None:
    """Return the run that another is compared with: none for the first, the first for the second, the second for others."""
    return read.get({1: "", 2: "without features"}.get(number, "with features"))


def _show(runs: Sequence[RunNumbers], remarks: Sequence[str], problems: Sequence[Problem], html: Path | None) -> None:
    from mindspeed.workbench.training.run_numbers import COMPARED, HEADERS, comparison_page, rows_of

    if runs and html is not None:
        write_page(html, comparison_page("Comparison of runs", runs, remarks))
    if wants_json():
        print_json({"runs": [run.to_json() for run in runs], "notes": remarks, "problems": [p.to_json() for p in problems]})
        return
    if runs:
        print_table(HEADERS, rows_of(runs))
        for line in (line for text in (COMPARED, *remarks) for line in on_terminal(text)):
            click.echo(line)
        if html is not None:
            click.echo(f"page: {html}")
    print_problems(problems)
