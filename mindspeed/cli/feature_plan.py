"""``mindspeed features plan``: the activation plan of a request, every line with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import click

from mindspeed.cli.job_help import JobCommand
from mindspeed.cli.names import FeatureName
from mindspeed.cli.output import json_option, print_json, wants_json
from mindspeed.cli.request_options import Request, request_options

if TYPE_CHECKING:
    from mindspeed.planning.plan import ActivationPlan, PlannedPatch
    from mindspeed.resolution.planned_feature import PlannedFeature


@click.command(cls=JobCommand)
@click.argument("names", metavar="[NAME]...", nargs=-1, type=FeatureName())
@click.option("--base", is_flag=True, help="show every target that the platform patches, not only why")
@request_options
@json_option
def plan(request: Request, names: tuple[str, ...], base: bool) -> None:
    """Print the activation plan of a request.

    What would be active, in which order and why, where each setting comes from, and everything that changes in Megatron.
    """
    made = request.naming(names).plan_of_run()
    if wants_json():
        print_json({"problems": [], "plan": made.to_json()})
        return
    show(sections(made, base))


def show(parts: Iterable[tuple[str, list[str]]]) -> None:
    """Print the parts of a plan that have lines."""
    for title, lines in parts:
        if lines:
            click.secho(title, bold=True)
            click.echo("\n".join(f"  {line}" for line in lines))


def show_briefly(plan: ActivationPlan) -> None:
    """Print what a plan makes active and why, and its digest, without its base plan."""
    show(part for part in sections(plan) if "base plan" not in part[0] and part[0] != "left out")


def sections(plan: ActivationPlan, every_target: bool = False) -> Iterator[tuple[str, list[str]]]:
    """The plan as text: titles with their lines; a section without lines does not apply.

    Without ``every_target`` the targets of the base plan are only counted.
    """
    yield "for", [_pairs(plan.environment), _pairs(plan.world.known(), but=("platform", "megatron"))]
    yield "features, in activation order", [line for feature in plan.features for line in _feature(feature)]
    yield (
        "Megatron arguments",
        [f"{o.override}  {', '.join(o.owners)}: {o.override.reason}" for o in plan.overrides],
    )
    applied = [planned for planned in plan.patches if not planned.skipped]
    own = [planned for planned in applied if planned.owner in plan.names]
    below = [planned for planned in applied if planned.owner not in plan.names]
    yield "patches", _patches(own)
    for kind, title in _ROWS.items():
        yield title, [f"{row.feature}: {row.text}" for row in plan.rows if row.kind == kind]
    yield "base plan", [line for feature in plan.base for line in _settings(feature)]
    yield "patches of the base plan", _patches(below, every_target)
    yield "digest", [plan.digest]


_ROWS: Final = {
    "warning": "warnings",
    "choice": "choices",
    "disabled": "disabled",
    "left-out": "left out",
    "not-checked": "not checked",
    "note": "notes",
}


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


def _patches(patches: Sequence[PlannedPatch], every_target: bool = True) -> list[str]:
    """List the patches by owner and reason, as one reason often holds for many targets."""
    groups: dict[tuple[str, str], list[str]] = {}
    for planned in patches:
        moved = f"  defined at {planned.site}" if planned.site != planned.patch.target else ""
        target = f"  {planned.patch.kind} {planned.patch.target}{moved}"
        groups.setdefault((planned.owner, planned.patch.reason), []).append(target)
    if every_target:
        return [line for (owner, reason), targets in groups.items() for line in (f"{owner}: {reason}", *targets)]
    return [f"{owner}: {reason}  ({len(targets)})" for (owner, reason), targets in groups.items()]
