"""``mindspeed lock``: the resolved plan of a job, with versions and the content of every patch, in a file."""

from __future__ import annotations

import click

from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.request_options import JobCommand, Request, request_options


@click.command(cls=JobCommand)
@click.option("-o", "--output", default="mindspeed.lock", show_default=True, metavar="FILE", help="where to write it")
@request_options
@json_option
def lock(request: Request, output: str) -> None:
    """Write the lock file of a job.

    mindspeed lock -f job.yaml -o mindspeed.lock

    It holds the resolved plan, the versions of features, mindspeed, Megatron and torch, and the content of the files
    that patches come from and go to. Write it where the job's image is installed; mindspeed preflight checks nodes
    against it.
    """
    import yaml

    from mindspeed import registry
    from mindspeed.engine.planning.lock import Lock, facts_of
    from mindspeed.job.world import PARALLEL_SIZES
    from mindspeed.training.job import job_file

    plan = request.plan_of_run()
    job = yaml.safe_load(job_file(request.layers, {"job file": request.train})) or {}
    sizes = plan.world.known()
    if request.train:  # the values that the trainer adds; preflight resolves the job without it
        sizes = {name: value for name, value in sizes.items() if name not in (*PARALLEL_SIZES, "platform", "megatron")}
        job["world"] = sizes | job.get("world", {})
    elif "world_size" in sizes:
        job.setdefault("world", {})["world_size"] = sizes["world_size"]
    job["platform"] = plan.environment["platform"]
    made = Lock(job, plan, registry.content_of(plan, {}))
    made.write(output)
    files = len(facts_of(made.content, "source") | facts_of(made.content, "target"))
    versions = ", ".join(f"{name} {version}" for name, version in made.versions().items())
    print_result(
        {"lock": output, "digest": plan.digest, "versions": made.versions(), "files": files},
        [f"{output}: {', '.join(plan.names) or 'no features'}; {versions}; {files} files; plan {plan.digest}"],
    )
