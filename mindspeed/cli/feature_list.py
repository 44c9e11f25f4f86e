"""``mindspeed features list``: every installed feature, where it comes from, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from mindspeed.cli.output import json_option, print_json, print_table, wants_json
from mindspeed.job.world import PLATFORMS
from mindspeed.plugins.found import BUILT_IN, PLUGINS_VARIABLE, DiscoveredFeature, installed, unmatched

MANY: Final = 200
"""Above this number features of other distributions are not loaded to list them, and rows are not aligned."""


@click.command("list")
@click.argument("words", metavar="[WORD]...", nargs=-1)
@click.option("--level", type=click.IntRange(0, 2), metavar="N", help="features of this optimization level alone")
@click.option("--slot", metavar="SLOT", help="features that hold this slot alone")
@click.option("--platform", type=click.Choice(PLATFORMS), help="features for this platform alone")
@click.option("--from", "distribution", metavar="DISTRIBUTION", help="features of this distribution alone")
@click.option("--no-import", is_flag=True, help="import no feature: say what folders and metadata alone tell")
@json_option
def list_features(
    words: tuple[str, ...], level: int | None, slot: str | None, platform: str | None, distribution: str | None, no_import: bool
) -> None:
    """List every installed feature, or those that have every WORD in their name or summary.

    Features of other distributions are imported to read their declarations, unless there are more than 200 of them.
    """
    rows: Sequence[DiscoveredFeature] = installed()
    if not no_import:
        from mindspeed.plugins.discovery import discover

        others = sum(row.distribution != BUILT_IN for row in rows)
        rows = discover(only=None if others <= MANY else ()).rows
    filters = {"level": level, "slots": slot, "platforms": platform, "distribution": distribution}
    rows = [row for row in rows if _matches(_describe(row), words, filters)]
    if wants_json():
        print_json({"features": [_describe(row) for row in rows]})
        return
    _print(rows)


def _matches(row: Mapping[str, Any], words: Sequence[str], filters: Mapping[str, Any]) -> bool:
    """Return whether a described row has every word, and every value of a filter that was given."""
    text = f"{row['name']} {row['summary'] or ''}".lower()
    if not all(word.lower() in text for word in words):
        return False
    values = {key: value for key, value in filters.items() if value is not None}
    return all(value in row[key] if isinstance(row[key], list) else value == row[key] for key, value in values.items())


def _print(rows: Sequence[DiscoveredFeature]) -> None:
    headers = ("NAME", "LEVEL", "STABILITY", "PLATFORMS", "SLOTS", "FROM", "STATE", "SUMMARY")
    if not rows:
        click.echo("no feature matches", err=True)
    elif len(rows) <= MANY:
        print_table(headers, [_cells(row) for row in rows])
    else:
        click.echo("\n".join("  ".join(cells) for cells in (headers, *map(_cells, rows))))
    for row in rows:
        if row.problem is not None and row.state == "broken":
            click.echo(f"\n{row.problem}")
    if left_out := sum(row.state == "left out" for row in rows):
        click.echo(f"\n{left_out} left out, because {PLUGINS_VARIABLE} is {os.environ.get(PLUGINS_VARIABLE, '')!r}")
    for name in unmatched(rows):
        click.echo(f"\n{PLUGINS_VARIABLE} names {name}, and no distribution with features is called so")


def _describe(row: DiscoveredFeature) -> dict[str, Any]:
    """Make a row by the fixed keys; values that only the class has are None when it was not loaded."""
    spec = row.feature.spec if row.feature is not None else None
    return {
        "name": row.name,
        "summary": row.feature.summary() if row.feature is not None else None,
        "stability": spec.stability.value if spec else None,
        "level": spec.level if spec else None,
        "slots": sorted(spec.slots) if spec else None,
        "platforms": [name for name in PLATFORMS if not spec.platforms or name in spec.platforms] if spec else None,
        "distribution": row.distribution,
        "version": row.version,
        "state": row.state,
        "error": row.problem.message if row.problem is not None else None,
    }


def _cells(row: DiscoveredFeature) -> tuple[str, ...]:
    described = _describe(row)
    values = (described[name] for name in ("level", "stability", "platforms", "slots"))
    cells = (" ".join(value) if isinstance(value, list) else value for value in values)
    texts = ("-" if cell in (None, "") else str(cell) for cell in cells)
    return (row.name, *texts, f"{row.distribution} {row.version}", row.state, described["summary"] or "-")
