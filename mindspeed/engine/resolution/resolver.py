"""The resolver: a pure function from a request to active features in order, or to all problems.

Deciding a fixed request is unit propagation, so every phase is linear: settings, world, requirements to a fixed point, slots
and conflicts, conditions, order. Predicates read only their feature's own arguments and the job; one that reads an unknown
value is *not checked*. The search of a layout asks the same code about many jobs at once (`mindspeed.engine.resolution.jobs`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from operator import and_, methodcaller
from typing import Any

from mindspeed._version import __version__
from mindspeed.engine.resolution import constraint_checks
from mindspeed.engine.resolution.environment import Environment
from mindspeed.engine.resolution.jobs import Jobs, JobSet, NotUniform
from mindspeed.engine.resolution.level_one import leave_out_excluded, leave_out_refused, level_one, refusals
from mindspeed.engine.resolution.pattern_checks import check_pattern
from mindspeed.engine.resolution.planned_feature import PlannedFeature, PlanNote, Reason, ReasonKind
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.request_merge import merge
from mindspeed.engine.resolution.resolution_state import (
    HasVariant,
    Measurements,
    ResolutionState,
    Suggestions,
    because,
    nothing_measured,
)
from mindspeed.engine.resolution.slot_selection import Root, select_holders
from mindspeed.job.world import FIELDS, PARALLEL_SIZES, World, size_name
from mindspeed.plugins import After, Before, Feature, FeatureArgs, Requires
from mindspeed.plugins.discovery import BUILT_IN, Catalog
from mindspeed.problems import Fix, Fixes, Problem, Text, suggestion
from mindspeed.process.gc_pause import collector_paused


@dataclass(slots=True)
class Resolution:
    """The decision of the resolver. Without problems, ``features`` is the activation order."""

    world: World
    level: int
    strict: bool = False
    features: tuple[PlannedFeature, ...] = ()
    base: tuple[PlannedFeature, ...] = ()
    args: dict[str, FeatureArgs] = field(default_factory=dict)
    rows: list[PlanNote] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def every_variant(op: str, platform: str) -> bool:
    """Return True: without knowledge of a platform every operator is assumed to have a variant."""
    return True


def resolve(
    layers: Sequence[Layer],
    catalog: Catalog,
    environment: Environment,
    base: Sequence[type[Feature[Any]]] = (),
    has_variant: HasVariant = every_variant,
    runs: HasVariant | None = None,
    suggestions: Suggestions = "declared",
    measurements: Measurements = nothing_measured,
) -> Resolution:
    """Decide a request. Pure and total: never raises for bad input, reports every problem it can find.

    ``base`` are the plugins of level 0 that every plan has; only their settings are decided here. ``has_variant`` tells
    what a platform has, and ``measurements`` what was measured here, by which level 1 decides; ``runs`` what runs here, of
    which rows tell. ``suggestions`` are the fixes that problems of features get.
    """
    with collector_paused():
        merged = merge(layers, catalog, environment)
        runs = runs or has_variant
        state = ResolutionState(merged, catalog, base, has_variant, runs, suggestions=suggestions, measurements=measurements)
        order = _decide(state, environment)
        constraint_checks.add_notes(state)
        return _resolution(state, order)


@dataclass(frozen=True, slots=True)
class Feasible:
    """The jobs, of several, in which a request is accepted, and in which each feature is active, in plan order."""

    jobs: JobSet
    active: Mapping[str, JobSet]


def feasible(
    layers: Sequence[Layer],
    catalog: Catalog,
    environment: Environment,
    jobs: Jobs,
    has_variant: HasVariant = every_variant,
) -> Feasible:
    """Decide one request for several jobs together: in which of them `resolve` would find no problem."""
    accepted: JobSet = 0
    active: dict[str, JobSet] = {}
    pending = [jobs.everything]
    with collector_paused():
        while pending:
            scope = pending.pop()
            state = ResolutionState(merge(layers, catalog, environment), catalog, (), has_variant, has_variant, jobs, scope)
            try:
                order = _decide(state, environment)
            except NotUniform as differ:
                pending += [part for part in (scope & differ.jobs, scope & ~differ.jobs) if part]
                continue
            accepted |= scope & ~state.refused
            for name in order:
                active[name] = active.get(name, 0) | state.where[name]
    return Feasible(accepted, active)


def _decide(state: ResolutionState, environment: Environment) -> list[str]:
    """Find the active features and every problem; return the features in their order."""
    for problem in environment.problems():
        state.report(problem, state.scope)
    check_pattern(state)
    state.add_base_values()
    _propagate(state, _roots(state))
    if state.merged.level >= 1 and not state.merged.only:
        state.complete_world()  # level 1 asks about the job that the request makes
        _propagate(state, level_one(state))
    while named := list(select_holders(state)):
        _propagate(state, iter(named))
    leave_out_excluded(state)
    state.complete_world()
    while leave_out_refused(state):
        state.complete_world()
    state.freeze()
    constraint_checks.check_sizes(state)
    constraint_checks.check_moe_layers(state)
    _report_idle_settings(state)
    constraint_checks.check_choices(state)
    constraint_checks.check_slots(state)
    constraint_checks.check_conflicts(state)
    constraint_checks.check_capabilities(state)
    constraint_checks.check_platforms(state)
    constraint_checks.check_operators(state)
    constraint_checks.check_given_fields(state)
    constraint_checks.check_conditions(state)
    return _order(state)


def _resolution(state: ResolutionState, order: Sequence[str]) -> Resolution:
    for name in state.base:
        state.args_of(name)
    result = Resolution(
        state.world, state.merged.level, state.merged.strict, args=state.args, rows=state.rows, problems=state.problems
    )
    if not state.problems:
        result.features = tuple(_planned(state, name, state.why(name)) for name in order)
        result.base = tuple(_planned(state, name, (Reason(name, ReasonKind.EVERY_PLAN),)) for name in state.base)
    return result


def _roots(state: ResolutionState) -> Iterator[Root]:
    """Every name that the request itself makes active, with its reason."""
    for name, layer in state.merged.requested.items():
        if name in state.merged.disabled:
            continue
        if name in state.merged.without:
            removal = state.merged.without[name].source
            text = Text.of(
                "{name} is requested ({source}) and removed ({removal})", name=name, source=layer.source, removal=removal
            )
            option = state.merged.without[name].option
            fix = (Fix.drop_option(option) if option else Fix.keep_feature(name), Fix.remove_feature(name))
            state.report(Problem("MS210", text, (name,), fix=fix), state.scope)
        elif state.known(name, layer.source):
            if state.specs[name].level > state.merged.level:
                level = state.specs[name].level
                text = Text.of(
                    "{name} has optimization level {level}, but the level of this job is {allowed}",
                    name=name,
                    level=level,
                    allowed=state.merged.level,
                )
                state.report(Problem("MS207", text, (name,), fix=Fix.give_option("--optimization-level", level)), state.scope)
            kind = ReasonKind.ARGUMENT if layer.option else ReasonKind.REQUESTED
            yield name, Reason(name, kind, source=layer.source), state.scope
    for name, layer in state.merged.without.items():
        if name not in state.merged.requested and name not in state.catalog.not_loaded:
            state.known(name, layer.source)
    for name, layer in state.merged.withdrawn.items():
        removal = state.merged.without[name].source
        state.note(
            "note", name, Text.of("{source} requests it, but {removal} removes it", source=layer.source, removal=removal)
        )
    state.rows += _disabled(state)
    yield from _owners_of_sizes(state)
    yield from _followers(state)


def _disabled(state: ResolutionState) -> Iterator[PlanNote]:
    """List the features that the off-switch removes, and warn of names that are no feature."""
    for name, layer in state.merged.disabled.items():
        if name in state.catalog.names:
            asked = state.merged.requested.get(name)
            text = Text.of("removed by {source}", source=layer.source)
            if asked is not None:
                text = Text.of("{removed}, though requested ({source})", removed=text, source=asked.source)
            yield PlanNote("disabled", name, text)
        else:
            fix = suggestion(state.catalog.near(name), "mindspeed features list shows every name")
            yield PlanNote("warning", name, f"{layer.source} names {name}, which is not a feature; {fix}")


def _owners_of_sizes(state: ResolutionState) -> Iterator[Root]:
    for size in (*PARALLEL_SIZES, "dp"):
        owner, _ = state.catalog.owners.get(size, ("", None))
        for value, jobs in state.values(("size", size), partial(_size_in, size)):
            if value <= 1 or (size == "dp" and (state.merged.only or (state.is_single and _is_platform_alone(state)))):
                continue
            if owner and not state.merged.removal(owner):
                yield owner, Reason(owner, ReasonKind.SIZE, name=size, value=value), jobs
            elif size != "dp":
                state.report(_size_problem(state, size, value, owner), jobs)


def _followers(state: ResolutionState) -> Iterator[Root]:
    """Yield every feature that a flag of the job adds, and add a row for each that is for other jobs."""
    for name, flag in state.catalog.following.items():
        if name in state.merged.requested:
            continue
        if state.merged.removal(name):
            state.withdraw(flag)
            continue
        for is_set, jobs in state.values(("flag", flag), methodcaller("is_set", flag)):
            for refusal, here in refusals(state, name, selecting=True) if is_set else ():
                if refusal:
                    state.note("left-out", name, refusal)
                else:
                    yield name, Reason(name, ReasonKind.FIELD, name=flag, note=FIELDS[flag].meaning), jobs & here


def _size_in(size: str, world: World) -> int:
    """Return a parallel size of a job, 1 where it is not known."""
    return int(getattr(world, size)) if world.knows(size) else 1


def _size_problem(state: ResolutionState, size: str, value: int, owner: str) -> Problem:
    """The problem of a size above one whose feature is removed or not installed."""
    said = Text.of("the {size} is {value}", size=Text.plain(size_name(size)), value=value)
    if removal := state.merged.removal(owner):
        code, source = removal
        way = Fix.advise(f"leave {owner} on") if code == "MS211" else Fix.keep_feature(owner)
        text = Text.of("{said}, but {source} removes {owner}, which provides it", said=said, source=source, owner=owner)
        return Problem(code, text, (owner,), fix=(Fix.give_field(size, 1), way), facts=state.facts(size))
    fix: Fixes = (Fix.give_field(size, 1),)
    text = Text.of("{said}, but no installed feature provides this parallelism", said=said)
    if state.catalog.not_loaded:
        text = Text.of("{said}, but no feature that is built in or named in the request provides this parallelism", said=said)
        fix += (Fix.advise("request the feature of an installed package that provides this parallelism"),)
    return Problem("MS209", text, fix=fix, facts=state.facts(size))


def _is_platform_alone(state: ResolutionState) -> bool:
    """Return whether level 0 is wanted without features, settings, sizes or batches: a program that lays out its own ranks."""
    merged, world = state.merged, state.world
    wanted = [*merged.requested, *(name for name in merged.settings if name not in state.base)]
    layout = [size for size in PARALLEL_SIZES if world.knows(size) and getattr(world, size) > 1]
    return not (merged.level or wanted or layout or world.knows("global_batch_size"))


def _propagate(state: ResolutionState, roots: Iterator[Root]) -> None:
    queue = deque[tuple[str, JobSet]]()
    for name, why, jobs in list(roots):  # all of them before any is active: a root may depend on what is
        if not (new := state.activate(name, why, jobs)):
            continue
        queue.append((name, new))
        if why.kind is ReasonKind.LEVEL_ONE:
            state.by_level_one[name] = state.by_level_one.get(name, 0) | new
    asked = {name for name, _ in queue}
    where, strict = state.where, state.merged.strict
    requires, usable, args = state.catalog.requires, state.catalog.usable, state.args
    removed = {*state.merged.disabled, *state.merged.without}
    while queue:
        name, new = queue.popleft()
        if name not in args:
            state.args_of(name)
        for constraint in requires[name]:
            needed = constraint.name
            holding = new if constraint.when is None else new & state.holds(name, constraint)
            if not holding:
                continue
            if constraint.settings:
                state.require_settings(name, constraint, holding)
            if not (missing := holding & ~where.get(needed, 0)):
                continue
            if needed in removed or (strict and needed not in asked):
                _report_requirement(state, name, constraint, missing)
            elif needed in usable or state.known(needed, f"required by {name}"):
                state.activate(needed, Reason(needed, ReasonKind.REQUIRED, name, "", None, "", constraint.reason), missing)
                queue.append((needed, missing))


def _report_requirement(state: ResolutionState, name: str, constraint: Requires, missing: JobSet) -> None:
    """Report a requirement that the request removes, or that strict does not let in."""
    needed = constraint.name
    text = Text.of("{name} requires {needed}{because}", name=name, needed=needed, because=because(constraint.reason))
    if removal := state.merged.removal(needed):
        code, source = removal
        fix: Fixes = (Fix.keep_feature(needed), Fix.remove_feature(name))
        if code == "MS211":
            fix = (Fix.advise(f"also disable {name}, or keep {needed} enabled"),)
        text = Text.of("{text}, and {source} removes {needed}", text=text, source=source, needed=needed)
        state.problem(code, text, (name, needed), fix, missing)
    else:
        state.problem("MS204", text, (name, needed), (Fix.add_feature(needed), Fix.drop_option("--strict")), missing)


def _report_idle_settings(state: ResolutionState) -> None:
    for name, fields in state.merged.settings.items():
        sources = ", ".join(sorted({value.source for value in fields.values()}))
        if name in state.base:
            continue
        if name not in state.catalog.usable:
            if name not in state.merged.disabled:
                state.known(name, sources)
            continue
        owned = {argument for owner, argument in state.catalog.owners.values() if owner == name}
        idle = [key for key, value in fields.items() if not (key in owned and value.value == 1)]
        if name not in state.active and idle:
            state.args_of(name)
            state.note("note", name, Text.of("settings are given ({sources}), but the feature is not active", sources=sources))


def _order(state: ResolutionState) -> list[str]:
    order, cycle = _in_order([name for name in state.names if name in state.active], _declared_order(state))
    if cycle:
        jobs = reduce(and_, (state.where[name] for name in cycle))
        if jobs not in (0, state.scope):
            raise NotUniform(jobs)
        steps = tuple(_step(state, first, second) for first, second in pairwise(cycle))
        text = Text.of("the declared order of these features contradicts itself: {cycle}", cycle=" before ".join(cycle))
        state.report(
            Problem("MS206", text, tuple(cycle[:-1]), steps, fix=tuple(dict.fromkeys(map(state.removal, cycle[:-1])))), jobs
        )
    return order


def _declared_order(state: ResolutionState, *kinds: type[Any]) -> Iterator[tuple[str, str]]:
    """``(first, second)`` of every order that active features declare; After and Before also name all holders of a slot."""
    holders = state.holders
    for kind in kinds or (After, Before, Requires):
        for name, constraint in state.declared[kind]:
            if constraint.when is not None and not state.where.get(name, state.scope) & state.holds(name, constraint):
                continue
            named = constraint.name
            if kind is Before:
                yield from ((name, other) for other in (named, *holders.get(named, ())) if other != name)
            elif named != name:
                yield named, name
            if kind is After and named in holders:
                yield from ((other, name) for other in holders[named] if other != name)


def _step(state: ResolutionState, first: str, second: str) -> str:
    by_second = (first, second) in _declared_order(state, After, Requires)
    return f"{first} comes before {second}, declared by {second if by_second else first}"


def _planned(state: ResolutionState, name: str, why: tuple[Reason, ...]) -> PlannedFeature:
    row, spec = state.catalog.usable.get(name), state.specs[name]
    distribution, version = (row.distribution, row.version) if row else (BUILT_IN, __version__)
    settings = state.arguments.settings_of(name, state.args[name])
    slots = tuple(sorted(state.held_slots(name))) if spec.slots else ()
    return PlannedFeature(name, distribution, version, why, settings, spec.level, slots)


def _in_order(names: Sequence[str], edges: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Sort sorted names by ``(first, second)`` edges; an edge to any other name is ignored.

    Returns the order, and a cycle from its smallest name back to it, of which one is empty.
    """
    place = {name: number for number, name in enumerate(names)}
    missing = [0] * len(place)
    following: list[list[int]] = [[] for _ in place]
    for first, second in edges:
        if first in place and second in place:
            number = place[second]
            missing[number] += 1
            following[place[first]].append(number)
    ready, order = [number for number, count in enumerate(missing) if not count], list[str]()
    while ready:  # a sorted list is a heap
        number = heapq.heappop(ready)
        order.append(names[number])
        for other in following[number]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, other)
    return (order, []) if len(order) == len(place) else ([], [names[number] for number in _cycle(following)])


def _cycle(following: Sequence[Sequence[int]]) -> list[int]:
    """Return a cycle of a graph that has one, from its smallest number back to it."""
    try:
        TopologicalSorter(dict(enumerate(following))).prepare()
    except CycleError as error:
        cycle = error.args[1][:-1][::-1]
        start = cycle.index(min(cycle))
        return [*cycle[start:], *cycle[: start + 1]]
    return []
