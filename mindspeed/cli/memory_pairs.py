"""``mindspeed memory pairs``: which of some features go together."""

from __future__ import annotations

from itertools import combinations

import click

from mindspeed.cli.output import json_option, print_json, print_table, wants_json
from mindspeed.cli.request_options import FullJobCommand, Request, names_argument, request_options


@click.command(cls=FullJobCommand)
@names_argument("NAME NAME...", required=True)
@request_options
@json_option
def pairs(request: Request, names: tuple[str, ...]) -> None:
    """Tell of each pair of features whether a job can have both, and why not."""
    rows = [(first, second, _refusal(request, first, second)) for first, second in combinations(sorted(set(names)), 2)]
    if wants_json():
        print_json({"pairs": [{"features": [first, second], "refused": refusal} for first, second, refusal in rows]})
    else:
        print_table(("feature", "feature", "together"), [(first, second, refusal or "yes") for first, second, refusal in rows])


def _refusal(request: Request, first: str, second: str) -> str:
    """The problems of a pair, none where both can be active."""
    from mindspeed.plugins.problems import MindSpeedError

    try:
        request.naming((first, second)).plan_of_run()
    except MindSpeedError as error:
        return "; ".join(problem.message for problem in error.problems)
    return ""
