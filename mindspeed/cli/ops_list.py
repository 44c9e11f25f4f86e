"""``mindspeed ops list``: which variant of each operator runs here, and why not a better one."""

from __future__ import annotations

import click

from mindspeed.cli.output import json_option, print_json, print_table, wants_json
from mindspeed.plugins.world import PLATFORMS


@click.command("list")
@click.option("--platform", type=click.Choice(PLATFORMS), help="device to list for  [default: what is here]")
@json_option
def list_operators(platform: str | None) -> None:
    """List the operators.

    For each the best variant that this platform has, what runs on this machine, and why not the former. A reference is
    plain torch: right everywhere, and slower.
    """
    from mindspeed.ops.availability import standings
    from mindspeed.platforms import detect

    platform = platform or detect()
    rows = standings(platform)
    if wants_json():
        print_json({"platform": platform, "operators": [row.to_json() for row in rows]})
        return
    cells = [(row.name, row.variant, row.runs or "-", row.why) for row in rows]
    print_table(("OPERATOR", f"BEST ON {platform.upper()}", "RUNS HERE", "WHY"), cells)
