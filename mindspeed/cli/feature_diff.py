"""``mindspeed features diff``: what two jobs do not share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mindspeed.cli.output import OK, PROBLEMS, json_option, print_json, print_table, wants_json

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan


@click.command()
@click.argument("first", metavar="A", type=click.Path(exists=True))
@click.argument("second", metavar="B", type=click.Path(exists=True))
@json_option
@click.pass_context
def diff(ctx: click.Context, first: str, second: str) -> None:
    """Compare two jobs.

    The comparison covers features, settings, sizes, Megatron arguments, patches and versions.

    mindspeed features diff job.yaml mindspeed.lock

    Each argument is a job file, a plan (features plan --json), a lock file, a run folder, or a checkpoint folder of
    mindspeed or Megatron-LM. For two run folders, the command also prints the first training step in which a logged value,
    such as the loss, differs. The exit status is 1 when the jobs differ.
    """
    from mindspeed.workbench.training.comparison import differences, first_step_that_differs, not_compared, read_side

    a, b = read_side(first, _plan_of_job), read_side(second, _plan_of_job)
    found, step, left_out = differences(a, b), first_step_that_differs(a, b), not_compared(a, b)
    if wants_json():
        sides = {name: {"path": side.path, "form": side.form} for name, side in (("first", a), ("second", b))}
        print_json({**sides, "differences": found, "step": step, "not_compared": left_out})
    else:
        rows = [(row.kind, row.name, a.shown(row.key), b.shown(row.key)) for row in found]
        print_table(("", "", f"A: {a.form} {a.path}", f"B: {b.form} {b.path}"), rows)
        for path, kinds in left_out.items():
            click.echo(f"not compared, because only {path} has them: {', '.join(kinds)}")
        if step is not None:
            click.echo(f"first step that differs: {step.step}, {step.number} {step.first} and {step.second}")
        elif a.steps and b.steps:
            click.echo(f"the {len(a.steps.keys() & b.steps.keys())} steps that both runs logged are equal")
        if not found:
            click.echo("no difference")
    ctx.exit(PROBLEMS if found or step else OK)


def _plan_of_job(path: str) -> ActivationPlan:
    from mindspeed.cli.request_options import Request
    from mindspeed.engine.resolution.job_file import load_job_file

    job = load_job_file(path)
    return Request((job.layer,), job.train).plan_of_run()
