"""``mindspeed lock`` and ``preflight``: a plan with versions and contents in a file, and a node held against it."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import click
from click.core import ParameterSource

from mindspeed.cli.output import Amount, end, exit_code, json_option, print_result
from mindspeed.cli.request_options import FeatureNames, Request, request_options, spelled_names
from mindspeed.cli.training_command import WORDS, PlansCommands, RuleOptions, plan_of_launched, rules_options
from mindspeed.problems import Fix

if TYPE_CHECKING:
    from mindspeed.workbench.diagnostics.preflight import PreflightCheck


@click.command(cls=PlansCommands)
@click.argument("words", metavar="[NAME|SCRIPT]...", nargs=-1, type=FeatureNames())
@click.option("-o", "--output", default="mindspeed.lock", show_default=True, metavar="FILE", help="Output file")
@rules_options
@request_options
@json_option
def lock(request: Request, words: tuple[str, ...], output: str, rules: RuleOptions) -> None:
    """Write the lock file of a job.

    mindspeed lock -f job.yaml -o mindspeed.lock

    mindspeed lock pretrain.sh

    mindspeed lock -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 ...

    The file contains the resolved plan, the versions of features, mindspeed and Megatron, and hashes of the files that
    patches come from. On a machine that can run the job it also contains the versions of Python and torch, the
    implementation of each operator, and hashes of Megatron's files. On a machine without torch, such as a CI runner, give
    Megatron's version with --megatron; the plan and its digest are the same. mindspeed preflight checks a node against the
    lock file.

    For a training command, given here or in a script, the lock file also contains all arguments of the command. A job that
    is started with this lock file (--lock or MINDSPEED_LOCK) is refused if its arguments differ. If the command has
    problems, no lock file is written.
    """
    from contextlib import nullcontext

    import yaml

    from mindspeed import registry
    from mindspeed.engine.planning.fingerprint import kind_of, numeric_variables
    from mindspeed.engine.planning.lock import Lock, facts_of, facts_to_lock
    from mindspeed.files.data_digest import data_facts
    from mindspeed.job.world import PARALLEL_SIZES
    from mindspeed.megatron_lm.given_arguments import argument_facts
    from mindspeed.ops.availability import can_run
    from mindspeed.problems import MindSpeedError, Problem
    from mindspeed.workbench.lint.launched_command import command_of_file, command_of_words
    from mindspeed.workbench.lint.locked_command import COMMAND, importable, locked_command
    from mindspeed.workbench.training.config import JOB_FILE, OPERATION, train_config, training_facts
    from mindspeed.workbench.training.request_text import job_file

    behind: list[str] | None = click.get_current_context().meta.get(WORDS)
    scripts = [word for word in words if "." in word or "/" in word]  # which no name of a feature has
    if len(scripts) > 1:
        raise click.UsageError(f"a lock file holds one job, but {' and '.join(scripts)} are several")
    request = request.naming(spelled_names([word for word in words if word not in scripts]))
    if behind is not None and scripts:
        raise click.UsageError("a script and a command after -- are two commands; give only one")
    command = command_of_file(scripts[0], os.environ) if scripts else command_of_words(behind) if behind is not None else None
    with importable(command.program, rules.checkout) if command is not None else nullcontext(True) as has_megatron:
        plan = request.plan_of_run() if command is None else plan_of_launched(request, command, rules)
        if "megatron" not in plan.environment:
            text = "megatron-core is not installed, but a lock file must record a version of megatron-core"
            raise MindSpeedError(
                [Problem("MS502", text, fix=Fix.advise("--megatron 0.16.1, or the version that the job uses"))]
            )
        here = registry.content_of(plan, numeric_variables(os.environ))
    if not has_megatron:
        here = {key: value for key, value in here.items() if kind_of(key) != "target"}
    job = yaml.safe_load(job_file(request.layers, {"job file": request.train})) or {}
    sizes = plan.world.known()
    if request.train:  # the values that the trainer adds; preflight resolves the job without it
        sizes = {name: value for name, value in sizes.items() if name not in (*PARALLEL_SIZES, "platform", "megatron")}
        job["world"] = sizes | job.get("world", {})
    elif "world_size" in sizes:
        job.setdefault("world", {})["world_size"] = sizes["world_size"]
    job["platform"] = plan.environment["platform"]
    content = facts_to_lock(plan, here, can_run(job["platform"]))
    if command is not None:
        job[COMMAND] = locked_command(command, plan)
        content |= argument_facts(job[COMMAND]["arguments"], plan.environment["megatron"])
    else:
        config, _ = train_config({JOB_FILE: request.train})
        content |= training_facts(config, OPERATION) | (data_facts([config.data]) if config.data else {})
    made = Lock(job, plan, content)
    made.write(output)
    files = len(facts_of(made.content, "source") | facts_of(made.content, "target"))
    versions = ", ".join(f"{name} {version}" for name, version in made.versions().items())
    print_result(
        {"lock": output, "digest": plan.digest, "versions": made.versions(), "files": files},
        [f"{output}: {', '.join(plan.names) or 'no features'}; {versions}; {files} files; plan {plan.digest}"],
    )


_OF_ONE_NODE: Final = ("path", "run", "free_disk")
_OF_ALL_NODES: Final = ("mib", "wait")


@click.command()
@click.option("--lock", "path", default="mindspeed.lock", show_default=True, metavar="FILE", help="Lock file of the job")
@click.option("--run", metavar="FOLDER", help="Run folder, whose disk is checked  [default: that of the job, or .]")
@click.option("--free-disk", default=10.0, show_default=True, metavar="GIB", help="Disk space that the run needs")
@click.option("--free-shm", default=1.0, show_default=True, metavar="GIB", help="Space in /dev/shm that data loading needs")
@click.option(
    "--between-nodes", is_flag=True, help="Compare the nodes of a job with one another instead, and measure their network"
)
@click.option(
    "--mib",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="With --between-nodes: MiB that each two processes exchange",
)
@click.option(
    "--wait",
    type=Amount(min=1),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="With --between-nodes: time limit in seconds for each step that needs the other processes",
)
@json_option
@click.pass_context
def preflight(
    context: click.Context,
    path: str,
    run: str | None,
    free_disk: float,
    free_shm: float,
    between_nodes: bool,
    mib: int,
    wait: float,
) -> None:
    """Check one node against a lock file, or the nodes of a job against each other.

    The check of one node does not communicate with others and does not import torch. The exit status is 1 when versions,
    files or settings of the node differ from the lock file. It is 3 when they are equal, but the machine lacks something,
    such as disk space.

    With --between-nodes, start one process on each node, or on each device, with torchrun or Slurm:

    srun --ntasks-per-node=1 mindspeed preflight --between-nodes

    Rank 0 then prints where nodes differ in versions, devices, clocks or variables, and the bandwidth between each two
    processes: the median, and the pairs that are slow. The exit status is 3 if a node differs or a pair is slow.
    """
    unused = _given(context, _OF_ONE_NODE if between_nodes else _OF_ALL_NODES)
    if unused:
        raise click.UsageError(f"{', '.join(unused)} has no effect {'with' if between_nodes else 'without'} --between-nodes")
    if between_nodes:
        results = _between_nodes(mib, wait, free_shm)
    else:
        from mindspeed.engine.planning.lock import read_lock
        from mindspeed.workbench.diagnostics.preflight import checks

        made = read_lock(path)
        results = list(checks(made, run or made.job.get("train", {}).get("run") or ".", free_disk, free_shm))
    if results:
        print_result({"passed": all(result.passed for result in results), "checks": results}, map(str, results))
    end(exit_code([problem for result in results if (problem := result.problem()) is not None]))


def _given(context: click.Context, names: Collection[str]) -> list[str]:
    """Return the options with these names that the command line gives."""
    given = (option for option in context.command.params if option.name in names)
    return [option.opts[0] for option in given if context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE]


def _between_nodes(mib: int, wait: float, free_shm: float) -> list[PreflightCheck]:
    """The checks of all nodes on rank 0 of a job, none on the others."""
    from mindspeed.engine.runtime.launch import joined
    from mindspeed.workbench.diagnostics.between_nodes import compare_nodes

    job = joined(os.environ)
    if job is None:
        raise click.UsageError("--between-nodes needs a process on each node; start it with torchrun or srun")
    return compare_nodes(job, mib, wait, free_shm)
