"""``mindspeed features graph``: requirements, conflicts, order and slots of a job or of all features."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from mindspeed.cli.output import json_option, print_result
from mindspeed.cli.request_options import JobCommand, Request, names_argument, request_options
from mindspeed.plugins import After, Before, Conflicts, ModelCondition, Requires, RequiresAny, RequiresCapability, RequiresSlot

if TYPE_CHECKING:
    from mindspeed.plugins.feature import Feature

_VERBS: Final = {Requires: "requires", Conflicts: "conflicts with", After: "comes after"}
_STYLES: Final = {
    "requires": "",
    "needs one of": "style=dashed",
    "needs a capability of": "style=dashed",
    "conflicts with": 'color=red, dir=none, constraint=false, label="conflict"',
    "comes after": "style=dotted, constraint=false",
}
"""Kinds of relations, and how each is drawn."""


@dataclass(frozen=True, slots=True)
class Relation:
    """``source`` declares that it requires, conflicts with ... ``target``, a feature or a slot; sometimes conditionally."""

    source: str
    kind: str
    target: str
    reason: str = ""
    conditional: bool = False


@click.command(cls=JobCommand)
@names_argument("[NAME]...")
@click.option(
    "--format",
    "style",
    type=click.Choice(("text", "dot")),
    default="text",
    help="Output format. dot = input for Graphviz  [default: text]",
)
@request_options
@json_option
def graph(request: Request, names: tuple[str, ...], style: str) -> None:
    """Show which features require, precede or replace others, or conflict with them.

    Shows the features of a job, or all features when no job is given. It also shows slots: roles, such as
    pipeline-schedule, that only one active feature can have. Draw the graph with Graphviz:

    mindspeed features graph --format dot | dot -Tsvg > features.svg
    """
    from mindspeed.registry import catalog, catalog_for

    job = request.naming(names)
    if any(layer.features or layer.world or layer.settings for layer in job.layers):
        order = job.plan_of_run().names
        known = catalog_for(order)
    else:
        known = catalog()
        order = tuple(known.usable)
    features = [known.feature(name) for name in order]
    relations = [relation for relation in _relations(features) if relation.source in order and _shown(relation, order)]
    slots = _slots(features)
    lines = (_dot if style == "dot" else _text)(order, relations, slots)
    print_result({"features": list(order), "relations": list(map(asdict, relations)), "slots": slots}, lines)


def _relations(features: Iterable[type[Feature[Any]]]) -> Iterator[Relation]:
    for feature in features:
        name = feature.spec.name
        for constraint in feature.spec.constraints:
            if isinstance(constraint, ModelCondition):
                continue
            when, reason = constraint.when is not None, getattr(constraint, "reason", "")
            match constraint:
                case RequiresAny():
                    yield from (Relation(name, "needs one of", other, reason, when) for other in constraint.names)
                case RequiresSlot():
                    yield Relation(name, "requires", f"slot {constraint.slot}", reason, when)
                case RequiresCapability():
                    because = ", because ".join(filter(None, (constraint.capability, reason)))
                    yield Relation(name, "needs a capability of", f"slot {constraint.slot}", because, when)
                case Before():
                    yield Relation(constraint.name, "comes after", name, reason, when)
                case Requires() | Conflicts() | After():
                    yield Relation(name, _VERBS[type(constraint)], constraint.name, reason, when)


def _shown(relation: Relation, order: Sequence[str]) -> bool:
    """Relations with features that are not in the graph are left out, except for conflicts with slots and needed slots."""
    return relation.target in order or relation.target.startswith("slot ") or relation.kind == "conflicts with"


def _slots(features: Iterable[type[Feature[Any]]]) -> dict[str, list[str]]:
    holders: dict[str, list[str]] = {}
    for feature in features:
        for slot in sorted(feature.spec.slots):
            holders.setdefault(slot, []).append(feature.spec.name)
    return dict(sorted(holders.items()))


def _text(order: Sequence[str], relations: Sequence[Relation], slots: dict[str, list[str]]) -> Iterator[str]:
    for name in order:
        yield name
        for relation in relations:
            if relation.source == name:
                because = f", because {relation.reason}" if relation.reason else ""
                yield f"  {relation.kind} {relation.target}{' (with some settings)' if relation.conditional else ''}{because}"
        yield from (f"  holds slot {slot}" for slot, holders in slots.items() if name in holders)


def _dot(order: Sequence[str], relations: Sequence[Relation], slots: dict[str, list[str]]) -> Iterator[str]:
    yield "digraph features {"
    yield '  rankdir=LR; node [shape=box, fontname="sans-serif"]; edge [fontname="sans-serif", fontsize=10];'
    yield from (f'  "{name}";' for name in order)
    others = {relation.target for relation in relations} - {*order}
    named = {f"slot {slot}" for slot in slots} | {other for other in others if other.startswith("slot ")}
    yield from (f'  "{slot}" [shape=ellipse, style=dashed];' for slot in sorted(named))
    for slot, holders in slots.items():
        yield from (f'  "{name}" -> "slot {slot}" [style=dashed, dir=none];' for name in holders)
    for relation in relations:
        target = f"slot {relation.target}" if relation.target in slots else relation.target
        yield f'  "{relation.source}" -> "{target}"{f" [{_STYLES[relation.kind]}]" if _STYLES[relation.kind] else ""};'
    yield "}"
