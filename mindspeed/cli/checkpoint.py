"""``mindspeed checkpoint diff``: what becomes of a checkpoint in a job with other features."""

from __future__ import annotations

from pathlib import Path

import click

from mindspeed.cli.lazy import LazyGroup
from mindspeed.cli.output import OK, PROBLEMS, json_option, print_json, wants_json
from mindspeed.cli.request_options import Request, request_options

checkpoint = LazyGroup("checkpoint", verbs={"diff": "mindspeed.cli.checkpoint:diff"}, help="Look at checkpoints.")


@click.command()
@click.argument("path", metavar="CHECKPOINT")
@request_options
@json_option
@click.pass_context
def diff(ctx: click.Context, request: Request, path: str) -> None:
    """Compare the features of a checkpoint with those of a job.

    mindspeed checkpoint diff RUN -f job.yaml

    CHECKPOINT is the folder of a checkpoint or of a run, whose newest one is taken. Every difference is safe, convertible
    or refused; the exit status is 1 when one is refused.
    """
    from mindspeed import registry
    from mindspeed.planning.checkpoint_state import FILE, changes, read_record
    from mindspeed.plugins.problems import Problem, RunError
    from mindspeed.training.checkpoints import FOLDER, find_checkpoint

    folder = find_checkpoint(path) if (Path(path) / FOLDER).is_dir() else Path(path)
    record = read_record(folder)
    if record is None:
        text = f"the checkpoint does not say which features it was saved with: {FILE} is missing"
        raise RunError([Problem("MS602", text, where=str(folder))])
    plan = request.plan_of_run()
    found = changes(record, plan, registry.feature_classes(plan), registry.content_of(plan))
    refused = [change for change in found if change.verdict == "refused"]
    if wants_json():
        print_json({"checkpoint": str(folder), "changes": [change.to_json() for change in found]})
    else:
        for change in found:
            click.echo(str(change))
            if change.verdict == "refused":
                click.echo(f"{'':<11}    fix: {change.fix}")
        if not found:
            click.echo("no difference")
    ctx.exit(PROBLEMS if refused else OK)
