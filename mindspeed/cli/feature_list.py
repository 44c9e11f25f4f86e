"""``mindspeed features list``: every installed feature, where it comes from, and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mindspeed.cli.output import json_option, print_json, print_table, wants_json

if TYPE_CHECKING:
    from mindspeed.plugins.discovery import Found


@click.command("list")
@click.option("--no-import", is_flag=True, help="read features of other packages from their metadata alone")
@json_option
def list_features(no_import: bool) -> None:
    """List every installed feature."""
    from mindspeed.plugins.discovery import discover

    rows = discover(import_third_parties=not no_import).rows
    if wants_json():
        print_json({"features": [_describe(row) for row in rows]})
        return
    headers = ("NAME", "LEVEL", "STABILITY", "PLATFORMS", "SLOTS", "FROM", "STATE", "SUMMARY")
    print_table(headers, [_cells(row) for row in rows])
    for row in rows:
        if row.problem is not None:
            click.echo(f"\n{row.problem}")


def _describe(row: Found) -> dict[str, Any]:
    """One row by the fixed keys; what only the class can say is None when it was not loaded."""
    from mindspeed.plugins.world import PLATFORMS

    spec = row.feature.spec if row.feature is not None else None
    return {
        "name": row.name,
        "summary": spec.summary if spec else None,
        "stability": spec.stability.value if spec else None,
        "level": spec.level if spec else None,
        "slots": sorted(spec.slots) if spec else None,
        "platforms": [name for name in PLATFORMS if not spec.platforms or name in spec.platforms] if spec else None,
        "distribution": row.distribution,
        "version": row.version,
        "state": row.state,
        "error": row.problem.message if row.problem is not None else None,
    }


def _cells(row: Found) -> tuple[str, ...]:
    known = {key: "-" if value is None else value for key, value in _describe(row).items()}
    return (
        row.name,
        str(known["level"]),
        known["stability"],
        " ".join(known["platforms"]),
        " ".join(known["slots"]) or "-",
        f"{row.distribution} {row.version}",
        row.state,
        known["summary"],
    )
