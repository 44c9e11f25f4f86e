"""A plan as a graph: what is requested, what becomes active and why, and which modules of Megatron that changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.planned_feature import PlannedFeature, Reason, ReasonKind
from mindspeed.workbench.pictures.drawing import Flow, Node, Picture

_REQUESTED: Final = (ReasonKind.REQUESTED, ReasonKind.ARGUMENT)
_LONGEST: Final = 44
"""Characters of a line."""
_LINES: Final = 6
"""Lines of a box."""
_REQUEST_COLOUR, _FEATURE_COLOUR, _ADDED_COLOUR, _ARGUMENT_COLOUR, _MODULE_COLOUR = 3, 0, 1, 2, 4


def plan_graph(plan: ActivationPlan, title: str, text: str, calls: Mapping[str, int] | None = None) -> Picture | None:
    """Draw a plan; None where it has no feature. ``calls`` are those of patched sites on the first rank of a run, if known."""
    if not plan.features:
        return None
    requested = [feature.name for feature in plan.features if is_requested(feature)]
    arguments = _arguments(plan)
    modules = _modules(plan, calls or {})
    changes = [Node("arguments", _short(lines), _ARGUMENT_COLOUR) for lines in arguments.values()]
    changes += [Node(name, _short(lines.values()), _MODULE_COLOUR) for name, (_, lines) in modules.items()]
    active = [
        Node(feature.name, _cut(reason_of(feature)), _FEATURE_COLOUR if is_requested(feature) else _ADDED_COLOUR)
        for feature in plan.features
    ]
    columns = [
        ("requested", [Node(name, "", _REQUEST_COLOUR) for name in requested]),
        ("active, in this order", active),
        ("changes in Megatron", changes),
    ]
    rows = {name: row for row, name in enumerate(plan.names)}
    edges = [((0, row), (1, rows[name])) for row, name in enumerate(requested)]
    edges += [
        ((0, requested.index(why.by)), (1, rows[feature.name]))
        for feature in plan.features
        for why in feature.why
        if why.by in requested and feature.name not in requested
    ]
    edges += [((1, rows[owner]), (2, row)) for row, owner in enumerate(arguments)]
    for row, (owners, _) in enumerate(modules.values(), len(arguments)):
        edges += [((1, rows[owner]), (2, row)) for owner in owners]
    if not requested:  # level 1 alone has chosen
        columns, edges = columns[1:], [((a - 1, b), (c - 1, d)) for (a, b), (c, d) in edges]
    columns = [column for column in columns if column[1]]
    return Picture("plan", title, text, ((Flow(columns, edges),),))


def is_requested(feature: PlannedFeature) -> bool:
    """Return whether the user names a feature."""
    return any(why.feature == feature.name and why.kind in _REQUESTED for why in feature.why)


def reason_of(feature: PlannedFeature) -> str:
    """Return the first reason of a feature, without the note of its author."""
    why: Reason = feature.why[0]
    return "requested" if why.kind is ReasonKind.REQUESTED else str(why._replace(note="") if why.by else why)


def _arguments(plan: ActivationPlan) -> dict[str, list[str]]:
    """Return the arguments that each feature sets first, as lines."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for planned in plan.overrides:
        if owners := [owner for owner in planned.owners if owner in plan.names]:
            found[owners[0]].append(f"{planned.override.argument} = {planned.override.value}")
    return {name: found[name] for name in plan.names if name in found}


def _modules(plan: ActivationPlan, calls: Mapping[str, int]) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return for each module of Megatron the features that patch it, and a line for each patched name."""
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    for planned in plan.patches:
        if planned.owner in plan.names and not planned.skipped:
            module, _, name = planned.site.partition(":")
            owners, lines = found.setdefault(module.removeprefix("megatron.").removeprefix("core."), ([], {}))
            if planned.owner not in owners:
                owners.append(planned.owner)
            seen = f", {calls[planned.site]:,} calls" if calls.get(planned.site) else ""
            kinds = lines.get(name, "").partition(" ")[0]
            line = f"{f'{kinds}+' if kinds else ''}{planned.patch.kind} {name}"
            lines[name] = _cut(line, _LONGEST - len(seen)) + seen
    return found


def _short(lines: Iterable[str]) -> str:
    shown = list(map(_cut, lines))
    more = [f"and {len(shown) - _LINES + 1} more"] if len(shown) > _LINES else []
    return "\n".join([*shown[: _LINES - len(more)], *more])


def _cut(text: str, most: int = _LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
