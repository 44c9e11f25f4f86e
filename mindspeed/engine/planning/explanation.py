"""Explanation of one feature of a plan: its reasons, its place in the order, its settings, and the stack at its sites.

Pure: reads the plan, the declarations and source text; imports neither torch nor megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mindspeed.engine.inspection.sites import find_site
from mindspeed.engine.inspection.source import find_module, read_scope
from mindspeed.engine.planning.plan import ActivationPlan, PlannedOverride, PlannedPatch
from mindspeed.engine.resolution.planned_feature import PlannedFeature, PlanNote
from mindspeed.plugins import After, Before, Feature, Requires, UnknownValue

Features = Mapping[str, type[Feature[Any]]]
_DONE: Final = {"replace": "replaced", "mixin": "mixed into", "wrap": "wrapped", "set": "set"}


class Edge(NamedTuple):
    """``first`` comes before ``second``; ``kind`` is the constraint that requires it, declared by ``owner``."""

    first: str
    second: str
    kind: str
    owner: str
    reason: str = ""

    def __str__(self) -> str:
        because = f", because {self.reason}" if self.reason else ""
        return f"{self.first} comes before {self.second}: {self.owner} declares {self.kind}{because}"


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A name in source text. ``line`` is 0 where it is bound in compiled code, or not found."""

    name: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.name}  {self.file}:{self.line}" if self.line else self.name


@dataclass(frozen=True, slots=True)
class ExplainedPatch:
    """Explain a patch: where its target and its replacement are defined, and everything that the plan applies there, inside
    out."""

    patch: PlannedPatch
    target: SourceLocation
    code: SourceLocation | None
    chain: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that one active feature is and does in a plan. ``number`` counts from 1 in activation order."""

    feature: PlannedFeature
    number: int
    edges: tuple[Edge, ...]
    overrides: tuple[PlannedOverride, ...]
    patches: tuple[ExplainedPatch, ...]
    rows: tuple[PlanNote, ...]


def explain(plan: ActivationPlan, features: Features, name: str) -> Explanation:
    """Explain an active feature, one of the base plan too. ``features`` has the class of every feature of the plan."""
    order = (*plan.base, *plan.features)
    number = next(index for index, feature in enumerate(order, 1) if feature.name == name)
    edges = tuple(edge for edge in order_edges(plan, features) if name in (edge.first, edge.second))
    patches = tuple(_explained(plan, planned) for planned in plan.patches if planned.owner == name)
    overrides = tuple(override for override in plan.overrides if name in override.owners)
    rows = tuple(row for row in plan.rows if row.feature == name)
    return Explanation(order[number - 1], number, edges, overrides, patches, rows)


def order_edges(plan: ActivationPlan, features: Features) -> list[Edge]:
    """Every order that holds in this plan, and who declared it."""
    active = {feature.name: feature for feature in plan.features}
    holders = {slot: [f.name for f in plan.features if slot in f.slots] for feature in plan.features for slot in feature.slots}
    edges = []
    for name, planned in active.items():
        feature = features[name]
        for constraint in feature.spec.constraints:
            if not isinstance(constraint, After | Before | Requires):
                continue
            if constraint.when is not None and not _holds(constraint.when, feature.Args(**planned.args), plan.world):
                continue
            of_slot = holders.get(constraint.name, []) if isinstance(constraint, After | Before) else []
            for other in dict.fromkeys(n for n in (constraint.name, *of_slot) if n in active and n != name):
                first, second = (name, other) if isinstance(constraint, Before) else (other, name)
                edges.append(Edge(first, second, type(constraint).__name__, name, getattr(constraint, "reason", "")))
    return edges


def _holds(when: Any, args: Any, world: Any) -> bool:
    try:
        return bool(when(args, world))
    except UnknownValue:
        return False


def _explained(plan: ActivationPlan, planned: PlannedPatch) -> ExplainedPatch:
    code = code_place(planned.reference) if planned.reference is not None else None
    return ExplainedPatch(planned, target_place(planned.patch.target), code, tuple(_chain(plan.patches, planned.site)))


def _chain(patches: Iterable[PlannedPatch], site: str) -> Iterator[str]:
    """List the layers of a call, inside out: the original, then the patches of the base plan and of features."""
    kinds = list(_DONE)
    active = [planned for planned in patches if planned.site == site and not planned.skipped]
    yield "the original"
    for planned in sorted(active, key=lambda planned: (not planned.ground, kinds.index(planned.patch.kind))):
        yield f"{_DONE[planned.patch.kind]} by {planned.owner}: {planned.reference or planned.patch.value}"


def target_place(target: str) -> SourceLocation:
    """Find the line that binds the target of a patch, imports followed."""
    site = find_site(target)
    if site is not None and site.line:
        return SourceLocation(site.name, site.file, site.line)
    return code_place(target)


def code_place(reference: str, hops: int = 10) -> SourceLocation:
    """Find the definition of ``"module:qualname"`` in source text, over any number of imports."""
    module, _, path = reference.partition(":")
    found = find_module(module)
    scope = read_scope(found) if found is not None else None
    first, *rest = path.split(".")
    while found is not None and scope is not None and (binding := scope.last(first)) is not None:
        if binding.kind == "import" and hops:
            place = code_place(f"{binding.source}:{'.'.join([binding.name, *rest])}", hops - 1)
            return SourceLocation(reference, place.file, place.line)
        if not rest or binding.scope is None:
            return SourceLocation(reference, found.file or "", binding.line)
        scope, first, rest = binding.scope, rest[0], rest[1:]
    return SourceLocation(reference)
