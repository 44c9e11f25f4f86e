"""``mindspeed features check``: everything that is wrong with a request, before anything is started."""

from __future__ import annotations

import click

from mindspeed.cli.output import json_option, print_json, wants_json
from mindspeed.cli.request_options import Request, request_options


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@request_options
@json_option
def check(request: Request, names: tuple[str, ...]) -> None:
    """Find every problem of a request.

    Features, settings and sizes are checked together, for this machine or for a made-up one. Problems are printed all at
    once, and the exit status is then 1.
    """
    plan = request.naming(names).resolve()
    if wants_json():
        print_json({"problems": [], "plan": plan.to_json()})
        return
    for row in plan.rows:
        if row.kind == "not-checked":
            click.echo(f"not checked  {row.feature}: {row.text}")
    click.echo(f"no problems: {', '.join(plan.names) or 'no features'}; plan {plan.digest}")
