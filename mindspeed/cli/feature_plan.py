"""``mindspeed features plan``: the activation plan of a request, every line with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from mindspeed.cli.output import json_option, print_json, wants_json
from mindspeed.cli.request_options import Request, request_options

if TYPE_CHECKING:
    from mindspeed.activation.plan import ActivationPlan, PlannedFeature, PlannedPatch


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@request_options
@json_option
def plan(request: Request, names: tuple[str, ...]) -> None:
    """Print what would be active, in which order, why, and everything it changes in Megatron."""
    made = request.naming(names).resolve()
    if wants_json():
        print_json({"problems": [], "plan": made.to_json()})
        return
    for title, lines in sections(made):
        if lines:
            click.secho(title, bold=True)
            click.echo("\n".join(f"  {line}" for line in lines))


def sections(plan: ActivationPlan) -> Iterator[tuple[str, list[str]]]:
    """The plan as text: titles with their lines; a section without lines does not apply."""
    yield "for", [_pairs(plan.environment), _pairs(plan.world.known(), but=("platform", "megatron"))]
    yield "base plan", [line for feature in plan.base for line in _settings(feature)]
    yield "features, in activation order", [line for feature in plan.features for line in _feature(feature)]
    yield (
        "Megatron arguments",
        [f"{o.override.argument} = {o.override.value!r}  {', '.join(o.owners)}: {o.override.reason}" for o in plan.overrides],
    )
    applied = [planned for planned in plan.patches if not planned.skipped]
    yield "patches of the base plan", [line for planned in applied if planned.ground for line in _patch(planned)]
    yield "patches", [line for planned in applied if not planned.ground for line in _patch(planned)]
    yield "left out", [f"{row.feature}: {row.text}" for row in plan.rows if row.kind == "left-out"]
    yield "not checked", [f"{row.feature}: {row.text}" for row in plan.rows if row.kind == "not-checked"]
    yield "notes", [f"{row.feature}: {row.text}" for row in plan.rows if row.kind == "note"]
    yield "digest", [plan.digest]


def _pairs(values: Mapping[str, object], but: tuple[str, ...] = ()) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if name not in but)


def _feature(feature: PlannedFeature) -> list[str]:
    return [
        f"{feature.name}  ({feature.distribution} {feature.version}, level {feature.level})",
        *(f"  because  {line.removeprefix(f'{feature.name}: ')}" for line in feature.why),
        *(f"  setting  {line}" for line in _settings(feature)),
    ]


def _settings(feature: PlannedFeature) -> list[str]:
    return [
        f"{feature.name}.{name} = {value.value}  ({', '.join((value.source, *(f'overrode {old}' for old in value.overrode)))})"
        for name, value in feature.settings.items()
    ]


def _patch(planned: PlannedPatch) -> list[str]:
    patch = planned.patch
    moved = [f"  defined at {planned.site}"] if planned.site != patch.target else []
    return [f"{patch.kind} {patch.target}  {planned.owner}: {patch.reason}", *moved]
