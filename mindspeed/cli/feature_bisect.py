"""``mindspeed features bisect``: the features and settings with which a job fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindspeed.cli.matrix_options import store_option
from mindspeed.cli.output import OK, PROBLEMS, Amount, json_option, print_result, wants_json
from mindspeed.cli.request_options import JobCommand, Request, names_argument, request_options

if TYPE_CHECKING:
    from mindspeed.workbench.verification.matrix.bisect import Culprits
    from mindspeed.workbench.verification.matrix.verdicts import CaseResult


@click.command(cls=JobCommand)
@names_argument("[NAME]...")
@click.option(
    "--test",
    default="",
    metavar="'CMD'",
    help="Command that runs the job and exits with 0 if it succeeds; {job} is replaced by the path of a job file",
)
@click.option(
    "--timeout",
    type=Amount(0, min_open=True),
    metavar="S",
    help="Maximum time of one run in seconds; a longer run counts as failed",
)
@store_option
@request_options
@json_option
@click.pass_context
def bisect(
    ctx: click.Context, request: Request, names: tuple[str, ...], test: str, timeout: float | None, store: Path | None
) -> None:
    """Find the smallest set of features that makes a job fail.

    mindspeed features bisect -f job.yaml

    Without --test, each run trains a small model with some of the job's features and compares it with unmodified Megatron.
    The search removes features and settings as long as the rest still fails.

    If only the real job fails, give a command with --test. The exit status of the command decides: 0 = success, 125 = skip
    this set of features, any other = failure. Results are stored, so a stopped search continues where it stopped. The
    exit status of bisect is 1 when a failing set is found.

    mindspeed features bisect -f job.yaml --test 'mindspeed pretrain -f {job} --train-iters 20'
    """
    from mindspeed import registry
    from mindspeed.files.cache_folder import cache_folder
    from mindspeed.workbench.verification.matrix.bisect import Search, suspected_by, suspects_of
    from mindspeed.workbench.verification.matrix.reach import Sources
    from mindspeed.workbench.verification.matrix.store import VerdictStore, default_store
    from mindspeed.workbench.verification.pool import TIME_LIMIT, WorkerPool

    request = request.naming(names)
    plan = request.plan_of_run()
    suspects = suspects_of(request.layers)
    given = {name: value for layer in request.layers for name, value in layer.world.items()}
    job = {"world": given, **({"train": request.train} if request.train else {}), "platform": plan.environment["platform"]}
    sources, kept = Sources(registry.catalog()), VerdictStore(store or cache_folder() / "bisect.jsonl")
    suspected = suspected_by(VerdictStore(default_store()).read(), {suspect.feature for suspect in suspects})
    with WorkerPool(time_limit=timeout or TIME_LIMIT) as pool:
        search = Search(job, given, kept, sources, pool, test, timeout, _show)
        found = search.find(suspects, suspected)
    facts = {name: getattr(found, name) for name in ("result", "runs", "shared", "steady")}
    print_result({"culprits": list(map(str, found.found))} | facts, _lines(found, test))
    ctx.exit(PROBLEMS if found.found else OK)


def _lines(found: Culprits, test: str) -> list[str]:
    result = found.result
    if not found.found:
        text = f"the whole job does not fail ({result.outcome.value}{f': {result.reason}' if result.reason else ''})"
        if test:
            return [f"{text}: {test} passes"]
        return [f"{text} on a small model; if only the real job fails, give its command with --test"]
    lines = [f"fails with: {', '.join(map(str, found.found))}", f"because: {result.code} {result.reason}".rstrip()]
    lines += [f"         {line}" for line in result.chain]
    lines += [f"first to differ: {result.first}"] if result.first else []
    lines += [f"both patch: {site} ({', '.join(owners)})" for site, owners in found.shared.items()]
    if not found.steady:
        lines.append("the failure is not reproducible: the same set of features has also passed, or failed differently")
    return [*lines, f"to reproduce it: {test or result.case.command}", f"{found.runs} runs"]


def _show(result: CaseResult) -> None:
    if wants_json() or not sys.stderr.isatty():
        return
    row: list[Any] = [result.outcome.value, ", ".join(result.case.features), result.reason]
    click.echo("  ".join(row).rstrip(), err=True)
