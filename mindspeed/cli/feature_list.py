"""``mindspeed features list``: every installed feature, where it comes from, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from gettext import gettext
from typing import Any, Final

import click

from mindspeed.cli.language import reader
from mindspeed.cli.output import json_option, print_json, print_table, wants_json
from mindspeed.cli.terminal import bold, rows_of_cells, wrapped
from mindspeed.job.world import PLATFORMS
from mindspeed.plugins.feature import Category
from mindspeed.plugins.found import BUILT_IN, PLUGINS_VARIABLE, DiscoveredFeature, installed, unmatched
from mindspeed.problems import localized, marked

MANY: Final = 200
"""Above this number features of other distributions are not loaded to list them, and rows are not aligned."""
HEADERS: Final = (
    *(marked("NAME"), marked("LEVEL"), marked("STABILITY"), marked("PLATFORMS")),
    *(marked("SLOTS"), marked("FROM"), marked("STATE"), marked("SUMMARY")),
)
TITLES: Final = {
    Category.PLATFORM: marked("Platforms"),
    Category.MEGATRON: marked("Parallelism and recomputation of Megatron"),
    Category.PARALLEL: marked("Pipeline schedules and stages"),
    Category.CONTEXT_PARALLEL: marked("Context parallelism (long sequences)"),
    Category.MEMORY: marked("Memory: recomputation, offloading, smaller states"),
    Category.COMPUTE: marked("Fused operators"),
    Category.COMMUNICATION: marked("Communication of tensor parallelism and checkpoints"),
    Category.MOE: marked("Mixture of experts (MoE)"),
    Category.DEEPSPEED_MOE: marked("Mixture of experts as in DeepSpeed"),
    Category.SCENARIO: marked("Model and data variants"),
    Category.TOOL: marked("Monitoring, profiling and reproducibility"),
}
"""The heading of each category in the list."""


@click.command("list")
@click.argument("words", metavar="[WORD]...", nargs=-1)
@click.option("--level", type=click.IntRange(0, 2), metavar="N", help="Show only features of this optimization level")
@click.option(
    "--slot",
    metavar="SLOT",
    help="Show only features for this slot, a role that one active feature can have, such as pipeline-schedule",
)
@click.option("--platform", type=click.Choice(PLATFORMS), help="Show only features for this platform")
@click.option("--from", "distribution", metavar="DISTRIBUTION", help="Show only features of this distribution")
@click.option("--wide", is_flag=True, help="Show a table with platforms, slots, packages and whole summaries")
@click.option("--no-import", is_flag=True, help="Do not import features; show only their names and packages")
@json_option
def list_features(
    words: tuple[str, ...],
    level: int | None,
    slot: str | None,
    platform: str | None,
    distribution: str | None,
    wide: bool,
    no_import: bool,
) -> None:
    """List installed features, or search them for words.

    A feature is listed if its name, category or description contains every WORD.

    mindspeed features list recompute

    To read the declarations of features in other installed packages, the command imports these features. If there are more
    than 200 of them, the command does not import them, and shows only their names and packages.
    """
    rows: Sequence[DiscoveredFeature] = installed()
    if not no_import:
        from mindspeed.plugins.discovery import discover

        others = sum(row.distribution != BUILT_IN for row in rows)
        rows = discover(only=None if others <= MANY else ()).rows
    filters = {"level": level, "slots": slot, "platforms": platform, "distribution": distribution}
    rows = [row for row in rows if _matches(row, words, filters)]
    if wants_json():
        print_json({"features": [_describe(row) for row in rows]})
        return
    _print(rows, wide)


def _matches(row: DiscoveredFeature, words: Sequence[str], filters: Mapping[str, Any]) -> bool:
    """Return whether a row has every word, and every value of a filter that was given."""
    described = _describe(row)
    feature = row.feature
    about = ""
    if feature is not None:
        about = f"{feature.spec.category.value} {feature.__doc__} {localized(feature.summary())}"
    text = f"{row.name} {about}".lower()
    if not all(word.lower().replace("_", "-") in text for word in words):
        return False
    found = {key: described[key] if isinstance(described[key], list) else [described[key]] for key in filters}
    return all(value is None or value in found[key] for key, value in filters.items())


def _print(rows: Sequence[DiscoveredFeature], wide: bool) -> None:
    if not rows:
        click.echo(gettext("no feature matches"), err=True)
    elif not wide:
        _print_by_category(rows)
    elif len(rows) <= MANY:
        print_table(HEADERS, [_cells(row) for row in rows])
    else:
        click.echo("\n".join("  ".join(cells) for cells in (HEADERS, *map(_cells, rows))))
    for row in rows:
        if row.problem is not None and row.state == "broken":
            click.echo(f"\n{row.problem.text(reader())}")
    if left_out := sum(row.state == "left out" for row in rows):
        template = gettext("{count} not loaded, because {variable} is {value!r}")
        value = os.environ.get(PLUGINS_VARIABLE, "")
        click.echo("\n" + template.format(count=left_out, variable=PLUGINS_VARIABLE, value=value))
    for name in unmatched(rows):
        click.echo(f"\n{PLUGINS_VARIABLE} names {name}, but no distribution with features has that name")


def _print_by_category(rows: Sequence[DiscoveredFeature]) -> None:
    """Print name, level and summary of each feature under its category; features that are not loaded come last."""
    groups: dict[str, list[DiscoveredFeature]] = {title: [] for title in TITLES.values()}
    for row in rows:
        groups.setdefault(TITLES[row.feature.spec.category] if row.feature is not None else row.state, []).append(row)
    names = max(len(row.name) for row in rows)
    for title, members in groups.items():
        if members:
            click.echo("\n".join(map(bold, wrapped(f"{gettext(title)} ({len(members)})"))))
            cells = [(f"{row.name:<{names}}", *_brief_cells(row)) for row in members]
            click.echo("\n".join(rows_of_cells(cells)) + "\n")
    click.echo("\n".join(wrapped(gettext("Level 0: part of Megatron; 1: on by default where safe; 2: on request."))))
    one = gettext("1 feature. Give words to filter; --wide and --json show more.")
    many = gettext("{count} features. Give words to filter; --wide and --json show more.")
    click.echo("\n".join(wrapped(one if len(rows) == 1 else many.format(count=len(rows)))))


def _brief_cells(row: DiscoveredFeature) -> tuple[str, str]:
    if row.feature is None:
        return "-", f"{row.distribution} {row.version}"
    summary = localized(row.feature.summary())
    return str(row.feature.spec.level), summary if row.distribution == BUILT_IN else f"{summary} ({row.distribution})"


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
    return (row.name, *texts, f"{row.distribution} {row.version}", row.state, localized(described["summary"] or "-"))
