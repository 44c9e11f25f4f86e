"""``mindspeed lock``: the resolved plan of a job, with versions and the content of every patch, in a file."""

from __future__ import annotations

import click

from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.request_options import JobCommand, Request, names_argument, request_options
from mindspeed.plugins.fixes import Advice


@click.command(cls=JobCommand)
@names_argument("[NAME]...")
@click.option("-o", "--output", default="mindspeed.lock", show_default=True, metavar="FILE", help="where to write it")
@request_options
@json_option
def lock(request: Request, names: tuple[str, ...], output: str) -> None:
    """Write the lock file of a job.

    mindspeed lock -f job.yaml -o mindspeed.lock

    It holds the resolved plan, the versions of features, mindspeed and Megatron, and the content of the files that patches
    come from. On a machine that can run the job it also holds what is installed there: the versions of Python and torch,
    the variants of operators, and the content of Megatron's files. On another, such as a CI runner without torch, --megatron
    gives Megatron's version, and the plan and its digest are the same. mindspeed preflight checks nodes against it.
    """
    import yaml

    from mindspeed import registry
    from mindspeed.engine.planning.lock import Lock, facts_of, facts_to_lock
    from mindspeed.job.world import PARALLEL_SIZES
    from mindspeed.ops.availability import can_run
    from mindspeed.plugins.problems import MindSpeedError, Problem
    from mindspeed.training.request_text import job_file

    request = request.naming(names)
    plan = request.plan_of_run()
    if "megatron" not in plan.environment:
        text = "megatron-core is not installed here, and a lock holds its version"
        raise MindSpeedError([Problem("MS502", text, fix=Advice("--megatron 0.16.1, or the version that the job has"))])
    job = yaml.safe_load(job_file(request.layers, {"job file": request.train})) or {}
    sizes = plan.world.known()
    if request.train:  # the values that the trainer adds; preflight resolves the job without it
        sizes = {name: value for name, value in sizes.items() if name not in (*PARALLEL_SIZES, "platform", "megatron")}
        job["world"] = sizes | job.get("world", {})
    elif "world_size" in sizes:
        job.setdefault("world", {})["world_size"] = sizes["world_size"]
    job["platform"] = plan.environment["platform"]
    content = facts_to_lock(plan, registry.content_of(plan, {}), can_run(job["platform"]))
    made = Lock(job, plan, content)
    made.write(output)
    files = len(facts_of(made.content, "source") | facts_of(made.content, "target"))
    versions = ", ".join(f"{name} {version}" for name, version in made.versions().items())
    print_result(
        {"lock": output, "digest": plan.digest, "versions": made.versions(), "files": files},
        [f"{output}: {', '.join(plan.names) or 'no features'}; {versions}; {files} files; plan {plan.digest}"],
    )
