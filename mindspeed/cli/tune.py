"""``mindspeed tune``: the fastest layout among those that fit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindspeed.cli.memory import MemorySize
from mindspeed.cli.output import FOLDER, Amount, json_option, print_json, print_table, wants_json
from mindspeed.cli.request_options import (
    COMMAND_LINE,
    FullJobCommand,
    Request,
    names_argument,
    names_option,
    request_options,
    unknown_feature,
)
from mindspeed.cli.terminal import on_terminal
from mindspeed.problems import Fix

if TYPE_CHECKING:
    from mindspeed.workbench.tuning.job import CountBytes, SearchJob
    from mindspeed.workbench.tuning.search import Configuration, Found
    from mindspeed.workbench.tuning.space import Choice
    from mindspeed.workbench.tuning.time import Machine


@click.command(cls=FullJobCommand)
@names_argument("[NAME]...")
@click.option(
    "--device-memory",
    type=MemorySize(),
    metavar="SIZE",
    help="Memory of one device, such as 80GiB, or in MiB  [default: unlimited]",
)
@names_option(
    "--try",
    "tried",
    help="Also search with and without these features. The search always tries context-parallel algorithms, and features whose "
    "hook variants returns settings to try (see: mindspeed docs hooks)",
)
@click.option(
    "--mode",
    type=click.Choice(["white", "mixed", "black"]),
    default="white",
    show_default=True,
    help="How to search. white = predict step times, mixed = also measure the best configurations, black = measure all",
)
@click.option(
    "--calibrate",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="First measure up to N configurations on this machine to fit the cost model",
)
@click.option(
    "--measure-products",
    is_flag=True,
    help="First time matrix products on the device of this machine, and keep their speeds for later searches",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    metavar="N",
    help="Number of timed steps for each configuration that --calibrate, --mode mixed or --mode black measures",
)
@click.option(
    "--budget-seconds",
    "budget",
    type=Amount(0),
    default=float("inf"),
    metavar="SECONDS",
    help="Time in seconds for all measurements; finished ones are kept",
)
@click.option(
    "--store",
    type=FOLDER,
    metavar="FOLDER",
    help="Folder in which measured step times are kept  [default: ~/.cache/mindspeed/tuning, or $MINDSPEED_CACHE/tuning]",
)
@click.option("--output", type=FOLDER, metavar="FOLDER", help="Write tune.json, job.yaml and pareto.png to this folder")
@click.option("--dry-run", "dry", is_flag=True, help="Use dry runs (fake tensors) to decide which layouts fit in memory")
@click.option(
    "--top",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    metavar="N",
    help="Number of configurations to show; 0 = every configuration that fits",
)
@request_options
@json_option
def tune(
    request: Request,
    names: tuple[str, ...],
    device_memory: int | None,
    tried: tuple[str, ...],
    mode: str,
    calibrate: int,
    measure_products: bool,
    steps: int,
    budget: float,
    store: Path | None,
    output: Path | None,
    dry: bool,
    top: int,
) -> None:
    """Find the fastest layout and features that fit.

    mindspeed tune -f job.yaml --world-size 8 --device-memory 80GiB

    The search varies parallel sizes, the micro-batch size, and every feature whose hook variants returns settings to try.
    Values given by the job or an option are fixed. Every printed row is a valid plan; --json also prints its job file.
    """
    from mindspeed.files.cache_folder import cache_folder
    from mindspeed.workbench.tuning.job import make_search
    from mindspeed.workbench.tuning.measure import Store, machine_facts
    from mindspeed.workbench.tuning.output import HEADERS, as_json, table, write

    request = request.naming(names).of_dense()
    _require_known(request, tried)
    is_built = mode != "white" or bool(calibrate) or dry or output is not None
    job = make_search(request.layers, request.train, request.environment(), _ranks(request), tried, is_built)
    where = Store(store or cache_folder() / "tuning", machine_facts(job.environment.platform), job.model)
    limit = float("inf") if device_memory is None else float(device_memory)
    if measure_products:
        _measure_products(job, where)
    machine = _machine(job, where, calibrate, steps, budget, limit)
    with _dry_runs(job) if dry else nullcontext() as count:
        found = job.search(machine, limit, 0 if mode == "black" else top, count)
    if mode != "white":
        found = _measured(job, found, where, steps, budget)
    found = replace(found, rows=found.rows[: top or None])
    if output is not None:
        for path in write(found, job.job_of, output, where):
            click.echo(str(path), err=True)
    if wants_json():
        print_json(as_json(found, job.job_of))
        return
    print_table(HEADERS, table(found))
    shares = f"{found.configurations:,} configurations, {found.feasible:,} feasible, {found.fitting:,} fit"
    click.echo()
    lines = [f"{shares}; searched in {found.seconds:.2f} s"]
    lines += [f"not modelled: {', '.join(found.not_modelled)}"] if found.not_modelled else []
    lines += [f"memory modelled, step time not: {', '.join(found.not_timed)}"] if found.not_timed else []
    for part in (part for line in lines for part in on_terminal(line)):
        click.echo(part)


def _require_known(request: Request, tried: Sequence[str]) -> None:
    """Raise ResolutionError with each requested or tried name that no feature has; a search would only find no layout."""
    from mindspeed.problems import ResolutionError
    from mindspeed.registry import catalog_for

    asked = dict.fromkeys(tried, COMMAND_LINE) | {name: layer.source for layer in request.layers for name in layer.features}
    known = catalog_for(list(asked))
    problems = [unknown_feature(known, name, source) for name, source in asked.items() if name not in known.names]
    problems += [row.problem for name, row in known.broken.items() if name in asked and row.problem is not None]
    if problems:
        raise ResolutionError(problems)


def _ranks(request: Request) -> int:
    from mindspeed.problems import Problem, ResolutionError
    from mindspeed.workbench.training.shape import given_world

    if not (given := given_world(request.layers).get("world_size")):
        raise ResolutionError([Problem("MS301", "--world-size is not set", fix=Fix.give_field("world_size"))])
    return int(given)


def _machine(job: SearchJob, store: Any, calibrate: int, steps: int, budget: float, limit: float) -> Machine:
    """The machine of the store, measured further where asked for; without measurements, orders of magnitude."""
    from mindspeed.problems import Problem, RunError
    from mindspeed.workbench.tuning.measure import measure
    from mindspeed.workbench.tuning.products import with_products
    from mindspeed.workbench.tuning.time import DEFAULTS, Machine, fit

    cores = (os.cpu_count() or 1) if job.environment.platform == "cpu" else 0
    machine = with_products(Machine(DEFAULTS[job.environment.platform], cores), store, job.model["dtype"])
    if calibrate:
        ranks = _local_ranks(job)
        rows = job.telling(machine, limit, calibrate)
        if len(rows) < calibrate:
            text = (
                f"--calibrate {calibrate} needs {calibrate} different configurations (layout and features) of {ranks} ranks, "
                f"but only {len(rows)} are valid and fit in device memory"
            )
            raise RunError([Problem("MS345", text, fix=Fix.advise(f"--calibrate {len(rows)}, or a larger --world-size"))])
        known = measure(rows, job.job_of, store, ranks, steps, budget, _say)
        measured = [known[row.key] for row in rows if row.key in known]  # others would change what a resumed search finds
    elif (stale := store.staleness()) is not None:
        raise RunError([stale])
    else:
        measured = list(store.measurements().values())
    if not measured:
        return machine
    crowd = max(1.0, job.model["world_size"] / cores) if cores else 1.0
    return fit([dict(found.work) for found in measured], [found.seconds for found in measured], machine, crowd)


def _measure_products(job: SearchJob, store: Any) -> None:
    from mindspeed.problems import Problem, ResolutionError
    from mindspeed.registry import probe
    from mindspeed.workbench.tuning.products import keep, measured_products

    platform = job.environment.platform
    if platform != (here := probe().platform):
        text = f"products of platform {platform} cannot be measured on this machine, whose platform is {here}"
        raise ResolutionError([Problem("MS345", text, fix=Fix.advise(f"measure on a machine with platform {platform}"))])
    store.write({})
    keep(store, job.model["dtype"], measured_products(job.model["dtype"], platform, _say))


def _local_ranks(job: SearchJob) -> int:
    from mindspeed.problems import Problem, RunError

    ranks, cores = int(job.model["world_size"]), os.cpu_count() or 1
    if job.environment.platform == "cpu" and ranks > cores:
        text = f"{ranks} ranks cannot be measured on {cores} processor cores: they would wait for each other"
        fix = Fix.advise(f"--world-size {cores}, or measure on a machine with {ranks} cores")
        raise RunError([Problem("MS345", text, fix=fix)])
    return ranks


@contextmanager
def _dry_runs(job: SearchJob) -> Iterator[CountBytes]:
    """Count the bytes of a configuration by dry runs, one rank of each pipeline stage."""
    from mindspeed.problems import Problem, ResolutionError
    from mindspeed.workbench.verification.case import with_few_micro_batches
    from mindspeed.workbench.verification.pool import WorkerPool
    from mindspeed.workbench.verification.shape import recipe_of

    if (platform := job.environment.platform) != "cpu":
        text = f"a dry run uses the layers of platform cpu, but this job is for {platform}"
        raise ResolutionError([Problem("MS345", text, fix=Fix.advise("remove --dry-run, or give --platform cpu"))])

    def count(choice: Choice, world: Mapping[str, Any]) -> int:
        short = with_few_micro_batches(job.plan_of(choice, world).world)
        plan = job.plan_of(choice, world, short)
        return max(peak for _, peak in pool.dry_run(plan, recipe_of(plan.world)))

    with WorkerPool() as pool:
        yield count


def _measured(job: SearchJob, found: Found, store: Any, steps: int, budget: float) -> Found:
    """The rows with their measured seconds, the fastest measured first."""
    from mindspeed.workbench.tuning.measure import measure

    known = measure(found.rows, job.job_of, store, _local_ranks(job), steps, budget, _say)

    def seconds(row: Configuration) -> Configuration:
        return replace(row, measured_seconds=known[row.key].seconds) if row.key in known else row

    rows = sorted(map(seconds, found.rows), key=lambda row: (row.measured_seconds is None, row.measured_seconds or 0.0))
    return replace(found, rows=tuple(rows))


def _say(text: str) -> None:
    click.echo(text, err=True)
