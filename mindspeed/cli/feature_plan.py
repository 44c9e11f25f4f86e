"""``mindspeed features plan``: the activation plan of a request, every line with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import click

from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.request_options import Request, names_argument, request_options
from mindspeed.cli.training_command import PlansCommands, plan_of_command, script_option

if TYPE_CHECKING:
    from mindspeed.engine.planning.plan import ActivationPlan, PlannedPatch
    from mindspeed.engine.resolution.planned_feature import PlannedFeature


@click.command(cls=PlansCommands)
@names_argument("[NAME]...")
@click.option("--memory", is_flag=True, help="show what each pipeline stage holds at its peak, in MiB")
@click.option("--base", is_flag=True, help="show every target that the platform patches, not only why")
@script_option
@request_options
@json_option
def plan(request: Request, names: tuple[str, ...], memory: bool, base: bool, script: str | None) -> None:
    """Print the activation plan of a request.

    What would be active, in which order and why, where each setting comes from, and everything that changes in Megatron.

    For a command of Megatron-LM, from words or from the script that starts it:

    mindspeed features plan -- pretrain_gpt.py --num-layers 2 --use-fused-rmsnorm ...

    mindspeed features plan --platform npu --script pretrain_llama.sh
    """
    request = request.naming(names)
    made = plan_of_command(request, script) or request.plan_of_run()
    if not memory:
        print_result({"problems": [], "plan": made}, as_lines(sections(made, base)))
        return
    from mindspeed.diagnostics.job_memory import peaks, summary

    data = {"problems": [], "plan": made, "memory": peaks(made)}
    print_result(data, as_lines([*sections(made, base), ("memory", summary(made))]))


def as_lines(parts: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    """The parts of a plan that have lines, indented below their titles."""
    for title, lines in parts:
        if lines:
            yield click.style(title, bold=True)
            yield from (f"  {line}" for line in lines)


def brief_lines(plan: ActivationPlan) -> Iterator[str]:
    """The features that a plan makes active and why, and its digest, without its base plan."""
    return as_lines(part for part in sections(plan) if "base plan" not in part[0] and part[0] != "left out")


def sections(plan: ActivationPlan, every_target: bool = False) -> Iterator[tuple[str, list[str]]]:
    """The plan as text: titles with their lines; a section without lines does not apply.

    Without ``every_target`` the targets of the base plan are only counted.
    """
    yield "for", [_pairs(plan.environment), _pairs(plan.world.known(), but=("platform", "megatron"))]
    yield "features, in activation order", [line for feature in plan.features for line in _feature(feature)]
    yield "Megatron arguments", [f"{o.override}  {', '.join(o.owners)}: {o.override.reason}" for o in plan.overrides]
    applied = [planned for planned in plan.patches if not planned.skipped]
    yield "patches", _patches([planned for planned in applied if planned.owner in plan.names])
    for kind, title in _ROWS.items():
        yield title, [f"{row.feature}: {row.text}" for row in plan.rows if row.kind == kind]
    yield "base plan", [line for feature in plan.base for line in setting_lines(feature)]
    below = [planned for planned in applied if planned.owner not in plan.names]
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
        *(f"  because  {line}" for line in reason_lines(feature)),
        *(f"  setting  {line}" for line in setting_lines(feature)),
    ]


def reason_lines(feature: PlannedFeature) -> list[str]:
    """A line for each reason of a feature, from its own to the request."""
    return [str(reason) if reason.feature == feature.name else reason.line for reason in feature.why]


def setting_lines(feature: PlannedFeature) -> list[str]:
    """A line for each setting of a feature, with its source and what it overrode."""
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
